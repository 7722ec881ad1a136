"""The engine host's side of the scheduler processes: their messages to it, its orders to them."""

import concurrent.futures
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from rolloutbus.engine_worker.engine import EngineBusy, EngineDied
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    HEADER,
    MAX_MESSAGE_BYTES,
    Message,
    Order,
    SchedulerAnswer,
    Swapped,
    VersionStaged,
    answer_of,
    as_name,
    decode,
)
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream


class TapListener:
    """Waits for schedulers, and hands over what they tell, in the order of each."""

    def __init__(self, on_message: Callable[[Message], None], on_gone: Callable[[], None]) -> None:
        """Listen at once, so that a scheduler which fails to start can say why.

        Args:
            on_message: called from the thread of the scheduler that sent it; must not block.
            on_gone: a scheduler has gone, whatever the reason; called from its thread.
        """
        self._on_message = on_message
        self._on_gone = on_gone
        self._folder = TemporaryDirectory(prefix="rolloutbus-")
        self.path = str(Path(self._folder.name) / "tap")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, name="sglang-taps", daemon=True).start()

    def hide(self) -> None:
        """Every scheduler is connected: take the socket's path away.

        A process that is killed leaves no directory behind, and nobody else finds the way in.
        """
        self._folder.cleanup()

    def close(self) -> None:
        """Stop listening; connected schedulers end with their engine."""
        self._listener.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            read = threading.Thread(target=self._read, args=(connection,), name="sglang-tap")
            read.daemon = True
            read.start()

    def _read(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb", buffering=1 << 20) as stream:
            while header := stream.read(HEADER.size):
                (size,) = HEADER.unpack(header)
                assert size <= MAX_MESSAGE_BYTES, "a scheduler tap speaks another protocol"
                body = stream.read(size)
                if len(body) < size:
                    break
                self._on_message(decode(body))
        self._on_gone()


Report = VersionStaged | Swapped


class Schedulers:
    """All ranks of one engine; calls come from any thread but the engine's."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._lock = threading.Lock()
        self._awaited: dict[type[Report], tuple[int, Future[Report]]] = {}
        self._staged: dict[int, VersionStaged] = {}
        """By rank: reports of the version that is awaited."""
        thread.when_dead(self._die)

    def ask(self, order: Order) -> SchedulerAnswer:
        """Have an order carried out, or begun.

        Raises:
            EngineBusy: their present state forbids it.
            ValueError: it cannot be done at all.
            EngineDied: they have not answered.
        """
        request = upstream.request("GetWeightsByNameReqInput", name=as_name(order))
        ask = self._thread.manager.get_weights_by_name
        numbers = self._thread.call(lambda: ask(request, None), type(order).__name__)
        # One list of numbers, or one for each group of ranks that has its own requests.
        first = numbers[0]
        answer = answer_of(cast("list[float]", first if isinstance(first, list) else numbers))
        if answer.is_busy:
            raise EngineBusy(answer.problem)
        if answer.problem:
            raise ValueError(answer.problem)
        return answer

    def expect(self, kind: type[Report], version: int) -> "Future[Report]":
        """The report that an order about `version` will bring, of this kind; one at a time."""
        future: Future[Report] = Future()
        with self._lock:
            if kind is VersionStaged:
                self._staged.clear()
            self._awaited[kind] = (version, future)
        self._thread.check()  # nobody else would hear of a death before this
        return future

    def wait(self, future: "Future[Report]", *, is_patient: bool) -> Report:
        """Wait for it, without a limit if it takes as long as requests run.

        Raises:
            EngineDied: the engine is dead, or has not answered in time.
        """
        try:
            return future.result(None if is_patient else self._thread.timeout_s)
        except concurrent.futures.TimeoutError:
            cause = f"no word of a weight update after {self._thread.timeout_s:g} s"
            self._thread.die(cause)
            raise EngineDied(cause) from None

    def on_report(self, report: Report) -> None:
        """A scheduler has sent a report; any thread may call."""
        with self._lock:
            version, future = self._awaited.get(type(report), (0, None))
            if future is None or version != report.version:
                return
            if isinstance(report, VersionStaged):
                self._staged[report.rank] = report
                if len(self._staged) < report.n_ranks:
                    return
                report = next((each for each in self._staged.values() if each.problem), report)
            del self._awaited[type(report)]
        future.set_result(report)

    def _die(self) -> None:
        with self._lock:
            futures = [future for _, future in self._awaited.values()]
            self._awaited.clear()
        for future in futures:
            future.set_exception(EngineDied(self._thread.cause))
