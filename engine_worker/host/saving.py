"""Writing the active weights where the operator allows it: all of them, or nothing."""

import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.engine import Saved, SaveWeights
from rolloutbus.engine_worker.engine import Checkpointer


def save_weights(checkpointer: Checkpointer, ask: SaveWeights, targets: Mapping[str, str]) -> Saved:
    """Have the engine write into a fresh directory, which then gets the name asked for.

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
        files = sorted(_files(fresh))
        size_bytes = sum((fresh / name).stat().st_size for name in files)
        fresh.rename(folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return Saved(str(folder), files, size_bytes)


def _place(ask: SaveWeights, targets: Mapping[str, str]) -> str:
    place = targets.get(ask.target)
    if place is None:
        known = ", ".join(sorted(targets)) or "none; see the worker's setting `save_targets`"
        message = f"this worker's operator has named no place {ask.target!r}; named are: {known}"
        raise _refusal("unsupported", message, "target")
    if ("://" in place) != (ask.kind == "remote"):
        what = "an address" if "://" in place else "a directory"
        message = f"{ask.target!r} is {what}, which {ask.kind!r} is not written to"
        raise _refusal("bad_request", message, "kind")
    return place


def _files(folder: Path) -> Iterator[str]:
    return (str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())


def _refusal(code: str, message: str, field: str) -> EngineFailed:
    return EngineFailed(Problem(code, message, "not_started", field=field))
