"""A welcomed client core for each test, and a slow name server."""

import socket
from collections.abc import Iterator

import pytest

from tests.unit.trainer_adapter.bench import Bench
from tests.unit.trainer_adapter.slow_names import SlowNames


@pytest.fixture
def bench(seed: int) -> Bench:
    bench = Bench(seed)
    bench.welcome()
    bench.sent.clear()
    return bench


@pytest.fixture
def slow_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowNames]:
    names = SlowNames()
    monkeypatch.setattr(socket, "getaddrinfo", names)
    yield names
    names.may_answer.set()  # lets the thread that asked end
