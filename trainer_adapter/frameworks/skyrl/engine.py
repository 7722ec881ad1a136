"""A fleet, or one of its workers, as an inference engine of SkyRL 0.2.0 and 0.3.0.

Both versions have an `InferenceEngineInterface`; the later one's has all methods of the earlier
one's but the sizes. `FleetEngine` is the one of the version that is installed.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# SkyRL is not installed where types are checked, and leaves much untyped.

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from http import HTTPStatus
from math import prod
from typing import Any, TypeVar

try:
    from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface
except ModuleNotFoundError:  # 0.2.0
    from skyrl.backends.skyrl_train.inference_engines.base import InferenceEngineInterface

from skyrl.backends.skyrl_train.weight_sync import LoraLoadRequest

from rolloutbus.bus.actor.ref import FLEET
from rolloutbus.bus.wire.errors import BusError, Refused, SettingsError
from rolloutbus.bus.wire.messages.control import MemoryTag, ServerFacts
from rolloutbus.bus.wire.messages.generation import CloseSession
from rolloutbus.trainer_adapter.client.asks import BatchOptions, GenerateOptions
from rolloutbus.trainer_adapter.client.core.results import Rollout
from rolloutbus.trainer_adapter.frameworks.skyrl.link import FleetOptions, Link, link_of
from rolloutbus.trainer_adapter.frameworks.skyrl.sampling import Sampling, checked_input
from rolloutbus.trainer_adapter.frameworks.skyrl.weights import (
    ADAPTER,
    FleetInitInfo,
    publish_adapter,
    send_by_fleet,
)
from rolloutbus.trainer_adapter.openai.bodies import ChatBody, body_of, unsupported
from rolloutbus.trainer_adapter.openai.client import OpenAIClient
from rolloutbus.trainer_adapter.openai.prompts import ChatTokenizer, chat_prompt

_log = logging.getLogger(__name__)

T = TypeVar("T")
Json = dict[str, Any]
_SIZES = ("tp", "pp", "dp", "ep")
_LEVELS = (1, 2)
_WRONG = frozenset({"bad_request", "unsupported", "unknown_model", "result_too_large"})
"""Codes of errors that the request itself is to blame for."""


class FleetEngine(InferenceEngineInterface):
    """An engine that samples on a fleet; without a `worker`, on all its workers.

    Every coroutine may be awaited on any event loop. Pickled and unpickled, it connects anew.
    All methods raise BusError; those that answer OpenAI's requests return errors as SkyRL does.
    """

    def __init__(
        self,
        fleet: FleetOptions,
        tokenizer: ChatTokenizer,
        *,
        model_name: str = "",
        worker: str = "",
        lora: str = "",
        brings_adapters: bool = True,
    ) -> None:
        """Nothing is sent yet. See `fleet_engine` and `fleet_engines`, which read a configuration.

        Args:
            fleet: where it is.
            tokenizer: of the model; of transformers.
            model_name: what requests call the model itself, as opposed to an adapter.
            worker: name of the only worker that it uses.
            lora: adapter that samples where a request does not name a model.
            brings_adapters: False where another engine of the same client does: an adapter is
                brought to all workers at once.
        """
        send_by_fleet()
        self.fleet = fleet
        self.worker = worker
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._lora = lora
        self._brings_adapters = brings_adapters

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(
            type(self),
            model_name=self._model_name,
            worker=self.worker,
            lora=self._lora,
            brings_adapters=self._brings_adapters,
        )
        return make, (self.fleet, self._tokenizer)

    # Sampling.

    async def generate(self, input_batch: Mapping[str, Any], model: str | None = None) -> Json:
        """Sample one response for each prompt, in the order of the prompts.

        Args:
            input_batch: `prompt_token_ids`, or `prompts` which are conversations; `sampling_params`
                in vLLM's words, with `max_tokens`; `session_ids`, one per prompt.
            model: of an adapter, its name.

        Returns:
            SkyRL's `InferenceEngineOutput`. `response_logprobs` are of the distribution that was
            sampled from. Besides: `weight_versions`, for each response its [version, tokens] runs;
            `workers`; `request_ids`.

        Raises:
            Refused: a value is wrong; `.field` names it.
            BusError: as of `RolloutClient.generate_batch`.
        """
        prompts, sessions = checked_input(input_batch, self._tokenizer)
        sampling = Sampling.of(input_batch.get("sampling_params"))
        groups = await self._sampled(prompts, sampling, 1, sessions, model)
        return self._output([group[0] for group in groups], sampling)

    async def sample(
        self, prompt_token_ids: list[int], num_samples: int, sampling_params: Mapping[str, Any]
    ) -> Json:
        """Sample several responses of one prompt, side by side; see `generate`."""
        sampling = Sampling.of(sampling_params)
        [rollouts] = await self._sampled([prompt_token_ids], sampling, num_samples, None, None)
        return self._output(rollouts, sampling)

    async def chat_completion(self, request_payload: Mapping[str, Any]) -> Json:
        """Answer a conversation: OpenAI's response, or an object with `error`."""
        return await self._answered(self._openai.chat_completion, request_payload)

    async def completion(self, request_payload: Mapping[str, Any]) -> Json:
        """Continue one prompt or several: OpenAI's response, or an object with `error`."""
        return await self._answered(self._openai.completion, request_payload)

    async def render_chat_completion(self, request_payload: Mapping[str, Any]) -> Json:
        """Token ids of a conversation, by the chat template."""
        body = body_of(_with_text_session(request_payload), ChatBody)
        prompt = chat_prompt(body, self._tokenizer)
        if prompt.media:
            message = "media have places of the engine's own choice; send them to be answered"
            raise unsupported("messages", message)
        return {"model": body.model, "token_ids": prompt.tokens, "features": None}

    async def abort_generation(self) -> int:
        """Stop what this process samples through this engine; it returns what it has.

        Returns how many there were. Their `stop_reasons` are `abort`.
        """
        return await self._run(self._link.client.abort())

    # Control.

    async def pause_generation(self) -> None:
        """Freeze what runs, with its KV cache; what comes waits for `resume_generation`."""
        await self._run(self._link.client.pause(**self._target()))

    async def resume_generation(self) -> None:
        """Go on after a pause."""
        await self._run(self._link.client.resume(**self._target()))

    async def sleep(
        self, level: int = 2, tags: Sequence[MemoryTag] | None = None, *, drain: bool = False
    ) -> None:
        """Release engine memory; what runs is stopped, and goes on after `wake_up`.

        Args:
            level: changes nothing: an engine with a copy of its weights keeps it, and one without
                takes no request until new weights come.
            tags: `weights`, `kv_cache`, `cuda_graph`; None: all.
            drain: let what runs end first.
        """
        if level not in _LEVELS:
            raise SettingsError(f"sleep: a level is 1 or 2, not {level!r}")
        await self._run(
            self._link.client.sleep(tags, abort_first=not drain, drain=drain, **self._target())
        )

    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Take released memory back; None: all."""
        await self._run(self._link.client.wake_up(tags, **self._target()))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:  # noqa: FBT001, FBT002 - SkyRL's
        """Forget cached prefixes; with the flag, those of running requests too, which go on."""
        await self._run(
            self._link.client.reset_prefix_cache(
                reset_running_requests=reset_running_requests, **self._target()
            )
        )

    async def finish_session(self, session_id: Hashable) -> None:
        """The router forgets where a session was. Never raises: it runs while others clean up."""
        close = CloseSession(str(session_id))
        try:
            await self._run(self._link.client.ref().ask(close, deadline_s=10.0))
        except BusError as error:
            if getattr(error, "code", "") != "unknown_session":
                _log.warning("finish_session(%r): %s", session_id, error)

    # Weights.

    async def init_weight_update_communicator(self, init_info: object) -> None:
        """Check that weights will come: the fleet has a store, and SkyRL sends by the fleet.

        Raises:
            SettingsError: they will not.
        """
        if not isinstance(init_info, FleetInitInfo):
            raise SettingsError(
                f"weights would be sent by {type(init_info).__name__}, which no worker of a fleet "
                "receives: call send_by_fleet() in the process of the policy's workers"
            )
        if not self._link.client.bulk:
            raise SettingsError("this fleet has no weight store: bring it up with one")

    async def update_named_weights(self, request: object) -> None:
        """Bring an adapter from its directory to all workers of the policy.

        Raises:
            SettingsError: it is no adapter; other weights are published by the sender.
        """
        if not isinstance(request, LoraLoadRequest):
            raise SettingsError(
                f"update_named_weights: {type(request).__name__}: weights of the model are "
                "published by FleetWeightSender.send_chunks, not taken by engines"
            )
        if self._brings_adapters:
            name = getattr(request, "lora_name", "") or self._lora or ADAPTER
            await publish_adapter(self.fleet, name, request.lora_path)

    async def get_weight_version(self) -> int:
        """The newest version that is committed."""
        status = await self._run(self._link.client.status())
        return status.committed.get(self.fleet.policy, 0)

    def increment_weight_version(self) -> None:
        """Nothing: SkyRL counts updates to keep caches of versions apart; here they always are."""

    async def teardown(self) -> None:
        """Disconnect. Idempotent."""
        self.__dict__.pop("_openai", None)  # it has the client
        self._link.close()

    # What it is.

    @property
    def model_name(self) -> str:
        """What requests call the model itself."""
        return self._model_name

    def get_endpoint_url(self) -> str:
        """Base URL of the fleet's gateway.

        Raises:
            SettingsError: `FleetOptions.http` does not say it.
        """
        if not self.fleet.http:
            message = "FleetOptions.http: where is the gateway? `rolloutbus up --http PORT` has one"
            raise SettingsError(message)
        return self.fleet.http

    async def get_world_size(self) -> tuple[int, int]:
        """(ranks of all its workers, ranks of each)."""
        facts = await asyncio.to_thread(self._link.facts)
        sizes = _sizes_of(facts.values())
        per_worker = prod(sizes[kind] for kind in ("tp", "pp", "dp"))
        return per_worker * len(facts), per_worker

    def tp_size(self) -> int:
        """Ranks over which a worker's tensors are split."""
        return self._sizes["tp"]

    def pp_size(self) -> int:
        """Stages of a worker's pipeline."""
        return self._sizes["pp"]

    def dp_size(self) -> int:
        """Replicas within a worker."""
        return self._sizes["dp"]

    def ep_size(self) -> int:
        """Ranks over which a worker's experts are split."""
        return self._sizes["ep"]

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        return _sizes_of(self._link.facts().values())

    @functools.cached_property
    def _openai(self) -> OpenAIClient:
        return OpenAIClient(self._link.client, self._tokenizer)

    @property
    def _link(self) -> Link:
        return link_of(self.fleet, self.worker)

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await self._link.run(coroutine)

    def _target(self) -> Json:
        return {"target": self.worker or FLEET, "deadline_s": self.fleet.deadline_s}

    def _options(self, model: object) -> GenerateOptions:
        """Where and with what weights a request for this model is sampled."""
        options: GenerateOptions = {
            "policy": self.fleet.policy,
            "versions": self.fleet.versions,
            "deadline_s": self.fleet.deadline_s,
        }
        lora = self._lora if model in (None, "", self._model_name) else str(model)
        if lora:
            options["lora"] = lora
        if self.worker:
            options["worker"] = self.worker
        return options

    async def _sampled(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        n: int,
        sessions: list[str] | None,
        model: str | None,
    ) -> list[list[Rollout]]:
        options: BatchOptions = {**self._options(model), **sampling.options}
        if sessions is not None and not self.worker:  # a worker is more than a session asks for
            options["session"] = sessions
        batch = self._link.client.generate_batch(
            prompts, sampling.params, n=n, on_abort="partial", **options
        )
        return await self._run(batch)

    def _output(self, rollouts: Sequence[Rollout], sampling: Sampling) -> Json:
        told = [each.behaviour_logprobs.tolist() for each in rollouts]
        return {
            "responses": [
                sampling.text_of(each.tokens.tolist(), self._tokenizer) for each in rollouts
            ],
            "response_ids": [each.tokens.tolist() for each in rollouts],
            "stop_reasons": [each.finish_reason for each in rollouts],
            "response_logprobs": told if sampling.with_logprobs else None,
            "prompt_logprobs": None,
            "rollout_expert_indices": None,
            "weight_versions": [each.version_runs for each in rollouts],
            "workers": [each.worker for each in rollouts],
            "request_ids": [each.rid for each in rollouts],
        }

    async def _answered(
        self, answer: Callable[..., Coroutine[Any, Any, Json]], payload: Mapping[str, Any]
    ) -> Json:
        body = _with_text_session(payload)
        options = self._options(body.get("model"))
        try:
            return await self._run(answer(body, **options))
        except BusError as error:
            return _error_of(error)


def _sizes_of(facts: Iterable[ServerFacts]) -> dict[str, int]:
    """Over how many ranks each of these workers is split.

    Raises:
        SettingsError: they differ.
    """
    found = {tuple(each.parallel.get(kind, 1) for kind in _SIZES) for each in facts}
    if len(found) > 1:
        raise SettingsError("workers are split in different ways: make an engine for each")
    return dict(zip(_SIZES, found.pop(), strict=True))


def _with_text_session(payload: Mapping[str, Any]) -> Json:
    """The body of a request; SkyRL also takes numbers as session ids."""
    body = dict(payload["json"])
    if isinstance(body.get("session_id"), int):
        body["session_id"] = str(body["session_id"])
    return body


def _error_of(error: BusError) -> Json:
    """The object that SkyRL reads an error from."""
    is_wrong = isinstance(error, Refused) and error.code in _WRONG
    status = HTTPStatus.BAD_REQUEST if is_wrong else HTTPStatus.INTERNAL_SERVER_ERROR
    param = error.field if isinstance(error, Refused) else None
    told = {"message": str(error), "type": status.phrase, "param": param, "code": status.value}
    return {"error": told}
