"""SGLang's KV events are of what new requests find, and of nothing else."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rolloutbus.engine_worker.engines.sglang.inside.scheduler import PrefixEvents
from rolloutbus.engine_worker.engines.sglang.inside.scheduler_weights import namespace_of
from rolloutbus.engine_worker.engines.sglang.prefixes import PrefixFeed


@dataclass
class Recorder:
    """As in newer versions of SGLang; nothing of it runs."""

    events: list[str] = field(default_factory=list[str])

    def record_all_cleared(self) -> None:
        self.events.append("cleared")


@dataclass
class Core:
    kv_events: Recorder = field(default_factory=Recorder)


@dataclass
class Unified:
    """A prefix cache whose tree is apart."""

    tree_core: Core = field(default_factory=Core)


@dataclass
class Mixed:
    """A prefix cache of older versions, which records by itself."""

    events: list[str] = field(default_factory=list[str])

    def _record_all_cleared_event(self) -> None:
        self.events.append("cleared")


@dataclass
class Wrapped:
    """One that serves streaming sessions."""

    inner: object


@dataclass
class Scheduler:
    tree_cache: object


@dataclass
class Key:
    extra_key: str | None


@dataclass
class Node:
    key: Key


def recorded(events: PrefixEvents, extra_key: str | None) -> bool:
    """Whether a node of this namespace is told of."""
    told: list[object] = []

    def record(_recorder: object, node: Node, medium: str) -> None:
        told.append((node, medium))

    events._record(record, None, Node(Key(extra_key)), "GPU")  # pyright: ignore[reportPrivateUsage] - a hook of SGLang's
    return bool(told)


def use(events: PrefixEvents, version: int, tree: object) -> None:
    events.use(version, Scheduler(tree))  # pyright: ignore[reportArgumentType] - a part of it


def test_at_first_requests_without_adapter_are_told_of() -> None:
    events = PrefixEvents()
    assert recorded(events, None)
    assert not recorded(events, "an adapter's")


def test_after_an_update_only_what_the_new_weights_made_is_told() -> None:
    events = PrefixEvents()
    use(events, 3, Mixed())
    assert recorded(events, namespace_of(None, 3))
    assert not recorded(events, namespace_of("an adapter's", 3))
    assert not recorded(events, namespace_of(None, 2))
    assert not recorded(events, None)


def test_an_update_clears_what_was_told_wherever_a_version_records_it() -> None:
    unified, mixed, newer = Unified(), Mixed(), Core()
    for tree in (unified, mixed, newer, Wrapped(inner := Mixed()), object()):
        use(PrefixEvents(), 1, tree)
    for events in (
        unified.tree_core.kv_events.events,
        mixed.events,
        newer.kv_events.events,
        inner.events,
    ):
        assert events == ["cleared"]


@pytest.mark.parametrize(
    ("event", "is_told"),
    [
        (("block_stored", *([None] * 7), None), True),
        (("block_stored", *([None] * 7), "an adapter's"), False),
        (("block_removed", None, None, None), True),
        (("block_removed", None, None, "@weights1"), False),
        (("all_blocks_cleared",), True),
    ],
)
def test_a_tree_in_rust_is_sifted_as_its_events_are_read(
    event: tuple[Any, ...], is_told: bool
) -> None:
    def same(found: object) -> object:
        return found

    read = PrefixEvents(lambda: "nothing")._read(same, event)  # pyright: ignore[reportPrivateUsage] - a hook of SGLang's
    assert read == (event if is_told else "nothing")


def test_an_engine_is_started_so_that_it_tells(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    on_a_gpu: dict[str, object] = {"device": "cuda"}
    on_a_cpu: dict[str, object] = {"device": "cpu"}
    for arguments in (on_a_gpu, on_a_cpu):
        PrefixFeed.among(arguments, tmp_path).close()
    told = json.loads(str(on_a_gpu["kv_events_config"]))
    assert told == {"publisher": "zmq", "endpoint": f"ipc://{tmp_path}/kv-events", "topic": ""}
    assert on_a_gpu["page_size"] == 16
    assert "page_size" not in on_a_cpu


@pytest.mark.parametrize("name", ["kv_events_config", "dp_size", "pp_size"])
def test_what_contradicts_it_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=name):
        PrefixFeed.among({name: 2}, tmp_path)
