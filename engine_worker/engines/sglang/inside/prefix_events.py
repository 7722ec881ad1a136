"""Keeps out of SGLang's KV events what no new request would find.

Its events do not tell namespaces apart, and those of older weights and of adapters hold the same
tokens: without this, KV that nobody can use would be told as cached, and its eviction as that of KV
which is still there.
"""

from collections.abc import Callable, Iterator
from typing import Any

from rolloutbus.engine_worker.engines.sglang.inside.scheduler_weights import namespace_of
from rolloutbus.engine_worker.engines.sglang.upstream import hooks
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.hooks import Hook
from rolloutbus.engine_worker.engines.sglang.upstream.types import Scheduler, SglangObject

Call = Callable[..., Any]
NAMESPACE_AT = {"block_stored": 8, "block_removed": 3}
"""Where the events of the tree in Rust have their namespace, by their first element."""
CLEARS = ("record_all_cleared", "_record_all_cleared_event")


class PrefixEvents:
    """Of one scheduler process."""

    def __init__(self, no_event: Callable[[], object] = upstream.no_kv_event) -> None:
        """`no_event` makes an event that says nothing."""
        self._no_event = no_event
        self._namespace: str | None = None
        """That of new requests without adapter."""

    def calls(self) -> Iterator[tuple[Hook, Call]]:
        """What is wrapped, and what is called instead."""
        for hook in (
            *(hooks.RECORD_STORE, hooks.RECORD_REMOVE),
            *(hooks.RECORDER_STORE, hooks.RECORDER_REMOVE),
        ):
            yield hook, self._record
        if upstream.has_rust_tree():
            yield hooks.RUST_EVENT, self._read

    def use(self, version: int, scheduler: Scheduler) -> None:
        """New requests find nothing from before: all that was told is void."""
        self._namespace = namespace_of(None, version)
        clear = _clearing(scheduler.tree_cache)
        if clear is not None:
            clear()

    def _record(
        self, call: Call, recorder: object, node: SglangObject, *args: object, **more: object
    ) -> None:
        if node.key.extra_key == self._namespace:
            call(recorder, node, *args, **more)

    def _read(self, call: Call, event: tuple[Any, ...], *args: object, **more: object) -> object:
        at = NAMESPACE_AT.get(event[0])
        if at is None or event[at] == self._namespace:
            return call(event, *args, **more)
        return self._no_event()


def _clearing(tree: object) -> Call | None:
    """The function that records that a cache is empty, wherever this version has it."""
    inner = getattr(tree, "inner", tree)
    for owner in (inner, getattr(inner, "tree_core", None)):
        for recorder in (getattr(owner, "kv_events", None), owner):
            for name in CLEARS:
                if (clear := getattr(recorder, name, None)) is not None:
                    return clear
    return None
