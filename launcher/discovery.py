"""The fleets that run here: each has a name, and a small file that other commands find it by.

Who brings a fleet up holds a lock on its name for as long as it runs. The kernel gives the lock
back when that process ends, however it ends. So a file whose lock is free is stale, and is removed
by the next one that looks. A process id alone would tell nothing, since ids come again.
"""

import os
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.near_names import nearest
from rolloutbus.launcher.run_dir import locked, take_lock, user_dir

DEFAULT_NAME = "default"
"""Of a fleet that is given none; if that is taken, default-2, default-3, …"""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class RunningFleet(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet of this user on this machine."""

    name: str
    pid: int
    """Of the process that brought it up."""
    since: float
    """When that was, in seconds since 1970."""
    model: str = ""
    engine: str = ""
    workers: int = 0
    address: str = ""
    """Where clients connect; empty: it is still starting."""
    key_file: str = ""
    """What commands connect with; empty if it asks for no keys."""
    control: str = ""
    """Socket where its launcher takes orders; empty: it takes none."""


class NoSuchFleet(SettingsError):
    """No fleet of this user's has the name, or none runs at all, or it is still starting."""


class NoFleetRuns(NoSuchFleet):
    """None of this user's runs here."""

    def __init__(self) -> None:
        super().__init__("no fleet of yours runs here: start one with `rolloutbus up`")


class AmbiguousFleet(SettingsError):
    """Several fleets run here, and the command could mean any of them.

    `.names`: theirs, sorted.
    """

    def __init__(self, fleets: Sequence[RunningFleet]) -> None:
        self.names = sorted(each.name for each in fleets)
        super().__init__(
            f"{len(fleets)} fleets of yours run here: say which one with --name "
            f"({', '.join(self.names)}); `rolloutbus ls` tells more"
        )


class Registration:
    """The name of one fleet while it runs. A context manager: leaving it gives the name back."""

    def __init__(self, name: str, *, model: str = "", engine: str = "", workers: int = 0) -> None:
        """Nothing is taken before it is entered.

        Args:
            name: that the user chose; empty: the next one of `DEFAULT_NAME` that is free.
            model: for people; so are the others.
            engine: its kind.
            workers: how many.

        Raises:
            SettingsError: it cannot be a name.
        """
        check_name(name)
        self._wanted = name
        self._fleet = RunningFleet(
            name=name,
            pid=os.getpid(),
            since=time.time(),
            model=model,
            engine=engine,
            workers=workers,
        )
        self._lock = -1

    @property
    def name(self) -> str:
        """Name of the fleet; final once it is entered."""
        return self._fleet.name

    def __enter__(self) -> Self:
        """Take the name.

        Raises:
            SettingsError: a running fleet has it.
        """
        base = user_dir()
        with locked(base):
            taken = {each.name: each for each in _living(base)}
            if (other := taken.get(self._wanted)) is not None:
                raise SettingsError(
                    f"name: a fleet named {other.name} runs here already (pid {other.pid}): "
                    "choose another name, or end that one"
                )
            name = self._wanted or _free_name(taken)
            self._lock = take_lock(_lock_file(base, name), blocking=False)
            self._fleet = msgspec.structs.replace(self._fleet, name=name)
            self._write()
        return self

    def __exit__(self, *_: object) -> None:
        base = user_dir()
        with locked(base):
            _forget(base, self.name)
        os.close(self._lock)

    def announce(self, address: str, key_file: str = "", control: str = "") -> None:
        """Report that clients can connect; again when the address has changed."""
        self._fleet = msgspec.structs.replace(
            self._fleet, address=address, key_file=key_file, control=control
        )
        self._write()

    def resized(self, workers: int) -> None:
        """Report how many workers there are now."""
        self._fleet = msgspec.structs.replace(self._fleet, workers=workers)
        self._write()

    def _write(self) -> None:
        path = _entry(user_dir(), self.name)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        draft.write_bytes(msgspec.json.encode(self._fleet) + b"\n")
        draft.replace(path)


def running_fleets() -> list[RunningFleet]:
    """This user's fleets on this machine, oldest first; removes the entries of dead fleets."""
    base = user_dir()
    with locked(base):
        return sorted(_living(base), key=lambda each: each.since)


def find_fleet(name: str = "") -> RunningFleet:
    """The fleet of this name; without one, the only fleet that runs here.

    Raises:
        NoSuchFleet: there is none, or clients cannot connect to it yet.
        AmbiguousFleet: there are several, and no name says which.
    """
    fleets = running_fleets()
    named = [each for each in fleets if each.name == name] if name else fleets
    if name and not named:
        names = sorted(each.name for each in fleets)
        near = nearest(name, names)
        hint = f"; did you mean {near}?" if near else ""
        there = f"there are {', '.join(names)}" if names else "none runs"
        raise NoSuchFleet(f"no fleet of yours named {name[:64]!r} runs here: {there}{hint}")
    if not named:
        raise NoFleetRuns
    if len(named) > 1:
        raise AmbiguousFleet(fleets)
    (found,) = named
    if not found.address:
        began = time.strftime("%H:%M:%S", time.localtime(found.since))
        raise NoSuchFleet(
            f"the fleet {found.name} has been starting since {began} (pid {found.pid}): try again "
            "when `rolloutbus ls` shows its address"
        )
    return found


def model_of(address: str) -> Path | None:
    """Directory of the model that a fleet of this user's on this machine was brought up with.

    Args:
        address: as commands take it: a fleet's name, or an endpoint; empty: the only fleet here.

    Returns:
        None: it has none that lies here, or it is no fleet of this machine.

    Raises:
        AmbiguousFleet: there are several, and no name says which.
    """
    if "://" in address:
        here = {each.address: each.model for each in running_fleets()}
        model = here.get(address, "")
    else:
        try:
            model = find_fleet(address).model
        except NoSuchFleet:
            return None  # connecting says it
    directory = Path(model)
    return directory if model and directory.is_dir() else None


def check_name(name: str) -> None:
    """SettingsError unless it can be a fleet's; empty is none."""
    if name and NAME.fullmatch(name) is None:
        raise SettingsError(
            f"name: {name[:80]!r} is no name: up to 64 letters, digits, '.', '_' and '-', "
            "a letter or digit first"
        )


def _free_name(taken: dict[str, RunningFleet]) -> str:
    numbered = (f"{DEFAULT_NAME}-{n}" for n in range(2, len(taken) + 3))
    return next(name for name in (DEFAULT_NAME, *numbered) if name not in taken)


def _living(base: Path) -> list[RunningFleet]:
    """Running fleets of all entries; stale entries are removed. The user's lock is held."""
    found: list[RunningFleet] = []
    for path in base.glob("fleet-*.json"):
        name = path.name.removeprefix("fleet-").removesuffix(".json")
        try:
            os.close(take_lock(_lock_file(base, name), blocking=False))
        except OSError:
            if (fleet := _read(path)) is not None:
                found.append(fleet)
        else:
            _forget(base, name)
    return found


def _read(path: Path) -> RunningFleet | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunningFleet)
    except (OSError, msgspec.DecodeError):
        return None  # another release's


def _forget(base: Path, name: str) -> None:
    _entry(base, name).unlink(missing_ok=True)
    _lock_file(base, name).unlink(missing_ok=True)


def _entry(base: Path, name: str) -> Path:
    return base / f"fleet-{name}.json"


def _lock_file(base: Path, name: str) -> Path:
    return base / f"fleet-{name}.lock"
