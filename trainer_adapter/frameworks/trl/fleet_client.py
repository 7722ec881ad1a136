"""Where a fleet is, and the client that samples and publishes there for one of TRL's trainers."""

# pyright: basic, reportMissingImports=false
# TRL is not installed where types are checked, and leaves much untyped.

import atexit
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.core.results import Rollout
from rolloutbus.trainer_adapter.client.sync_client import connect_sync
from rolloutbus.trainer_adapter.openai.bodies import (
    CompletionBody,
    body_of,
    options_of,
    sampling_of,
)
from rolloutbus.trainer_adapter.publisher.sync_publisher import SyncWeightPublisher
from rolloutbus.trainer_adapter.publisher.transfer import Published, Requirement

Pair = tuple[str, torch.Tensor]
Layout = list[tuple[str, torch.dtype, list[int]]]


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Where a fleet is, and how a trainer uses it. Can be pickled: other processes connect anew."""

    address: str
    key_file: str = ""
    policy: str = "default"
    require: Requirement = "all"
    """How many workers must have a new version; see `WeightPublisher.publish`."""
    deadline_s: float = 600.0
    """For a batch, and for an update, seconds."""


class FleetClient:
    """Samples and publishes for a trainer: those methods of TRL's `VLLMClient` that GRPO calls."""

    def __init__(self, fleet: FleetOptions) -> None:
        """Connect.

        Raises:
            PeerLost: no router answers there.
            SettingsError: the address is not allowed without keys.
        """
        self._fleet = fleet
        self._client = connect_sync(fleet.address, key_file=fleet.key_file).open()
        atexit.register(self._client.close)
        self._publisher = SyncWeightPublisher(self._client, fleet.policy)
        self._layout: Layout | None = None
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
        """Sample `n` completions of each prompt with weights no older than the last published.

        Args and result as of `VLLMClient.generate`; `generation_kwargs` are OpenAI's and vLLM's
        fields of a completion, of which each that is not known is an error.

        Raises:
            Refused: a value is wrong; `.field` names it.
            BusError: as of `RolloutClient.generate_batch`.
        """
        if features is not None:
            self.image_features(features)
        if logprobs:
            raise SettingsError(f"logprobs={logprobs}: the sampled token's alone are told: 0")
        fields = {**sampling, "regex": structured_outputs_regex, **(generation_kwargs or {})}
        body = body_of({**fields, "prompt": ()}, CompletionBody)
        options: GenerateOptions = {
            "policy": self._fleet.policy,
            "deadline_s": self._fleet.deadline_s,
            **options_of(body),
        }
        if self.last_published is not None:
            options.setdefault("versions", f"min:{self.last_published.version}")
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
        """Bring weights to the workers, one tensor at a time; see `WeightPublisher.publish`.

        All ranks gather the tensors of a sharded model: when it fails, the rest is read, too. The
        first time they are held in host memory, because their names and shapes are not known yet.
        """
        found: Layout = []
        try:
            self.last_published = self._publisher.publish(
                _kept_open(tensors, found),
                layout=self._layout,
                require=self._fleet.require,
                deadline_s=self._fleet.deadline_s,
            )
        finally:
            for _ in tensors:
                pass
        self._layout = found
        return self.last_published

    def close(self) -> None:
        """Disconnect. Idempotent."""
        atexit.unregister(self._client.close)
        self._client.close()


def _kept_open(tensors: Iterator[Pair], layout: Layout) -> Iterator[Pair]:
    """The same, noted in `layout`; closing it leaves `tensors` open: ranks gather the rest."""
    for name, tensor in tensors:
        layout.append((name, tensor.dtype, list(tensor.shape)))
        yield name, tensor
