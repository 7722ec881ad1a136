"""What commands write on this machine: checkpoints and profiles, below paths of the operator."""

import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.control import Profiled, Saved, SaveWeights, StartProfile
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.engine_worker.engine import Checkpointer, EngineBusy, Profiler
from rolloutbus.engine_worker.engines.shared.checkpoint_writer import INDEX
from rolloutbus.engine_worker.host.object_storage import SCHEME, ObjectPrefix
from rolloutbus.engine_worker.settings import WorkerSettings

NOWHERE: Mapping[str, str] = {}


class OperatorPaths(NamedTuple):
    """Directories from the worker's settings; peers name what lies below these, nothing else."""

    weights_root: str = ""
    """Versions and adapters are read from files here; empty: none are."""
    save_targets: Mapping[str, str] = NOWHERE
    """Name -> directory or address that weights may be written to."""
    profile_dir: str = ""
    """Profiles are written here; empty: none are."""

    @classmethod
    def of(cls, settings: WorkerSettings) -> Self:
        """The paths of a worker."""
        return cls(settings.weights_root, settings.save_targets, settings.profile_dir)


class Profiles:
    """Records at most one profile at a time."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._folder: Path | None = None

    def start(self, profiler: Profiler, ask: StartProfile) -> Done:
        """Begin one; EngineFailed: the operator allows none; EngineBusy: one is being recorded."""
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
        """End it and return its files; EngineBusy: none is being recorded."""
        folder = self._folder
        if folder is None:
            raise EngineBusy("no profile is being recorded; send start_profile first")
        self._folder = None  # also if it fails: the profiler records no more
        profiler.stop()
        root = Path(self._root)
        found = [each for each in folder.rglob("*") if each.is_file()]
        return Profiled(sorted(str(each.relative_to(root)) for each in found))


def save_weights(checkpointer: Checkpointer, ask: SaveWeights, targets: Mapping[str, str]) -> Saved:
    """Have the engine write into a new directory, which then gets the name asked for.

    Raises:
        EngineFailed: the operator has named no such place, it does not fit the kind, or something
            is there already.
        ValueError, EngineBusy, OSError: the engine could not write; nothing is left behind.
    """
    place = _place(ask, targets)
    if ask.kind == "remote":
        address = f"{place.rstrip('/')}/{ask.name}"
        checkpointer.save(address, ask.kind)
        return Saved(address, [], 0)
    if place.startswith(SCHEME):
        return _save_objects(checkpointer, ask, f"{place.rstrip('/')}/{ask.name}")
    if not Path(place).is_dir():
        message = f"the directory of {ask.target!r} is not there; its operator has to make it"
        raise _refusal("unsupported", message, "target")
    folder = Path(place) / ask.name
    if folder.is_symlink() or (folder.exists() and any(folder.iterdir())):
        raise _refusal("bad_request", f"{ask.name!r} is there already; choose another name", "name")
    fresh = folder.with_name(f".{ask.name}-{secrets.token_hex(4)}")
    fresh.mkdir()
    try:
        checkpointer.save(str(fresh), ask.kind)
        saved = _saved(str(folder), fresh)
        fresh.rename(folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return saved


def _save_objects(checkpointer: Checkpointer, ask: SaveWeights, address: str) -> Saved:
    """Write to a directory for temporary files, and from there to the storage."""
    objects = ObjectPrefix.of(address)
    objects.require_empty()
    with tempfile.TemporaryDirectory(prefix="rolloutbus-") as folder:
        checkpointer.save(folder, ask.kind)
        saved = _saved(address, Path(folder))
        objects.upload(Path(folder), saved.files, last=INDEX)
    return saved


def _saved(place: str, folder: Path) -> Saved:
    files = sorted(_files(folder))
    return Saved(place, files, sum((folder / name).stat().st_size for name in files))


def _place(ask: SaveWeights, targets: Mapping[str, str]) -> str:
    place = targets.get(ask.target)
    if place is None:
        known = ", ".join(sorted(targets)) or "none; see the worker's setting `save_targets`"
        message = f"this worker's operator has named no place {ask.target!r}; named are: {known}"
        raise _refusal("unsupported", message, "target")
    holds_objects = place.startswith(SCHEME) and ask.kind != "remote"
    if ("://" in place) != (ask.kind == "remote") and not holds_objects:
        what = "an address" if "://" in place else "a directory"
        message = f"{ask.target!r} is {what}, which {ask.kind!r} is not written to"
        raise _refusal("bad_request", message, "kind")
    return place


def _files(folder: Path) -> Iterator[str]:
    return (str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())


def _refusal(code: str, message: str, field: str) -> EngineFailed:
    return EngineFailed(Problem(code, message, "not_started", field=field))
