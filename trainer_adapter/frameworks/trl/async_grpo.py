"""`AsyncGRPOTrainer` on a fleet: TRL's own rollout worker, with tokens and versions of the bus."""

# pyright: basic, reportMissingImports=false, reportPrivateUsage=false
# TRL is not installed where types are checked, and leaves much untyped.

import contextvars
import logging
import multiprocessing
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol, Self

from transformers import AutoTokenizer, GenerationConfig
from trl.experimental.async_grpo import AsyncGRPOConfig, async_rollout_worker

from rolloutbus.bus.wire.errors import BusError, SettingsError
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.client import RolloutClient, connect
from rolloutbus.trainer_adapter.frameworks.fleet import FleetOptions, Pair
from rolloutbus.trainer_adapter.frameworks.trl.fleet_client import FleetClient
from rolloutbus.trainer_adapter.openai.bodies import options_of, sampling_body, sampling_of
from rolloutbus.trainer_adapter.openai.forms import form_of, grammar_of

_log = logging.getLogger(__name__)

N_KEPT = 256
"""Versions whose number in the trainer is remembered."""
NEVER = 2**63 - 1
"""In place of a version of the fleet: this one of the trainer's did not get there."""


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
        threading.Thread(target=_end_with_trainer, name="trainer-watch", daemon=True).start()
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
        body = sampling_body(self._sampling)
        options: GenerateOptions = {
            "policy": self._fleet.policy,
            "deadline_s": self._fleet.deadline_s,
            "versions": f"max-staleness:{self._max_staleness}",
            **options_of(body),
            **grammar_of(form_of(body)),
        }
        rollout = await self._client.generate(prompt_ids, sampling_of(body, 0), **options)
        oldest = min((version for version, _ in rollout.version_runs), default=0)
        group = self._group.get()
        self._oldest[group] = min(oldest, self._oldest.get(group, oldest))
        return rollout.tokens.tolist(), rollout.behaviour_logprobs.tolist()

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
        self._committed = NEVER
        # More of them, and no sample would be fresh enough: the trainer would wait for ever.
        max_failed = min(max_failed_updates, of_trl["max_staleness"] + 1)
        self.weight_transfer = FleetWeightTransfer(fleet, self, max_failed)

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
            max_failed_updates: so many in a row end the run; at most `args.max_staleness + 1`.
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
        self._committed = NEVER


def _end_with_trainer() -> None:
    """Wait until the trainer's process has ended, then end this one, which it has started.

    Nobody else would. A thread does it, since this process may be waiting for the trainer without
    an event loop.
    """
    trainer = multiprocessing.parent_process()
    assert trainer is not None, "TRL runs its loop in a child process"
    trainer.join()
    os._exit(1)


class _Versions(Protocol):
    def __getitem__(self, index: int) -> int: ...


def _number_of(version: int, shared: _Versions) -> int:
    """The trainer's number of the newest of its versions that is no newer than the fleet's."""
    newest = shared[0]
    for number in range(newest, max(newest - N_KEPT, -1), -1):
        if shared[1 + number % N_KEPT] <= version:
            return number
    return max(newest - N_KEPT, 0)
