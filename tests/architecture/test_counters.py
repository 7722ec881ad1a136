"""Whatever an actor counts has a sentence in `bus.wire.counters`, and the other way round."""

import ast
from collections.abc import Iterator
from dataclasses import fields

from rolloutbus.bus.wire.counters import ROUTER_COUNTERS, WORKER_COUNTERS, WORKER_DURATIONS
from rolloutbus.gateway.fleet_metrics import DURATION_NAMES
from rolloutbus.gateway.metrics_api import CLIENT_COUNTERS
from rolloutbus.trainer_adapter.client.core.effects import ClientCounters
from tests.architecture.source_tree import source_modules
from tests.unit.engine_worker.core_bench import Bench

NAMED_BY_EVENTS = {"sessions_closed", "sessions_expired"}
"""`sessions_` and the event that ended them."""


def _counted() -> Iterator[str]:
    """The first argument of each call of `count` or `_count` in the router."""
    for module in source_modules():
        for node in module.nodes if module.package == "router" else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                (".count", "._count")
            ):
                yield from (
                    each.value
                    for each in ast.walk(node.args[0])
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                )


def test_each_counter_of_the_router_has_a_sentence() -> None:
    found = {name for name in _counted() if name not in ("busy", "sessions_")}

    assert found | NAMED_BY_EVENTS == set(ROUTER_COUNTERS)


def test_each_counter_of_a_worker_has_a_sentence() -> None:
    bench = Bench()
    bench.join()

    assert set(bench.said.heartbeat().counters) == set(WORKER_COUNTERS)
    assert set(WORKER_DURATIONS) == set(DURATION_NAMES)


def test_each_counter_of_a_client_has_a_sentence() -> None:
    assert {each.name for each in fields(ClientCounters)} == set(CLIENT_COUNTERS)


def test_sentences_are_sentences() -> None:
    for table in (ROUTER_COUNTERS, WORKER_COUNTERS, WORKER_DURATIONS, CLIENT_COUNTERS):
        for name, sentence in table.items():
            assert sentence[0].isupper(), name
            assert sentence.endswith("."), name
