"""The client that samples and publishes on a fleet for one of TRL's trainers."""

# pyright: basic, reportMissingImports=false
# TRL is not installed where types are checked, and leaves much untyped.

import atexit
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.core.results import Rollout
from rolloutbus.trainer_adapter.frameworks.fleet import (
    FleetOptions,
    GatheredWeights,
    Pair,
    connected,
)
from rolloutbus.trainer_adapter.openai.bodies import options_of, sampling_body, sampling_of
from rolloutbus.trainer_adapter.openai.forms import form_of, grammar_of
from rolloutbus.trainer_adapter.publisher.transfer import Published


class FleetClient:
    """Samples and publishes for a trainer: those methods of TRL's `VLLMClient` that GRPO calls."""

    def __init__(self, fleet: FleetOptions) -> None:
        """Connect; raises as `connected`."""
        self._fleet = fleet
        self._client = connected(fleet)
        self._weights = GatheredWeights(self._client, fleet)
        self.last_published: Published | None = None
        self.last_rollouts: list[Rollout] = []
        """Those of the last `generate`, in its order: versions, workers, endings."""

    def get_server_info(self) -> dict[str, Any]:
        """What TRL asks before it corrects for off-policy samples."""
        # Those told are `behaviour_logprobs`: of the distribution that was sampled from.
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        features: Sequence[Mapping[str, Any] | None] | None = None,
        *,
        structured_outputs_regex: str | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        logprobs: int | None = 0,
        n: int = 1,
        **sampling: Any,  # noqa: ANN401 - as TRL names them
    ) -> dict[str, Any]:
        """Sample `n` completions of each prompt with the weights that were last published here.

        Args and result as of `VLLMClient.generate`; `generation_kwargs` are OpenAI's and vLLM's
        fields of a completion, of which each that is not known is an error.

        Raises:
            Refused: a value is wrong; `.field` names it.
            StaleVersion: another trainer has published its weights meanwhile.
            BusError: as of `RolloutClient.generate_batch`.
        """
        if features is not None:
            self.image_features(features)
        if logprobs:
            raise SettingsError(f"logprobs={logprobs}: the sampled token's alone are told: 0")
        fields = {**sampling, "regex": structured_outputs_regex, **(generation_kwargs or {})}
        body = sampling_body(fields)
        options: GenerateOptions = {
            "policy": self._fleet.policy,
            "deadline_s": self._fleet.deadline_s,
            **options_of(body),
            **grammar_of(form_of(body)),
        }
        if self.last_published is not None:
            options.setdefault("versions", f"exact:{self.last_published.version}")
        groups = self._client.generate_batch(prompts, sampling_of(body, 0), n=n, **options)
        self.last_rollouts = rollouts = [each for group in groups for each in group]
        return {
            "prompt_ids": [list(map(int, prompt)) for prompt in prompts],
            "completion_ids": [each.tokens.tolist() for each in rollouts],
            "logprobs": [
                [[value] for value in each.behaviour_logprobs.tolist()] for each in rollouts
            ],
            "logprob_token_ids": [[[token] for token in each.tokens.tolist()] for each in rollouts],
        }

    def image_features(self, images: object) -> NoReturn:
        """Refuse: prompts with images do not go this way."""
        del images
        raise SettingsError("images reach a fleet as `media` of RolloutClient.generate, not by TRL")

    def publish(self, tensors: Iterator[Pair]) -> Published:
        """Bring weights to the workers; see `GatheredWeights.publish`."""
        self.last_published = self._weights.publish(tensors)
        return self.last_published

    def close(self) -> None:
        """Disconnect. Idempotent."""
        atexit.unregister(self._client.close)
        self._client.close()
