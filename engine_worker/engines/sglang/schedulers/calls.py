"""Orders to the scheduler processes, and the word that comes back once they are carried out."""

import concurrent.futures
import threading
from concurrent.futures import Future
from typing import cast

from rolloutbus.engine_worker.engine import EngineBusy, EngineDied
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.schedulers.orders import (
    Order,
    SchedulerAnswer,
    answer_of,
    as_name,
)
from rolloutbus.engine_worker.engines.sglang.schedulers.tap_wire import Swapped, VersionStaged
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.types import TokenizerManager

Word = VersionStaged | Swapped


class Schedulers:
    """All ranks of one engine; calls come from any thread but the engine's."""

    def __init__(self, thread: EngineThread, manager: TokenizerManager, timeout_s: float) -> None:
        """`timeout_s`: an engine that has not answered after this long is dead."""
        self._thread = thread
        self._manager = manager
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._awaited: dict[type[Word], tuple[int, Future[Word]]] = {}
        self._staged: dict[int, VersionStaged] = {}
        """By rank: what has been told of the version that is awaited."""
        thread.when_dead(self._die)

    def ask(self, order: Order) -> SchedulerAnswer:
        """Have an order carried out, or begun.

        Raises:
            EngineBusy: their present state forbids it.
            ValueError: it cannot be done at all.
            EngineDied: they have not answered.
        """
        what = type(order).__name__
        request = upstream.request("GetWeightsByNameReqInput", name=as_name(order))
        numbers = self._thread.call(
            lambda: self._manager.get_weights_by_name(request, None), self._timeout_s, what
        )
        # One list of numbers, or one for each group of ranks that has its own requests.
        first = numbers[0]
        answer = answer_of(cast("list[float]", first if isinstance(first, list) else numbers))
        if answer.is_busy:
            raise EngineBusy(answer.problem)
        if answer.problem:
            raise ValueError(answer.problem)
        return answer

    def expect(self, kind: type[Word], version: int) -> "Future[Word]":
        """The word of this kind that an order about `version` will bring; one at a time."""
        future: Future[Word] = Future()
        with self._lock:
            if kind is VersionStaged:
                self._staged.clear()
            self._awaited[kind] = (version, future)
        self._thread.check()  # nobody else would hear of a death before this
        return future

    def wait(self, future: "Future[Word]", *, is_patient: bool) -> Word:
        """Wait for it, without a limit if it takes as long as requests run.

        Raises:
            EngineDied: the engine is dead, or has not answered in time.
        """
        try:
            return future.result(None if is_patient else self._timeout_s)
        except concurrent.futures.TimeoutError:
            cause = f"no word of a weight update after {self._timeout_s:g} s"
            self._thread.die(cause)
            raise EngineDied(cause) from None

    def hear(self, word: Word) -> None:
        """A scheduler has told it; any thread may call."""
        with self._lock:
            version, future = self._awaited.get(type(word), (0, None))
            if future is None or version != word.version:
                return
            if isinstance(word, VersionStaged):
                self._staged[word.rank] = word
                if len(self._staged) < word.n_ranks:
                    return
                word = next((each for each in self._staged.values() if each.problem), word)
            del self._awaited[type(word)]
        future.set_result(word)

    def _die(self) -> None:
        with self._lock:
            futures = [future for _, future in self._awaited.values()]
            self._awaited.clear()
        for future in futures:
            future.set_exception(EngineDied(self._thread.cause))
