"""TRL's trainers on a fleet: what they ask of a vLLM server, the bus does.

Written for TRL 1.16. `GRPOTrainer` samples through `FleetGeneration` (see `use_fleet`) or through
`RolloutFunc`; `AsyncGRPOTrainer` takes a `FleetRolloutWorker` and its `weight_transfer`.
"""

# pyright: basic, reportMissingImports=false, reportPrivateUsage=false
# TRL is not installed where types are checked, and leaves much untyped.

import atexit
import contextvars
import functools
import logging
import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, Self

import torch
from accelerate.utils import broadcast_object_list
from transformers import AutoTokenizer, GenerationConfig
from trl.experimental.async_grpo import AsyncGRPOConfig, async_rollout_worker
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from rolloutbus.bus.wire.errors import BusError, SettingsError
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.client import RolloutClient, connect
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

_log = logging.getLogger(__name__)

N_TRIES = 3
"""Of an update that fails, before a synchronous trainer is told."""
N_KEPT = 256
"""Versions whose number in the trainer is remembered."""
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
            "logprobs": [[[value] for value in _told(each)] for each in rollouts],
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


class FleetGeneration(VLLMGeneration):
    """Samples for `GRPOTrainer` on a fleet: TRL's `VLLMGeneration` in server mode, over the bus.

    All ranks make one. The first is the fleet's client: it samples the prompts of all ranks, and
    publishes what TRL gathers from them (FSDP, DeepSpeed, merged PEFT adapters).
    """

    def __init__(self, fleet: FleetOptions, **of_trl: Any) -> None:  # noqa: ANN401 - as TRL has them
        self._fleet = fleet
        super().__init__(**of_trl)

    def _init_vllm(self) -> None:
        if self.mode != "server":
            message = f"vllm_mode={self.mode!r} runs vLLM in the trainer; a fleet wants 'server'"
            raise SettingsError(message)
        self.vllm_client = FleetClient(self._fleet) if self.accelerator.is_main_process else None
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Publish the model's weights; called by all ranks.

        Raises:
            BusError: `N_TRIES` times the workers did not take them. All ranks raise it.
        """
        problem: BusError | None = None
        for n_failed in range(1, N_TRIES + 1):
            problem = self._publish()
            # All ranks gather again, or none.
            problem = broadcast_object_list([problem], from_process=0)[0]
            if problem is None:
                return
            _log.warning("update %d of %d failed: %s", n_failed, N_TRIES, problem)
        assert problem is not None
        raise problem

    def _publish(self) -> BusError | None:
        params = self._iter_named_params()
        if self.vllm_client is None:
            for _ in params:  # to gather them takes all ranks
                pass
            return None
        try:
            self.vllm_client.publish(params)
        except BusError as error:
            return error
        return None


def use_fleet(fleet: FleetOptions) -> None:
    """Have `GRPOTrainer`s with `use_vllm=True, vllm_mode="server"` sample there from now on.

    vLLM need not be installed, and `vllm_server_base_url` and its like mean nothing then.

    Raises:
        SettingsError: this TRL has no such place; see the supported version above.
    """
    if not hasattr(grpo_trainer, "VLLMGeneration"):
        raise SettingsError("this TRL's GRPOTrainer makes no VLLMGeneration: install trl==1.16.*")
    grpo_trainer.VLLMGeneration = functools.partial(FleetGeneration, fleet)


class RolloutFunc:
    """`rollout_func` of a `GRPOTrainer`: samples on a fleet, and publishes after each step.

    Reward functions get `weight_versions`, for each completion its [version, tokens] runs.
    """

    def __init__(self, fleet: FleetOptions) -> None:
        self._fleet = fleet
        self._generation: FleetGeneration | None = None
        self._published_step = -1

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:  # noqa: ANN401
        """Sample; called by TRL on every rank with that one's prompts."""
        generation = self._generation = self._generation or self._generation_of(trainer)
        if trainer.state.global_step != self._published_step:
            generation.sync_weights()
            self._published_step = trainer.state.global_step
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)  # noqa: SLF001 - as TRL does
        n = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        prompt_ids, completion_ids, logprobs, _ = generation.generate(prompt_ids, images, n)
        client = generation.vllm_client
        runs = [] if client is None else [each.version_runs for each in client.last_rollouts]
        runs = broadcast_object_list([runs], from_process=0)[0]
        first = trainer.accelerator.process_index * len(prompts)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": [[value for (value,) in row] for row in logprobs],
            "weight_versions": runs[first : first + len(prompts)],
        }

    def _generation_of(self, trainer: Any) -> FleetGeneration:  # noqa: ANN401 - TRL's
        return FleetGeneration(
            self._fleet,
            mode="server",
            logprobs=0,
            generation_kwargs=trainer.args.generation_kwargs,
            **{
                name: getattr(trainer, name)
                for name in (
                    *("model", "accelerator", "processing_class", "repetition_penalty"),
                    *("temperature", "top_p", "top_k", "min_p", "max_completion_length"),
                )
            },
        )


class FleetWeightTransfer:
    """`weight_transfer` of an `AsyncGRPOTrainer`: publishes each step's weights.

    An update that fails leaves the workers at the older version, which their samples tell: it is
    logged, counted as `fleet/failed_updates` and made up for by the next one. `max_failed` of them
    in a row end the run.
    """

    def __init__(self, fleet: FleetOptions, worker: "FleetRolloutWorker", max_failed: int) -> None:
        self._fleet = fleet
        self._worker = worker
        self._max_failed = max_failed
        self._n_failed = 0
        self._client: FleetClient | None = None

    def init_weight_transfer(self) -> None:
        """Connect; called by TRL when training begins."""
        self._client = FleetClient(self._fleet)

    def pause(self) -> None:
        """Nothing: workers stop by themselves, for the moment of the swap."""

    def send_weights(self, iterator: Iterator[Pair]) -> None:
        """Publish what TRL gathers, one tensor at a time."""
        assert self._client is not None, "TRL calls init_weight_transfer first"
        try:
            published = self._client.publish(iterator)
        except BusError as error:
            self._n_failed += 1
            with suppress(queue.Full):
                self._worker.metrics_queue.put_nowait({"fleet/failed_updates": 1.0})
            _log.warning("update failed, %d in a row: %s", self._n_failed, error)
            if self._n_failed >= self._max_failed:
                raise
        else:
            self._n_failed = 0
            self._worker.committed(published.version)

    def resume(self) -> None:
        """Nothing; see `pause`."""

    def destroy(self) -> None:
        """Disconnect; called by TRL when training ends."""
        if self._client is not None:
            self._client.close()


_OF_CONFIG = (
    *("num_generations", "max_inflight_tasks", "queue_maxsize", "max_staleness", "temperature"),
    *("top_p", "top_k", "min_p", "repetition_penalty", "request_timeout", "chat_template_kwargs"),
    *("max_tool_calling_iterations", "log_completions", "num_completions_to_print"),
    "fork_threshold_tokens",
)
"""Settings that the worker has by the same name as `AsyncGRPOConfig`."""


class _FleetLoop(async_rollout_worker._AsyncRolloutLoop):  # noqa: SLF001 - TRL's own subclasses do
    """TRL's rollout loop (tools, environments, rewards) with tokens from a fleet."""

    def __init__(
        self,
        *,
        fleet: FleetOptions,
        max_staleness: int,
        sampling: Mapping[str, Any],
        **of_trl: Any,  # noqa: ANN401 - as TRL has them
    ) -> None:
        super().__init__(**of_trl)
        self._fleet = fleet
        self._max_staleness = max_staleness
        self._sampling = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            **sampling,
        }
        self._client: RolloutClient | None = None
        self._oldest: dict[int, int] = {}
        """Group under way -> the oldest version that sampled any of its tokens."""
        self._group = contextvars.ContextVar("group", default=0)

    @property
    def model_version(self) -> int:
        return self._model_version_value[0]

    async def _run_loops(self, stop_event: Any) -> None:  # noqa: ANN401 - TRL's
        async with connect(self._fleet.address, key_file=self._fleet.key_file) as self._client:
            await super()._run_loops(stop_event)

    async def _generate_one(self, *prompt: Any, group_id: int = 0, **more: Any) -> Any:  # noqa: ANN401
        self._group.set(group_id)
        return await super()._generate_one(*prompt, group_id=group_id, **more)

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        assert self._client is not None
        body = body_of({"prompt": (), **self._sampling}, CompletionBody)
        options: GenerateOptions = {
            "policy": self._fleet.policy,
            "deadline_s": self._fleet.deadline_s,
            "versions": f"max-staleness:{self._max_staleness}",
            **options_of(body),
        }
        rollout = await self._client.generate(prompt_ids, sampling_of(body, 0), **options)
        oldest = min((version for version, _ in rollout.version_runs), default=0)
        group = self._group.get()
        self._oldest[group] = min(oldest, self._oldest.get(group, oldest))
        return rollout.tokens.tolist(), _told(rollout)

    async def _score_group(self, group: Any) -> Any:  # noqa: ANN401 - TRL's
        oldest = self._oldest.pop(group.group_id, None)
        if oldest is not None:  # what was sampled from, not what was current when it began
            group.model_version = _number_of(oldest, self._model_version_value)
        return await super()._score_group(group)


class FleetRolloutWorker(async_rollout_worker.AsyncRolloutWorker):
    """`rollout_worker` of an `AsyncGRPOTrainer`: TRL's own, with tokens from a fleet.

    Tools, environments and rewards are TRL's, in a child process. The version of a sample is that
    of its oldest token, as the worker attests it, so `max_staleness` drops what really is stale.
    """

    _loop_cls = _FleetLoop

    def __init__(self, fleet: FleetOptions, *, max_failed_updates: int = 3, **of_trl: Any) -> None:  # noqa: ANN401
        """Arguments of TRL's `AsyncRolloutWorker`; see `of` for those of an `AsyncGRPOConfig`."""
        of_trl.setdefault("max_staleness", 3)
        of_trl.setdefault("sampling", {})
        vllm = async_rollout_worker.is_vllm_available
        async_rollout_worker.is_vllm_available = lambda: True  # it is not used
        try:
            super().__init__(fleet=fleet, **of_trl)
        finally:
            async_rollout_worker.is_vllm_available = vllm
        # [the trainer's version, then for each of the last N_KEPT the fleet's].
        self._model_version_value = self._mp_ctx.Array("q", 1 + N_KEPT)
        self._committed = 0
        self.weight_transfer = FleetWeightTransfer(fleet, self, max_failed_updates)

    @classmethod
    def of(
        cls,
        fleet: FleetOptions,
        args: AsyncGRPOConfig,
        *,
        model: str,
        train_dataset: Any,  # noqa: ANN401 - as TRL takes it
        processing_class: Any = None,  # noqa: ANN401 - as TRL takes it
        max_failed_updates: int = 3,
        **of_trl: Any,  # noqa: ANN401 - as TRL has them
    ) -> Self:
        """A worker with the settings of a trainer's config.

        Args:
            fleet: where tokens come from.
            args: the trainer's; `token_budget` must be set, which TRL else asks vLLM for.
            model: name or directory, as of the trainer.
            train_dataset: as of the trainer.
            processing_class: the model's own if None.
            max_failed_updates: so many in a row end the run.
            **of_trl: `reward_funcs`, `tools`, `environment_factory`, as of the trainer.

        Raises:
            SettingsError: `token_budget` is not set.
        """
        if args.token_budget is None:
            raise SettingsError(
                "AsyncGRPOConfig.token_budget: TRL asks a vLLM server for it if it is None; give "
                "the tokens of a longest prompt and completion together"
            )
        tokenizer = processing_class or AutoTokenizer.from_pretrained(model)
        ends = GenerationConfig.from_pretrained(model).eos_token_id
        ends = [tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
        return cls(
            fleet,
            max_failed_updates=max_failed_updates,
            model_name=model,
            dataset=train_dataset,
            processing_class=tokenizer,
            eos_token_ids=list(dict.fromkeys(each for each in ends if each is not None)),
            max_tokens=args.max_completion_length,
            **{name: getattr(args, name) for name in _OF_CONFIG},
            **of_trl,
        )

    def committed(self, version: int) -> None:
        """Remember the fleet's number of the version that the trainer counts next."""
        self._committed = version

    @property
    def model_version(self) -> int:
        """The trainer's number of its newest version."""
        return self._model_version_value[0]

    @model_version.setter
    def model_version(self, value: int) -> None:
        with self._model_version_value.get_lock():
            self._model_version_value[1 + value % N_KEPT] = self._committed
            self._model_version_value[0] = value


class _Versions(Protocol):
    def __getitem__(self, index: int) -> int: ...


def _number_of(version: int, shared: _Versions) -> int:
    """The trainer's number of the newest of its versions that is no newer than the fleet's."""
    newest = shared[0]
    for number in range(newest, max(newest - N_KEPT, -1), -1):
        if shared[1 + number % N_KEPT] <= version:
            return number
    return max(newest - N_KEPT, 0)


def _told(rollout: Rollout) -> list[float]:
    return rollout.behaviour_logprobs.tolist()


def _kept_open(tensors: Iterator[Pair], layout: Layout) -> Iterator[Pair]:
    """The same, noted in `layout`; closing it leaves `tensors` open: ranks gather the rest."""
    for name, tensor in tensors:
        layout.append((name, tensor.dtype, list(tensor.shape)))
        yield name, tensor
