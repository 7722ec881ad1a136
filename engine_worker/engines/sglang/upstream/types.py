"""The part of SGLang's objects that is used here, as types."""

from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

SglangObject = Any
"""Something of SGLang's of which one name is used, or too many to be written down as a type.

`hooks` declares all names that are used, and they are looked for before an engine starts."""


class ModelConfig(Protocol):
    """SGLang's reading of the model's config.json."""

    vocab_size: int
    context_len: int
    hf_eos_token_id: Collection[int] | None


class TokenizerManager(Protocol):
    """SGLang's front half: every call belongs on the engine's loop."""

    rid_to_state: Mapping[str, SglangObject]
    """Its `dispatched` says that a scheduler knows the request. Missing in some versions."""
    model_config: ModelConfig
    server_args: object

    def generate_request(
        self, obj: object, request: None
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Run one request; yields its outputs."""
        ...

    def abort_request(self, rid: str) -> None:
        """Ask for its end; fire and forget."""
        ...

    async def pause_generation(self, obj: object) -> None:
        """Hold or retract what runs."""
        ...

    async def continue_generation(self, obj: object) -> None:
        """Go on."""
        ...

    async def flush_cache(self, timeout_s: float | None = None) -> SglangObject:
        """Forget what is cached, at once or when nothing runs any more."""
        ...

    async def clear_hicache_storage(self) -> SglangObject:
        """Forget what is in the storage behind the caches."""
        ...

    async def start_profile(self, req: object) -> object:
        """Begin; RuntimeError: it cannot."""
        ...

    async def stop_profile(self) -> object:
        """Write it; RuntimeError: there is nothing to write."""
        ...

    async def get_loads(self) -> Sequence[SglangObject]:
        """What the schedulers last told of themselves."""
        ...

    async def get_weights_by_name(self, obj: object, request: None) -> Sequence[Any]:
        """Numbers of a weight."""
        ...

    async def close_session(self, obj: object, request: None) -> None:
        """A session's prefixes are like any others from now on."""
        ...

    async def get_internal_state(self) -> Sequence[Mapping[str, Any]]:
        """One mapping per scheduler; answered in the order of commands."""
        ...


class SglangHandle(Protocol):
    """SGLang's `Engine`."""

    tokenizer_manager: TokenizerManager
    server_args: Any
    """See `upstream.resolved_arguments`."""

    def save_sharded_model(self, *, path: str, pattern: str | None, max_size: int | None) -> None:
        """Write what each rank holds; blocks. AssertionError: it could not."""
        ...

    def save_remote_model(self, *, url: str) -> None:
        """Write to a connector; blocks. AssertionError: it could not."""
        ...

    def shutdown(self) -> None:
        """Kill every child of this process; blocks."""
        ...


class OutputStreamer(Protocol):
    """What sends a scheduler's outputs."""

    is_generation: bool
    send_to_detokenizer: SglangObject
    """Its `socket` is None on ranks that do not speak."""


class SchedulerBatch(Protocol):
    """Requests that run together."""

    reqs: "Sequence[SchedulerRequest]"


class Model(Protocol):
    """A model as SGLang runs it."""

    def parameters(self) -> Iterable[Any]:
        """Tensors, tied ones once."""
        ...

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """The same with their names."""
        ...

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> object:
        """Copy tensors of its checkpoint to where they belong."""
        ...


class WeightUpdater(Protocol):
    """Overwrites the model of one rank. Some versions want `begin_weight_update` first."""

    def update_weights_from_tensor(
        self, *, named_tensors: Sequence[tuple[str, Any]], load_format: str | None
    ) -> tuple[bool, str]:
        """Whether it did, and why not."""
        ...

    def end_weight_update(self, *, run_post_load: bool) -> None:
        """All that belongs together was written."""
        ...


class ModelRunner(Protocol):
    """What runs the model on one rank."""

    model: Model
    weight_updater: WeightUpdater


class Scheduler(Protocol):
    """SGLang's scheduler, in its own process."""

    running_batch: SchedulerBatch
    last_batch: SchedulerBatch | None
    waiting_queue: "Sequence[SchedulerRequest]"
    result_queue: "Sequence[tuple[SchedulerBatch, object]]"
    """Launched and not booked: with overlapped scheduling."""
    chunked_req: "SchedulerRequest | None"
    """Its prompt is computed piece by piece."""
    tp_worker: SglangObject
    tp_cpu_group: object
    """Of PyTorch: the ranks that hold the model between them."""
    weight_updater: SglangObject
    ipc_channels: SglangObject
    token_to_kv_pool_allocator: SglangObject
    tree_cache: SglangObject
    max_total_num_tokens: int
    server_args: object

    def pause_generation(self, recv_req: object) -> None:
        """Hold or retract what runs."""
        ...

    def continue_generation(self, recv_req: object) -> None:
        """Take steps again."""
        ...

    def abort_request(self, recv_req: object) -> None:
        """End what is queued, and soon what runs."""
        ...

    def record_weight_version_change(self, new_version: str) -> None:
        """Note how many tokens each request has until now. Missing in some versions."""
        ...

    def maybe_sleep_on_idle(self) -> None:
        """Wait up to 1 s for something to come, if `sleep_on_idle` says so."""
        ...


class VersionRun(NamedTuple):
    """Tokens of one version, one after another."""

    version: str
    start: int
    """The first of them, by its place in the output."""
    stop: int


class SchedulerRequest(Protocol):
    """A request inside a scheduler."""

    rid: str
    output_ids: Sequence[int]
    finished_len: int | None
    finished_reason: SglangObject | None
    finished_output: bool | None
    logprob: SglangObject
    sampling_params: SglangObject
    rolloutbus_told: int
    """Ours: how many of its tokens have left. Not there before the first."""
    rolloutbus_versions: "Sequence[VersionRun]"
    """Ours: of the tokens that left before the last change. Not there before the first."""
    weight_version_events: Sequence[SglangObject]
    """SGLang's account of such changes. Missing in some versions."""
    extra_key: str | None
    """Namespace in the prefix cache."""
    rolloutbus_extra_key: str | None
    """Ours: what that would be for weights that never change. Not there before it is queued."""

    def finished(self) -> bool:
        """Whether it has ended."""
        ...
