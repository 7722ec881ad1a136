"""The fake engine, and with it the step loop that every engine runs on."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolloutbus.bus.wire.messages.generation import Prefix, SamplingParams
from rolloutbus.engine_worker.engine import Bytes, EngineBusy, EngineDied, InFlight, PauseMode, Work
from rolloutbus.engine_worker.engines.fake.engine import (
    FAKE_SPECS,
    FakeEngine,
    fake_logprob,
    fake_token,
)
from rolloutbus.engine_worker.engines.fake.settings import FakeSettings
from rolloutbus.engine_worker.engines.registry import build_engine
from tests.step_log import DEADLINE_S, StepLog, key

PROMPT = np.array([5, 6, 7], np.int32)
Build = Callable[..., FakeEngine]


@pytest.fixture
def build(log: StepLog) -> Iterator[Build]:
    engines: list[FakeEngine] = []

    def build(**settings: Any) -> FakeEngine:  # noqa: ANN401 - fields of FakeSettings
        engines.append(FakeEngine(FakeSettings(**settings), log))
        return engines[-1]

    yield build
    log.release()
    for engine in engines:
        engine.close()


def work(name: str, n: int = 8, **kwargs: Any) -> Work:  # noqa: ANN401 - fields of Work
    sampling = kwargs.pop("sampling", SamplingParams(max_new_tokens=n, sampling_seed=3))
    return Work(key(name), kwargs.pop("prompt", PROMPT), sampling, **kwargs)


def tensors(fill: int = 1) -> dict[str, Bytes]:
    return {spec.name: np.full(spec.size_bytes, fill, np.uint8) for spec in FAKE_SPECS}


def expected(n: int, version: int = 0, start: int = 0) -> list[int]:
    return [fake_token(PROMPT.tobytes(), 3, i, version) for i in range(start, n)]


def test_tokens_are_the_announced_function(build: Build, log: StepLog) -> None:
    build().generate([work("a")])
    log.wait_finished("a")
    assert log["a"].tokens == expected(8)
    assert log["a"].logprobs == [fake_logprob(token) for token in expected(8)]
    assert log["a"].finishes == ["length"]


def test_thousands_of_requests_all_end_once(build: Build, log: StepLog) -> None:
    names = [f"r{i}" for i in range(3000)]
    build(slots=512).generate([work(name, 4) for name in names])
    log.wait_finished(*names)
    assert all(log[name].tokens == expected(4) for name in names)


def test_a_prefix_is_gone_on_from(build: Build, log: StepLog) -> None:
    prefix = Prefix(np.array(expected(5), "<i4").tobytes(), bytes(20), [(0, 5)])
    build().generate([work("a", prefix=prefix)])
    log.wait_finished("a")
    assert log["a"].tokens == expected(8, start=5)


def test_a_complete_prefix_ends_at_once_with_an_empty_row(build: Build, log: StepLog) -> None:
    prefix = Prefix(np.array(expected(8), "<i4").tobytes(), bytes(32), [(0, 8)])
    build().generate([work("a", prefix=prefix)])
    log.wait_finished("a")
    assert (log["a"].tokens, log["a"].finishes) == ([], ["length"])


def test_a_stop_id_ends_and_is_part_of_the_output(build: Build, log: StepLog) -> None:
    stop = expected(8)[4]
    sampling = SamplingParams(max_new_tokens=8, sampling_seed=3, stop_token_ids=[stop])
    build().generate([work("a", sampling=sampling)])
    log.wait_finished("a")
    assert (log["a"].tokens, log["a"].finishes) == (expected(5), ["stop"])


def test_abort_ends_exactly_the_named(build: Build, log: StepLog) -> None:
    engine = build()
    log.hold(3)
    engine.generate([work("a"), work("b")])
    log.wait_held()
    assert engine.abort([key("a"), key("unknown")]) == 1
    assert engine.abort([key("a")]) == 0
    log.release()
    log.wait_finished("a", "b")
    assert (log["a"].tokens, log["a"].finishes) == (expected(3), ["abort"])
    assert log["b"].finishes == ["length"]
    assert engine.abort([key("b")]) == 0


def test_abort_reaches_what_waits_while_paused(build: Build, log: StepLog) -> None:
    engine = build()
    engine.pause("in_place")
    engine.generate([work("a")])
    assert engine.abort([key("a")]) == 1
    log.wait_finished("a")
    assert log["a"].finishes == ["abort"]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_keeps_tokens(build: Build, log: StepLog, mode: PauseMode) -> None:
    engine = build()
    log.hold(3)
    engine.generate([work("a", 500)])
    log.call_midway(engine, lambda: engine.pause(mode)).result(DEADLINE_S)
    n_steps = engine.stats().steps
    engine.pause(mode)
    assert engine.stats().steps == n_steps
    assert engine.stats().n_running + engine.stats().n_waiting == 1
    engine.resume()
    log.wait_finished("a")
    assert log["a"].tokens == expected(500)


def test_pause_abort_ends_running_and_waiting(build: Build, log: StepLog) -> None:
    engine = build(slots=1)
    log.hold(2)
    engine.generate([work("a", 500), work("b", 500)])
    log.call_midway(engine, lambda: engine.pause("abort")).result(DEADLINE_S)
    assert (log["a"].finishes, log["b"].finishes) == (["abort"], ["abort"])
    assert log["b"].tokens == []


def drain(engine: FakeEngine, log: StepLog) -> Future[None]:
    """Start draining with `a` running and `b` waiting."""
    log.hold(2)
    engine.generate([work("a", 200), work("b", 200)])
    return log.call_midway(engine, lambda: engine.pause("drain"))


def test_drain_lets_what_runs_finish_and_holds_the_rest(build: Build, log: StepLog) -> None:
    engine = build(slots=1)
    drain(engine, log).result(DEADLINE_S)
    assert log["a"].tokens == expected(200)
    assert log["b"].tokens == []
    engine.resume()
    log.wait_finished("b")


def test_resume_calls_a_drain_off(build: Build, log: StepLog) -> None:
    engine = build(slots=1)
    paused = drain(engine, log)
    engine.resume()
    log.wait_finished("a", "b")
    paused.result(DEADLINE_S)


@pytest.mark.parametrize(
    ("in_flight", "ending"),
    [("keep", "length"), ("retract", "length"), ("abort", "abort"), ("finish_old", "length")],
)
def test_tokens_carry_the_version_that_made_them(
    build: Build, log: StepLog, in_flight: InFlight, ending: str
) -> None:
    engine = build()
    log.hold(2)
    engine.generate([work("a", 500)])
    swap = log.call_midway(engine, lambda: engine.weights.install(7, tensors(), in_flight))
    assert swap.result(DEADLINE_S).version == 7
    engine.generate([work("b")])
    log.wait_finished("a", "b")
    a = log["a"]
    assert a.tokens == [expected(i + 1, v, i)[0] for i, v in enumerate(a.versions)]
    assert a.finishes == [ending]
    assert set(a.versions) == ({0} if in_flight in ("finish_old", "abort") else {0, 7})
    assert log["b"].tokens == expected(8, 7)
    assert engine.content["head.weight"] == b"\x01" * 16


def test_finish_old_is_refused_while_paused_with_requests_running(
    build: Build, log: StepLog
) -> None:
    engine = build()
    log.hold(2)
    engine.generate([work("a", 500)])
    log.call_midway(engine, lambda: engine.pause("in_place")).result(DEADLINE_S)
    with pytest.raises(EngineBusy):
        engine.weights.install(1, tensors(), "finish_old")
    assert engine.stats().version == 0


def test_a_key_in_use_is_refused_and_nothing_is_queued(build: Build, log: StepLog) -> None:
    engine = build()
    log.hold(1)
    engine.generate([work("a")])
    log.wait_held()
    with pytest.raises(ValueError, match="in use"):
        engine.generate([work("b"), work("a")])
    assert engine.stats().n_running + engine.stats().n_waiting == 1


def test_held_requests_get_no_more_tokens_until_the_file_is_gone(
    build: Build, log: StepLog, tmp_path: Path
) -> None:
    limit = tmp_path / "limit"
    limit.write_text("3")
    engine = build(hold_file=str(limit), step_s=0.001)
    engine.generate([work("a"), work("short", 2)])
    log.wait_finished("short")
    log.wait_until(lambda: len(log["a"].tokens) == 3)
    n_steps = engine.stats().steps
    engine.generate([work("later", 2)])
    log.wait_finished("later")
    assert engine.stats().steps > n_steps
    assert len(log["a"].tokens) == 3
    limit.unlink()
    log.wait_finished("a")
    assert log["a"].tokens == expected(8)


def test_asleep_it_takes_no_steps(build: Build, log: StepLog) -> None:
    engine = build()
    engine.memory.sleep(["weights", "kv_cache"])
    engine.memory.sleep(["weights"])
    engine.generate([work("a")])
    engine.memory.wake_up(["weights"])
    assert engine.stats().steps == 0
    engine.memory.wake_up(["kv_cache"])
    log.wait_finished("a")


def test_an_error_in_a_step_reaches_every_caller(build: Build, log: StepLog) -> None:
    engine = build(fail_after_steps=3)
    log.hold(2)
    engine.generate([work("a")])
    log.wait_held()
    log.release()
    with pytest.raises(EngineDied, match="asked to fail"):
        engine.pause("drain")
    with pytest.raises(EngineDied):
        engine.stats()
    with pytest.raises(EngineDied):
        engine.generate([work("b")])


def test_it_exits_at_the_chosen_step() -> None:
    program = (
        "import threading, numpy as np\n"
        "from rolloutbus.bus.wire.messages.generation import SamplingParams\n"
        "from rolloutbus.engine_worker.engine import Work\n"
        "from rolloutbus.engine_worker.engines.registry import build_engine\n"
        "options = {'exit_after_steps': 3, 'exit_code': 9}\n"
        "engine = build_engine('fake', options, lambda step: print(len(step.keys), flush=True))\n"
        "engine.generate([Work(('a', (1, 1)), np.ones(2, np.int32), SamplingParams())])\n"
        "threading.Event().wait(50)\n"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (ended.returncode, ended.stdout.split()) == (9, ["1", "1"])


def test_unknown_kinds_and_options_are_named(log: StepLog) -> None:
    with pytest.raises(ValueError, match="vllm"):
        build_engine("vllm", {}, log)
    with pytest.raises(ValueError, match="slotz"):
        build_engine("fake", {"slotz": 1}, log)
