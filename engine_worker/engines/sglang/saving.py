"""Writing SGLang's active weights to files and other places."""

import threading
from collections.abc import Callable
from pathlib import Path

from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.engine import SaveKind
from rolloutbus.engine_worker.engine import WeightSink
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.guard import StateGuard
from rolloutbus.engine_worker.engines.shared.checkpoint_writer import (
    copy_description,
    write_checkpoint,
)


class Saving:
    """Implements `Checkpointer`; calls come from any thread but the engine's."""

    def __init__(
        self, thread: EngineThread, guard: StateGuard, weights: WeightSink, model: Path
    ) -> None:
        self._thread = thread
        self._guard = guard
        self._weights = weights
        self._model = model
        self._lock = threading.Lock()
        """SGLang has one socket for these calls."""

    def save(self, destination: str, kind: SaveKind) -> None:
        """See `Checkpointer`.

        Raises:
            EngineBusy: there are no whole weights to be saved.
            EngineFailed: SGLang could not write.
        """
        self._guard.check_whole()
        engine, folder = self._thread.engine, Path(destination)
        match kind:
            case "safetensors":
                write_checkpoint(self._weights, self._model, folder)
            case "sharded":
                # As every rank holds them; `load_format=sharded_state` reads it again.
                self._ask(
                    lambda: engine.save_sharded_model(path=destination, pattern=None, max_size=None)
                )
                copy_description(self._model, folder)
            case "remote":
                self._ask(lambda: engine.save_remote_model(url=destination))

    def _ask(self, call: Callable[[], None]) -> None:
        """SGLang answers on a socket of its own, not on the engine's loop."""
        with self._lock:
            self._thread.check()
            try:
                call()
            except AssertionError as error:
                message = f"SGLang could not save its weights: {error}"
                raise EngineFailed(Problem("engine_failed", message, "failed")) from error
