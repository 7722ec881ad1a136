"""Blocking twins are derived from the async classes, and a type checker knows what they take."""

import asyncio
import inspect
import json
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import torch

import rolloutbus
from rolloutbus.errors import ActorStopped, LocalProtocolError
from rolloutbus.trainer_adapter.client.blocking import LoopThread, Twin, at_once, blocking
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.session import Session
from rolloutbus.trainer_adapter.client.sync_client import SyncRolloutClient, SyncSession
from rolloutbus.trainer_adapter.openai.client import OpenAIClient, SyncOpenAIClient
from rolloutbus.trainer_adapter.publisher.publication import Policy, Publication
from rolloutbus.trainer_adapter.publisher.publisher import PublisherUpdate, WeightPublisher
from rolloutbus.trainer_adapter.publisher.sync_publisher import (
    SyncPublisherUpdate,
    SyncWeightPublisher,
    SyncWeightTransfer,
)
from rolloutbus.trainer_adapter.publisher.tensor_source import StreamedTensors
from rolloutbus.trainer_adapter.publisher.transfer import UpdateOptions, WeightTransferHandle
from rolloutbus.trainer_adapter.publisher.weight_writer import Soundness, WeightWriter

ROOT = Path(__file__).parents[3]
TWINS: list[tuple[type, type[Twin[Any]], set[str]]] = [
    # `ref` speaks to actors of asyncio; `run` takes what it is asked.
    (RolloutClient, SyncRolloutClient, {"ref"}),
    (Session, SyncSession, set()),
    (OpenAIClient, SyncOpenAIClient, set()),
    (WeightPublisher, SyncWeightPublisher, set()),
    (PublisherUpdate, SyncPublisherUpdate, set()),
    (WeightTransferHandle, SyncWeightTransfer, set()),
]
TWIN_OF = {kind: twin for kind, twin, _ in TWINS}
CASES = [pytest.param(*each, id=each[0].__name__) for each in TWINS]


def methods(kind: type) -> dict[str, Any]:
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name: each for name, each in found if not name.startswith("_")}


@pytest.mark.parametrize(("kind", "twin", "without"), CASES)
def test_every_public_method_has_a_blocking_twin(
    kind: type, twin: type[Twin[Any]], without: set[str]
) -> None:
    assert methods(kind).keys() - methods(twin).keys() == without


@pytest.mark.parametrize(("kind", "twin", "without"), CASES)
def test_a_twin_shows_the_parameters_and_says_what_they_mean(
    kind: type, twin: type[Twin[Any]], without: set[str]
) -> None:
    for name, method in methods(kind).items():
        if name in without:
            continue
        derived = methods(twin)[name]
        assert inspect.getdoc(derived), name
        shown = inspect.signature(derived)
        assert dict(shown.parameters) == dict(inspect.signature(method).parameters)
        returned = inspect.signature(method).return_annotation
        if "AsyncGenerator" in str(get_origin(returned)):
            (item,) = get_args(returned)[:1]
            assert shown.return_annotation == Generator[TWIN_OF.get(item, item)]


SCRIPT = """
from typing import assert_type

import rolloutbus
from rolloutbus.trainer_adapter.client.core.results import Delta, FleetResult
from rolloutbus.trainer_adapter.client.sync_client import SyncSession
from rolloutbus.trainer_adapter.publisher.transfer import Published
from rolloutbus.trainer_adapter.publisher.transfer import TransferProgress

sampling = rolloutbus.SamplingParams(max_new_tokens=4)
with rolloutbus.connect_sync("ipc:///nowhere") as client:
    assert_type(client.generate([1], sampling, deadline_s=3), rolloutbus.Rollout)
    assert_type(client.pause("drain", target="w1"), FleetResult)
    assert_type(client.abort(["c/1"]), int)
    for delta in client.stream([1], sampling):
        assert_type(delta, Delta)
    with client.session("one") as session:
        assert_type(session, SyncSession)
        assert_type(session.branch("two"), SyncSession)
        assert_type(session.sample(sampling, priority=1), rolloutbus.Rollout)
        session.sample(sampling, prioritty=1)  # WRONG
    publisher = rolloutbus.SyncWeightPublisher(client)
    assert_type(publisher.publish({}, in_flight="keep"), Published)
    for progress in publisher.start({}).changes():
        assert_type(progress, TransferProgress)
    publisher.publish({}, in_flight="in_place")  # WRONG
    client.pause(targt="w1")  # WRONG
    client.pause("drian")  # WRONG
    client.generate("text", sampling, deadline_s="3")  # WRONG
    client.get_weights("a")  # WRONG
    rolloutbus.SyncOpenAIClient(client, 7)  # WRONG
"""


@pytest.mark.timeout(900)
def test_a_type_checker_checks_a_blocking_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    config = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "include": ["."]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    pyright = Path(sys.executable).with_name("pyright")
    ran = subprocess.run(
        [pyright, "--outputjson", "--pythonpath", sys.executable, "-p", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    told = json.loads(ran.stdout)["generalDiagnostics"]
    lines = script.read_text().splitlines()
    wrong = {number for number, line in enumerate(lines) if line.endswith("# WRONG")}
    assert {each["range"]["start"]["line"] for each in told} == wrong, textwrap.shorten(
        ran.stdout, 4000
    )


class Counter:
    """Counts on its loop, and tells which thread that is."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    async def add(self, number: int) -> int:
        await asyncio.sleep(0)
        self.threads.append(threading.current_thread())
        return number + 1

    def note(self) -> None:
        self.threads.append(threading.current_thread())


class BlockingCounter(Twin[Counter]):
    add = blocking(Counter.add)
    note = at_once(Counter.note)


def test_all_methods_run_in_the_one_thread_of_the_loop() -> None:
    counter = BlockingCounter(Counter(), LoopThread("counter"))
    counter.note()
    assert counter.original.threads == [threading.current_thread()]
    with pytest.raises(ActorStopped, match="not open"):
        counter.add(1)
    counter.loop.start()
    try:
        counter.note()
        assert counter.add(number=1) == 2
    finally:
        counter.loop.stop()
    _, noted, added = counter.original.threads
    assert noted is added
    assert noted is not threading.current_thread()
    with pytest.raises(ActorStopped, match="closed"):
        counter.add(1)


def test_a_blocking_call_in_the_loops_own_thread_is_refused_instead_of_waiting_for_itself() -> None:
    counter = BlockingCounter(Counter(), LoopThread("counter"))
    counter.loop.start()
    try:
        with pytest.raises(LocalProtocolError, match="own thread"):
            counter.loop.call(lambda: counter.add(1))
        counter.loop.call(counter.note)
    finally:
        counter.loop.stop()
    assert len(counter.original.threads) == 1


async def test_another_loop_awaits_what_the_thread_runs_and_can_cancel_it() -> None:
    thread = LoopThread("counter")
    with pytest.raises(ActorStopped, match="not open"):
        thread.submit(Counter().add(1))
    thread.start()
    try:
        assert await asyncio.wrap_future(thread.submit(Counter().add(1))) == 2
        has_begun, has_ended = threading.Event(), threading.Event()
        never = asyncio.wrap_future(thread.submit(_never(has_begun, has_ended)))
        assert await asyncio.to_thread(has_begun.wait, 60.0)
        never.cancel()
        assert await asyncio.to_thread(has_ended.wait, 60.0)
    finally:
        thread.stop()


async def _never(has_begun: threading.Event, has_ended: threading.Event) -> None:
    has_begun.set()
    try:
        await asyncio.Event().wait()
    finally:
        has_ended.set()


def test_a_blocking_client_that_is_not_open_says_so() -> None:
    client = rolloutbus.connect_sync("ipc:///nowhere")
    with pytest.raises(ActorStopped, match="not open"):
        client.status()
    with pytest.raises(ActorStopped, match="not open"):
        next(client.stream([1], rolloutbus.SamplingParams()))


class CountedSource(StreamedTensors):
    """Counts how often it was given up: other ranks may wait for that word, and only for one."""

    def __init__(self) -> None:
        super().__init__(iter({"w": torch.zeros(2)}.items()))
        self.n_given_up = 0

    def give_up(self) -> None:
        self.n_given_up += 1
        super().give_up()


def _published(publisher: SyncWeightPublisher, source: CountedSource) -> object:
    return publisher.publish(source)


def _started(publisher: SyncWeightPublisher, source: CountedSource) -> object:
    return publisher.start(source)


def _put(publisher: SyncWeightPublisher, source: CountedSource) -> object:
    async def update() -> PublisherUpdate:
        client = rolloutbus.connect("ipc:///nowhere")
        policy = Policy(client, "default", None, WeightWriter(), Soundness())
        return PublisherUpdate(Publication(policy, UpdateOptions()), None)

    return SyncPublisherUpdate(asyncio.run(update()), publisher.loop, None).put_all(source)


@pytest.mark.parametrize("give", [_published, _started, _put])
def test_what_a_closed_client_cannot_publish_is_given_up(
    give: Callable[[SyncWeightPublisher, CountedSource], object],
) -> None:
    client = rolloutbus.connect_sync("ipc:///nowhere")
    publisher = SyncWeightPublisher(client)
    for told in ("not open", "closed"):
        source = CountedSource()
        with pytest.raises(ActorStopped, match=told):
            give(publisher, source)
        assert source.n_given_up == 1
        client.loop.start()
        client.loop.stop()


def test_what_cannot_be_started_is_given_up_once() -> None:
    publisher = rolloutbus.WeightPublisher(rolloutbus.connect("ipc:///nowhere"))
    source = CountedSource()
    with pytest.raises(RuntimeError, match="no running event loop"):
        publisher.start(source)
    assert source.n_given_up == 1


def test_calls_of_many_threads_end_while_one_closes() -> None:
    for _ in range(40):
        loop, calls = LoopThread("counter"), Calls()
        loop.start()
        callers = [
            threading.Thread(target=calls.go_on, args=(loop,), daemon=True) for _ in "12345678"
        ]
        for caller in callers:
            caller.start()
        assert calls.has_begun.wait(60.0)
        loop.stop()
        for caller in callers:
            caller.join(60.0)
        assert not any(caller.is_alive() for caller in callers)
        assert [type(each) for each in calls.errors] == [ActorStopped] * len(callers)


class Calls:
    """What threads call until they are told why they cannot."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.errors: list[BaseException] = []

    def go_on(self, loop: LoopThread) -> None:
        try:
            while True:
                loop.submit(Counter().add(1)).result(timeout=5.0)
                self.has_begun.set()
        except BaseException as error:  # noqa: BLE001 - the test judges it
            self.errors.append(error)


def test_a_call_is_refused_while_the_last_ones_end() -> None:
    loop = LoopThread("counter")
    loop.start()
    has_begun, has_ended, has_called = (threading.Event() for _ in range(3))

    async def last() -> None:
        try:
            await _never(has_begun, has_ended)
        finally:
            assert has_called.wait(60.0)

    loop.submit(last())
    assert has_begun.wait(60.0)
    stopping = threading.Thread(target=loop.stop, daemon=True)
    stopping.start()
    try:
        assert has_ended.wait(60.0)
        with pytest.raises(ActorStopped, match="closed"):
            loop.submit(Counter().add(1)).result(timeout=5.0)
    finally:
        has_called.set()
        stopping.join(60.0)
    assert not loop.is_running


AGAIN_S = 2.0
"""After which an interrupt that was not noticed is sent again."""


class Endless:
    """A stream of one item, and then nothing; it takes a turn of the loop to end it."""

    def __init__(self) -> None:
        self.main = threading.get_ident()
        self.has_ended = False

    async def items(self) -> AsyncGenerator[int]:
        try:
            yield 1
            while not _waits(self.main):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0)
            while True:  # one that comes just before a thread falls asleep does not wake it
                signal.pthread_kill(self.main, signal.SIGINT)
                await asyncio.sleep(AGAIN_S)
        finally:
            await asyncio.sleep(0)
            self.has_ended = True


def _waits(thread: int) -> bool:
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    return frames[thread].f_code.co_name == "wait"


class BlockingEndless(Twin[Endless]):
    items = blocking(Endless.items)


def test_ctrl_c_in_a_stream_that_takes_a_while_to_end_is_an_interrupt() -> None:
    endless = BlockingEndless(Endless(), LoopThread("endless"))
    endless.loop.start()
    # A run in the background has it ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        items = endless.items()
        assert next(items) == 1
        with pytest.raises(KeyboardInterrupt):
            next(items)
        assert endless.original.has_ended
    finally:
        signal.signal(signal.SIGINT, handler)
        endless.loop.stop()
