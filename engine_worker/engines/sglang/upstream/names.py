"""Everything that is taken from the `sglang` package by name, in one place.

SGLang has no stable interface: what moves between its versions is found here by looking, never by
comparing version numbers. It is imported when its engine is built, since that takes seconds and
changes the process (event loop policy, environment).
"""

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_type_hints

from rolloutbus.engine_worker.engines.sglang.upstream.types import (
    Scheduler,
    SchedulerBatch,
    SchedulerRequest,
    SglangHandle,
    VersionRun,
)

ProcessFunction = Callable[..., None]
ModelKind = Literal["generates", "embeds", "classifies", "ranks"]
CLASSIFIERS = ("SequenceClassification", "RewardModel")
"""Parts of the names of models that give logits of classes."""


def _module(name: str) -> Any:  # noqa: ANN401 - it has no types
    return importlib.import_module(f"sglang.srt.{name}")


def run_scheduler_process(*arguments: object, **options: object) -> None:
    """SGLang's process function of a scheduler."""
    _module("managers.scheduler").run_scheduler_process(*arguments, **options)


def scheduler_arguments(
    arguments: Sequence[object], options: Mapping[str, object]
) -> Mapping[str, Any]:
    """What SGLang's process function of a scheduler was called with, by name."""
    signature = inspect.signature(_module("managers.scheduler").run_scheduler_process)
    return signature.bind(*arguments, **options).arguments


def hook_around(target: str, hook: Callable[..., Any]) -> None:
    """Have `hook(original, *args, **kwargs)` called in place of `target`, after `apply_hooks`."""
    registry = _module("plugins.hook_registry")
    registry.HookRegistry.register(target, hook, registry.HookType.AROUND)


def apply_hooks() -> None:
    """Load SGLang's plugins, which patch this process; SGLang itself does so before it builds.

    A target that it cannot patch is logged and passed over.
    """
    _module("plugins").load_plugins()


def build_engine(run_scheduler: ProcessFunction, arguments: Mapping[str, object]) -> SglangHandle:
    """Start SGLang's `Engine`, its schedulers with our process function."""
    kind = _module("entrypoints.engine").Engine
    hooks = {"run_scheduler_process_func": staticmethod(run_scheduler)}
    # SGLang settles NCCL for its schedulers in the environment that they inherit. This process
    # keeps what it had: its group with a trainer breaks when the two disagree.
    before = _nccl_settings()
    engine = type("TappedEngine", (kind,), hooks)(**arguments)
    for name in _nccl_settings().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    return engine


def _nccl_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


def resolved_arguments(engine: SglangHandle) -> Mapping[str, Any]:
    """The server's arguments as they came out in the end, by name."""
    arguments: object = engine.server_args
    resolved = getattr(arguments, "resolved_dict", None)
    if resolved is not None:
        return resolved()
    return {name: getattr(arguments, name) for name in fields_of(type(arguments))}


def flushes_beside_a_queue() -> bool:
    """Whether a paused scheduler flushes its cache although requests are queued."""
    idle = _module("managers.scheduler").Scheduler.is_fully_idle
    return "ignore_waiting" in inspect.signature(idle).parameters


def halt(scheduler: Scheduler) -> None:
    """Have a scheduler take no steps, as after a pause; on its own thread."""
    setattr(scheduler, "_engine_paused", True)  # noqa: B010 - private, and a pause would do more


def is_halted(scheduler: Scheduler) -> bool:
    """Whether a scheduler takes no steps."""
    is_paused: bool = getattr(scheduler, "_engine_paused")  # noqa: B009 - private, as above
    return is_paused


def no_batch(running: SchedulerBatch) -> object:
    """SGLang's plan of a step in which nothing is computed, and these go on running."""
    return _module("managers.schedule_batch").NextBatchPlan(
        batch_to_run=None, running_batch=running
    )


def counted_runs(request: SchedulerRequest, n_tokens: int) -> list[VersionRun]:
    """SGLang's own account of the weight versions of a request's first tokens.

    Its spans are made of the same, and leave out weights that came and went between two tokens.
    """
    events = request.weight_version_events
    versions = [event.old_version for event in events]
    stops = [event.num_output_tokens for event in events]
    current: str = _module("runtime_context").get_serving().weight_version
    return [
        VersionRun(*run)
        for run in zip([*versions, current], [0, *stops], [*stops, n_tokens], strict=True)
    ]


def stores_by_namespace() -> bool:
    """Whether a stored prefix is found only by requests of its namespace."""
    return hasattr(_module("mem_cache.utils"), "storage_namespace_seed")


def version() -> str:
    """Version of the installed package."""
    return importlib.import_module("sglang").__version__


def request(kind: str, **fields: object) -> object:
    """One of SGLang's request structs; optional fields that this version lacks are left out.

    Raises:
        TypeError: a field that carries meaning is not known; names it.
    """
    struct = getattr(_module("managers.io_struct"), kind)
    known = fields_of(struct)
    unknown = {name for name, value in fields.items() if name not in known and value}
    if unknown:
        raise TypeError(f"sglang {version()} has no {kind}.{', '.join(sorted(unknown))}")
    return struct(**{name: value for name, value in fields.items() if name in known})


def fields_of(struct: type[object]) -> frozenset[str]:
    """Names of the fields of one of SGLang's structs, whichever kind of class it is."""
    for listed in ("__struct_fields__", "__dataclass_fields__"):
        if names := getattr(struct, listed, None):
            return frozenset(names)
    raise TypeError(f"sglang {version()}: {struct.__name__} lists no fields")


def supported_architectures() -> frozenset[str]:
    """Names of the model classes that it has code for; imports them all."""
    return frozenset(_module("models.registry").ModelRegistry.get_supported_archs())


def model_kind(engine: SglangHandle) -> ModelKind:
    """What SGLang runs the engine's model for."""
    model: Any = engine.tokenizer_manager.model_config
    if model.is_generation:
        return "generates"
    architectures: Sequence[str] = model.hf_config.architectures
    if _module("configs.model_config").is_cross_encoding_pooler_model(architectures):
        return "ranks"
    is_classifier = any(part in name for name in architectures for part in CLASSIFIERS)
    return "classifies" if is_classifier else "embeds"


def server_argument_types() -> dict[str, Any]:
    """Arguments of SGLang's server: the type of each by name."""
    arguments = _module("server_args").ServerArgs
    types = get_type_hints(arguments)
    return {name: types[name] for name in fields_of(arguments)}


def http_status(error: Exception) -> int | None:
    """Status of SGLang's error for a full queue or its own failure; None: another error."""
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def abort_reason(message: str, status: int) -> object:
    """SGLang's finish reason of a request that it gives up."""
    return _module("managers.schedule_batch").FINISH_ABORT(message, status)


def stop_reason(token: int) -> object:
    """SGLang's finish reason of a request that sampled a stop token."""
    return _module("managers.schedule_batch").FINISH_MATCHED_TOKEN(matched=token)


def renormalising_kernels() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """What renormalises probabilities by top_k and by top_p on this device, as its sampler does.

    None: the sampler sorts.
    """
    if _module("runtime_context").get_exec().kernel.sampling_backend == "pytorch":
        return None
    sampler = _module("layers.sampler")
    by_top_k = getattr(sampler, "top_k_renorm_prob", None)
    by_top_p = getattr(sampler, "top_p_renorm_prob", None)
    return (by_top_k, by_top_p) if by_top_k and by_top_p else None


def has_rust_tree() -> bool:
    """Whether the prefix cache may be a tree in Rust, built into the installed package."""
    package = "sglang.srt.mem_cache.rust_tree_core"
    return bool(importlib.util.find_spec(package)) and bool(
        importlib.util.find_spec(f"{package}.mem_cache")
    )


def no_kv_event() -> object:
    """A KV event that says nothing."""
    return _module("disaggregation.kv_events").BlockRemoved(block_hashes=[])


def has_xgrammar() -> bool:
    """Whether what SGLang checks grammars with is installed."""
    return importlib.util.find_spec("xgrammar") is not None


def xgrammar() -> Any:  # noqa: ANN401 - a module
    """The package xgrammar."""
    return importlib.import_module("xgrammar")
