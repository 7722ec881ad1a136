"""Profiles of an engine: each in a directory of its own below the one that the operator allows."""

import secrets
from pathlib import Path

from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.engine import Profiled, StartProfile
from rolloutbus.engine_worker.engine import Profiler
from rolloutbus.engine_worker.engines.shared.step_loop import EngineBusy


class Profiles:
    """The one that is being recorded, if any."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._folder: Path | None = None

    def start(self, profiler: Profiler, ask: StartProfile) -> Done:
        """Begin one.

        Raises:
            EngineFailed: the operator allows none.
            EngineBusy: one is being recorded.
        """
        if not self._root:
            message = "This worker writes no profiles: its operator has set no `profile_dir`."
            raise EngineFailed(Problem("unsupported", message, "not_started"))
        if self._folder is not None:
            raise EngineBusy("a profile is being recorded; send stop_profile first")
        folder = Path(self._root) / f"profile-{secrets.token_hex(4)}"
        folder.mkdir(parents=True)
        try:
            profiler.start(folder, ask)
        except BaseException:
            folder.rmdir()
            raise
        self._folder = folder
        return Done(folder.name)

    def stop(self, profiler: Profiler) -> Profiled:
        """End it, and tell its files.

        Raises:
            EngineBusy: none is being recorded.
        """
        folder = self._folder
        if folder is None:
            raise EngineBusy("no profile is being recorded; send start_profile first")
        profiler.stop()
        self._folder = None
        root = Path(self._root)
        found = [each for each in folder.rglob("*") if each.is_file()]
        return Profiled(sorted(str(each.relative_to(root)) for each in found))
