"""Errors and results leave a process pool as they were; what has sockets says what to pass."""

import pickle  # noqa: TID251 - as process pools do; reads what it wrote
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, is_dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

import rolloutbus
from rolloutbus import errors, types
from rolloutbus.bus.wire.codec import AnyArray
from rolloutbus.bus.wire.commands import RESULTS
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import OpenSession
from rolloutbus.errors import BusError
from rolloutbus.launcher.discovery import AmbiguousFleet, NoSuchFleet, RunningFleet
from rolloutbus.replay.journal.format import Damage, JournalDamaged, JournalError, JournalFull
from rolloutbus.trainer_adapter.client.core.results import Embeddings, Scores
from rolloutbus.trainer_adapter.publisher.transfer import TransferProgress
from tests.conformance.representatives import NAMES

PROBLEM = Problem("busy", "The router is full.", "not_started", "place.cost", 250)
ROLLOUT = rolloutbus.Rollout(
    rid="c/1",
    tokens=np.array([1, 2], np.int32),
    logprobs=np.array([-0.5, -1], np.float32),
    behaviour_logprobs=np.array([-0.25, -1], np.float32),
    version_runs=[(3, 2)],
    finish_reason="length",
    worker="w0",
    n_prompt_tokens=3,
    n_attempts=2,
    n_resumed=1,
    queue_ms=0.5,
    run_ms=2.0,
    arrays={"x": np.ones((2, 3), np.float16)},
)
FLEET_RESULT = types.FleetResult(
    {
        "w0": types.FleetStatus(1, "r", False, [], {}, 0, 0, 1, {}),  # noqa: FBT003
        "w1": errors.Refused(PROBLEM),
    },
    ["w2"],
)
RESULTS_OF_CALLS: dict[str, object] = {
    "Rollout": ROLLOUT,
    "Delta": types.Delta("c/1", 0, ROLLOUT.tokens, ROLLOUT.logprobs, 3, "stop", "w0", ROLLOUT),
    "FleetResult": FLEET_RESULT,
    "Published": types.Published(3, {"w0": 1.5}, {"w1": "away"}, 0.5, 0.25, {"w0": "shm"}),
    "PublishedLora": types.PublishedLora("a", 3, ("w0",), {"w1": errors.Refused(PROBLEM)}),
    "Scores": Scores(np.ones((2, 2), np.float32), 4),
    "Embeddings": Embeddings(np.ones((2, 2), np.float32), 4),
    "TransferProgress": TransferProgress("copying"),
    **{
        f"finished.{command}": msgspec.msgpack.decode(NAMES[f"finished.{command}"].body, type=kind)
        for command, kind in RESULTS.items()
    },
}


def _tree(root: type[BusError]) -> Iterator[type[BusError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _tree(kind)


def _made(kind: type[BusError]) -> BusError:
    if issubclass(kind, errors.RolloutCancelled):
        return kind(PROBLEM, ROLLOUT)
    if issubclass(kind, errors.RequestError):
        return kind(PROBLEM, rid="c/1")
    if issubclass(kind, errors.FleetCommandFailed):
        return kind(FLEET_RESULT)
    if issubclass(kind, JournalDamaged):
        return kind(Damage("000001.rbj", 64, 32, 7, 2, "a wrong checksum"))
    if issubclass(kind, AmbiguousFleet):
        return kind([RunningFleet(name=name, pid=1, since=0.0) for name in ("one", "two")])
    if issubclass(kind, errors.ProcessFailed):
        return kind("router", "it died", log="the last words")
    return kind("a sentence", outcome="failed")


PUBLIC = {getattr(errors, name) for name in errors.__all__}
OTHERS = {AmbiguousFleet, JournalDamaged, JournalError, JournalFull, NoSuchFleet}
KINDS = sorted(PUBLIC | OTHERS, key=lambda kind: kind.__name__)


def _same(left: object, right: object) -> bool:
    """Equal in type and in every field."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray)
        arrays = cast("AnyArray", left), cast("AnyArray", right)
        return arrays[0].dtype == arrays[1].dtype and np.array_equal(*arrays)
    if isinstance(left, BusError):
        assert isinstance(right, BusError)
        return left.args == right.args and _same(vars(left), vars(right))
    if isinstance(left, Mapping):
        assert isinstance(right, Mapping)
        pairs = cast("Mapping[str, object]", left), cast("Mapping[str, object]", right)
        return [*pairs[0]] == [*pairs[1]] and all(
            _same(each, pairs[1][key]) for key, each in pairs[0].items()
        )
    if is_dataclass(left):
        return all(_same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))
    return left == right


def test_whole_tree_of_errors_is_walked() -> None:
    ours = {
        kind
        for kind in _tree(BusError)
        if kind.__module__
        in ("rolloutbus.bus.wire.errors", "rolloutbus.trainer_adapter.client.core.results")
    }
    assert ours <= PUBLIC


@pytest.mark.parametrize("kind", KINDS)
def test_error_comes_back_as_it_was(kind: type[BusError]) -> None:
    error = _made(kind)
    error.add_note("a note")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - our own
        assert _same(back, error)
        assert (str(back), back.outcome) == (str(error), error.outcome)


@pytest.mark.parametrize("name", RESULTS_OF_CALLS)
def test_result_comes_back_as_it_was(name: str) -> None:
    result = RESULTS_OF_CALLS[name]
    back = pickle.loads(pickle.dumps(result))  # noqa: S301 - our own
    assert _same(back, result)


def _give(name: str) -> object:
    return RESULTS_OF_CALLS[name]


def _fail(kind: type[BusError]) -> None:
    raise _made(kind)


def test_errors_and_results_get_out_of_a_process_pool() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        failing = {kind: pool.submit(_fail, kind) for kind in KINDS}
        giving = {
            name: pool.submit(_give, name) for name in ("Rollout", "FleetResult", "Published")
        }
        for kind, future in failing.items():
            with pytest.raises(kind) as caught:
                future.result(240)
            assert caught.value.outcome == _made(kind).outcome
        for name, future in giving.items():
            assert _same(future.result(240), RESULTS_OF_CALLS[name])


ADDRESS = "tcp://127.0.0.1:7777"


BOUND: dict[str, Callable[[Path], Any]] = {
    "client": lambda _: rolloutbus.connect(ADDRESS),
    "connection": lambda _: rolloutbus.connect(ADDRESS).connection,
    "ref": lambda _: rolloutbus.connect(ADDRESS).ref("fleet"),
    "sync client": lambda _: rolloutbus.connect_sync(ADDRESS),
    "session": lambda _: types.Session(rolloutbus.connect(ADDRESS).connection, OpenSession("one")),
    "publisher": lambda _: rolloutbus.WeightPublisher(rolloutbus.connect(ADDRESS)),
    "subscriber": lambda _: rolloutbus.subscribe(ADDRESS),
    "recorder": lambda folder: rolloutbus.record(ADDRESS, folder),
    "fleet": lambda _: rolloutbus.up(workers=1, engine="fake"),
    "in a list": lambda _: [rolloutbus.connect(ADDRESS)],
}


@pytest.mark.parametrize("name", BOUND)
async def test_what_has_sockets_says_what_to_pass_instead(tmp_path: Path, name: str) -> None:
    bound = BOUND[name](tmp_path)
    with pytest.raises(TypeError, match=r"cannot be pickled.*; pass .*(address|connect_options)"):
        pickle.dumps(bound)
