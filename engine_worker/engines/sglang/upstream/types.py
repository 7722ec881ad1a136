"""The part of SGLang's objects that is used here, as types."""

from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple, Protocol

SglangObject = Any
"""Something of SGLang's of which one name is used, or too many to be written down as a type.

`hooks` declares all names that are used, and they are looked for before an engine starts."""
Call = Callable[..., Coroutine[Any, Any, Any]]


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
    generate_request: Callable[[object, None], AsyncGenerator[Mapping[str, Any], None]]
    """Runs one request; yields its outputs."""
    abort_request: Callable[..., None]
    """Asks for its end; fire and forget."""
    pause_generation: Call
    continue_generation: Call
    flush_cache: Call
    """Forgets what is cached, at once or, with `timeout_s`, when nothing runs any more."""
    clear_hicache_storage: Call
    start_profile: Call
    """RuntimeError: it cannot."""
    stop_profile: Call
    """RuntimeError: there is nothing to write."""
    get_loads: Call
    """What each data parallel rank last reported of itself."""
    get_weights_by_name: Call
    close_session: Call
    get_internal_state: Call
    """Answered in the order of commands."""


class SglangHandle(Protocol):
    """SGLang's `Engine`; all calls block."""

    tokenizer_manager: TokenizerManager
    server_args: Any
    """See `upstream.resolved_arguments`."""
    save_sharded_model: Callable[..., None]
    """Writes what each rank holds. AssertionError: it could not."""
    save_remote_model: Callable[..., None]
    """Writes to a connector. AssertionError: it could not."""
    shutdown: Callable[[], None]
    """Kills every child of this process."""


class OutputStreamer(Protocol):
    """What sends a scheduler's outputs."""

    is_generation: bool


class SchedulerBatch(Protocol):
    """Requests that run together."""

    reqs: "Sequence[SchedulerRequest]"
    rolloutbus_version: int
    """Ours: of the weights that compute it. Only in a pipeline, whose results come from others."""
    rolloutbus_support: SglangObject
    """Ours: what its last draw left. Only in a pipeline, as above."""


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


class ModelRunner(Protocol):
    """What runs the model on one rank."""

    model: Model
    weight_updater: SglangObject
    """Overwrites the model of one rank. Some versions want `begin_weight_update` first."""


class Scheduler(Protocol):
    """SGLang's scheduler, in its own process."""

    running_batch: SchedulerBatch
    last_batch: SchedulerBatch | None
    waiting_queue: "Sequence[SchedulerRequest]"
    result_queue: "Sequence[tuple[SchedulerBatch, object]]"
    """Launched and not booked: with overlapped scheduling."""
    chunked_req: "SchedulerRequest | None"
    """Its prompt is computed piece by piece."""
    running_mbs: "list[SchedulerBatch]"
    """Of a stage of a pipeline, which works on several batches by turns: what `running_batch` is
    when it is their turn."""
    last_mbs: "list[SchedulerBatch | None]"
    """The same of `last_batch`."""
    mbs: "Sequence[SchedulerBatch | None]"
    """The same of what was launched last."""
    world_group: SglangObject
    """The ranks of all stages."""
    tp_worker: SglangObject
    tp_cpu_group: object
    """Of PyTorch: the ranks that hold the model between them."""
    weight_updater: SglangObject
    token_to_kv_pool_allocator: SglangObject
    tree_cache: SglangObject
    max_total_num_tokens: int
    max_req_input_len: int
    server_args: object

    pause_generation: Callable[[object], None]
    continue_generation: Callable[[object], None]
    abort_request: Callable[[object], None]
    """Ends what is queued, and soon what runs."""
    record_weight_version_change: Callable[..., None]
    """Notes how many tokens each request has until now. Missing in some versions."""
    maybe_sleep_on_idle: Callable[[], None]
    """Waits up to 1 s for something to come, if `sleep_on_idle` says so."""


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
    finished: Callable[[], bool]
