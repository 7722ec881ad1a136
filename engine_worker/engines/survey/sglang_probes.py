"""What the installed SGLang can do, found by looking and not by its version."""

import inspect
from collections.abc import Callable, Iterator
from typing import NamedTuple

from engine_worker.engines.sglang import upstream
from engine_worker.engines.survey.finding import Finding

MANAGER = "managers.tokenizer_manager:TokenizerManager"
REQUESTS = "managers.io_struct"


class Probe(NamedTuple):
    """A feature and what it changes for users of the bus."""

    name: str
    is_there: Callable[[], bool]
    with_it: str
    without: str


def _has(path: str) -> Callable[[], bool]:
    return lambda: upstream.found(path) is not None


def _takes(request: str, field: str) -> Callable[[], bool]:
    def look() -> bool:
        struct = upstream.found(f"{REQUESTS}:{request}")
        return isinstance(struct, type) and field in upstream.fields_of(struct)

    return look


def _may_flush_while_requests_wait() -> bool:
    is_idle = upstream.found("managers.scheduler:Scheduler.is_fully_idle")
    return callable(is_idle) and "ignore_waiting" in inspect.signature(is_idle).parameters


PROBES = (
    Probe(
        "scheduler hooks",
        _has("plugins.hook_registry:HookRegistry"),
        "tokens are tapped at each step",
        "this worker cannot run on it",
    ),
    Probe(
        "weight sessions",
        _has(f"{MANAGER}.begin_weight_update"),
        "quantized weights can be updated",
        "quantized weights that were repacked cannot be updated",
    ),
    Probe(
        "version spans",
        _takes("AbortReq", "weight_versions"),
        "SGLang attests the version of each token as well",
        "versions of tokens are attested by the worker alone",
    ),
    Probe(
        "flush while requests wait",
        _may_flush_while_requests_wait,
        "the prefix cache can be emptied while requests wait",
        "old prefixes are kept apart by a name per version until they are evicted",
    ),
    Probe(
        "prefix namespaces",
        _takes("GenerateReqInput", "extra_key"),
        "no request meets a prefix of older weights",
        "the prefix cache is emptied at each update",
    ),
    Probe(
        "sampling mask",
        _takes("GenerateReqInput", "return_sampling_mask"),
        "behaviour logprobs under top-k, top-p and min-p are exact",
        "no behaviour logprobs under top-k, top-p or min-p",
    ),
    Probe(
        "routed experts",
        _takes("GenerateReqInput", "return_routed_experts"),
        "the experts of each token can be asked for",
        "not known",
    ),
    Probe(
        "remote save",
        _has("entrypoints.engine:Engine.save_remote_model"),
        "weights can be saved to remote targets",
        "weights can be saved to directories only",
    ),
)


def probes() -> Iterator[Finding]:
    """One for SGLang itself, then one for each feature."""
    try:
        version = upstream.version()
        upstream.found("managers.scheduler:Scheduler")
    except ImportError as error:
        is_absent = error.name == "sglang"
        says = "not installed: pip install rolloutbus[sglang]" if is_absent else str(error)
        yield Finding("sglang", "import", "missing" if is_absent else "failed", says)
        return
    yield Finding("sglang", "import", "ok", version)
    for probe in PROBES:
        is_there = probe.is_there()
        says = probe.with_it if is_there else probe.without
        yield Finding("sglang", probe.name, "ok" if is_there else "note", says)
