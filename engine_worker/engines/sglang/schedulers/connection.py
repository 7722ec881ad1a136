"""The engine host's side of the scheduler processes: their messages to it, its orders to them."""

import concurrent.futures
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from rolloutbus.engine_worker.engine import EngineBusy, EngineDied
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    HEADER,
    MAX_MESSAGE_BYTES,
    Answered,
    Message,
    Order,
    Ready,
    SchedulerAnswer,
    SchedulerRank,
    Swapped,
    VersionStaged,
    as_name,
    decode,
)
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream

UNKNOWN = SchedulerRank(-1, -1, -1)
"""Of a scheduler that is being built."""


class TapListener:
    """Waits for schedulers, and hands over what they tell, in the order of each."""

    def __init__(
        self,
        on_message: Callable[[Message, SchedulerRank], None],
        on_gone: Callable[[], None],
    ) -> None:
        """Listen at once, so that a scheduler which fails to start can say why.

        Args:
            on_message: called from the thread of the scheduler that sent it, with its rank, which
                is `UNKNOWN` before it is `Ready`; must not block.
            on_gone: a scheduler has gone, whatever the reason; called from its thread.
        """
        self._on_message = on_message
        self._on_gone = on_gone
        self._folder = TemporaryDirectory(prefix="rolloutbus-")
        self.path = str(Path(self._folder.name) / "tap")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._accepting = threading.Thread(target=self._accept, name="sglang-taps", daemon=True)
        self._accepting.start()

    def hide(self) -> None:
        """Every scheduler is connected: take the socket's path away.

        A process that is killed leaves no directory behind, and nobody else finds the way in.
        """
        self._folder.cleanup()

    def close(self) -> None:
        """Stop listening; connected schedulers end with their engine."""
        self._listener.shutdown(socket.SHUT_RDWR)
        # Closing wakes nobody, and who is stopped and goes on begins the call anew, at a descriptor
        # that is another socket's by then.
        self._accepting.join()
        self._listener.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # shut down
                return
            read = threading.Thread(target=self._read, args=(connection,), name="sglang-tap")
            read.daemon = True
            read.start()

    def _read(self, connection: socket.socket) -> None:
        rank = UNKNOWN
        with connection, connection.makefile("rb", buffering=1 << 20) as stream:
            while header := stream.read(HEADER.size):
                (size,) = HEADER.unpack(header)
                assert size <= MAX_MESSAGE_BYTES, "a scheduler tap speaks another protocol"
                body = stream.read(size)
                if len(body) < size:
                    break
                message = decode(body)
                if isinstance(message, Ready):
                    rank = message.rank
                self._on_message(message, rank)
        self._on_gone()


Report = SchedulerAnswer | VersionStaged | Swapped
Reports = Mapping[SchedulerRank, Report]
"""One of every scheduler."""
_Subject = tuple[type[Report], int]
"""What is reported, and the number of the order, or the version, that it is about."""


class Schedulers:
    """All schedulers of one engine; calls come from any thread but the engine's.

    Nothing is taken for done before every one has said so, whatever SGLang's own answer is: that
    comes from one scheduler for each replica.
    """

    def __init__(self, thread: EngineThread, ranks: Collection[SchedulerRank]) -> None:
        """`ranks`: those that there are."""
        self.ranks = frozenset(ranks)
        self._thread = thread
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._awaited: dict[_Subject, tuple[dict[SchedulerRank, Report], Future[Reports]]] = {}
        thread.when_dead(self._die)

    def ask(self, order: Order) -> Mapping[SchedulerRank, SchedulerAnswer]:
        """Have an order carried out, or begun, by every scheduler.

        Raises:
            EngineBusy: their present state forbids it.
            ValueError: it cannot be done at all.
            EngineDied: one of them has not answered.
        """
        number = next(self._numbers)
        expected = self._expect(SchedulerAnswer, number)
        request = upstream.request("GetWeightsByNameReqInput", name=as_name(number, order))
        ask = self._thread.manager.get_weights_by_name
        self._thread.call(lambda: ask(request, None), type(order).__name__)
        found = self.wait(expected, is_patient=False)
        answers = {rank: each for rank, each in found.items() if isinstance(each, SchedulerAnswer)}
        for answer in answers.values():
            if answer.is_busy:
                raise EngineBusy(answer.problem)
            if answer.problem:
                raise ValueError(answer.problem)
        return answers

    def expect(self, kind: type[VersionStaged] | type[Swapped], version: int) -> "Future[Reports]":
        """The reports that an order about `version` will bring, of this kind; one at a time."""
        return self._expect(kind, version)

    def _expect(self, kind: type[Report], about: int) -> "Future[Reports]":
        future: Future[Reports] = Future()
        with self._lock:
            self._awaited[kind, about] = {}, future
        self._thread.check()  # nobody else would hear of a death before this
        return future

    def wait(self, future: "Future[Reports]", *, is_patient: bool) -> Reports:
        """Wait for all of them, without a limit if it takes as long as requests run.

        Raises:
            EngineDied: the engine is dead, or has not answered in time.
        """
        try:
            return future.result(None if is_patient else self._thread.timeout_s)
        except concurrent.futures.TimeoutError:
            cause = f"not every scheduler has answered after {self._thread.timeout_s:g} s"
            self._thread.die(cause)
            raise EngineDied(cause) from None

    def on_report(self, message: Answered | VersionStaged | Swapped, rank: SchedulerRank) -> None:
        """A scheduler has sent a report; any thread may call."""
        if isinstance(message, Answered):
            about, report = message.order, message.answer
        else:
            about, report = message.version, message
        subject = type(report), about
        with self._lock:
            if subject not in self._awaited:
                return
            found, future = self._awaited[subject]
            found[rank] = report
            if self.ranks - found.keys():
                return
            del self._awaited[subject]
        future.set_result(found)

    def _die(self) -> None:
        with self._lock:
            futures = [future for _, future in self._awaited.values()]
            self._awaited.clear()
        for future in futures:
            future.set_exception(EngineDied(self._thread.cause))
