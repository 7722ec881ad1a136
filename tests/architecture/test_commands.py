"""Each row of the table of commands has a handler where it is carried out, and a caller."""

import re
from collections.abc import Iterator
from typing import get_args

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.commands import COMMANDS, done_by
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.engine_worker.host.commands import HostCommands
from rolloutbus.trainer_adapter.store.core import MemberCommand
from tests.architecture.source_tree import source_modules
from tests.capable_engine import CapableEngine
from tests.conformance.representatives import NAMES
from tests.unit.engine_worker.core_bench import Bench
from tests.unit.router.harness import Bus


def _unknown_to_the_router() -> Iterator[str]:
    """Of those that clients send."""
    for kind, row in COMMANDS.items():
        client = Bus().client()
        client.ask(kind, unpack(NAMES[kind]), NAMES[kind].route)
        bodies = [unpack(each) for each in client.take("refused")]
        codes = {body.code for body in bodies if isinstance(body, Problem)}
        if row.sender != "router" and "unknown_message" in codes:
            yield f"router/core.py has no handler for {kind!r}"


def _unknown_to_a_worker() -> Iterator[str]:
    """Of those that its actor carries out."""
    for kind in sorted(done_by("worker")):
        bench = Bench()
        bench.join()
        bench.command(kind, "c/1", unpack(NAMES[kind]), NAMES[kind].place)
        failed = [unpack(each) for each in bench.said.sent("failed", "c/1")]
        if any(isinstance(body, Problem) and body.code == "unsupported" for body in failed):
            yield f"engine_worker/worker/core.py has no case for {kind!r}"


def _unknown_to_an_engine_host() -> Iterator[str]:
    engine = CapableEngine()
    try:
        able = HostCommands(engine, 1.0).capabilities
    finally:
        engine.close()
    for kind in sorted(done_by("engine").symmetric_difference(able)):
        yield f"engine_worker/host/commands.py and the table differ in {kind!r}"


def _unknown_to_a_store() -> Iterator[str]:
    bodies = {COMMANDS[kind].body for kind in done_by("store")}
    for body in bodies.symmetric_difference(get_args(MemberCommand)):
        yield f"trainer_adapter/store/core.py and the table differ in {body.__name__}"


def _without_a_caller() -> Iterator[str]:
    """Of those that clients send: nothing outside of the store makes their body."""
    texts = [
        module.path.read_text(encoding="utf-8")
        for module in source_modules()
        if module.package == "trainer_adapter" and "store" not in module.path.parts
    ]
    for kind, row in COMMANDS.items():
        called = re.compile(rf"\b{row.body.__name__}\(")
        if row.sender != "router" and not any(called.search(text) for text in texts):
            yield f"no module of trainer_adapter/ sends {kind!r}"


def test_every_command_has_a_handler_and_a_caller() -> None:
    assert [
        *_unknown_to_the_router(),
        *_unknown_to_a_worker(),
        *_unknown_to_an_engine_host(),
        *_unknown_to_a_store(),
        *_without_a_caller(),
    ] == []
