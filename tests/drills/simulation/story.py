"""The story of a failing run: the faults, and what was said about one request."""

from collections.abc import Iterable

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.endings import Fenced, Lost, Problem
from tests.drills.simulation.virtual_time import VirtualTime


class Story:
    """Keeps only lines that matter to the requests it is about."""

    def __init__(self, rids: Iterable[str]) -> None:
        self._rids = [rid for rid in rids if rid]
        self.lines: list[str] = []

    def note(self, time: VirtualTime, text: str) -> None:
        """A fault or a verdict."""
        self.lines.append(f"{time.now - 1000:8.3f}  !  {text}")

    def carried(self, time: VirtualTime, source: str, target: str, entries: list[Entry]) -> None:
        """A batch has arrived."""
        for entry in entries:
            rid = self._about(entry)
            if rid and entry.kind not in {"beat", "idle"}:
                attempt = f" {entry.attempt[0]}.{entry.attempt[1]}" if entry.attempt[1] else ""
                why = _reason(entry)
                head = f"{time.now - 1000:8.3f}     {source} > {target}: "
                self.lines.append(f"{head}{entry.kind} {rid}{attempt}{why}")

    def _about(self, entry: Entry) -> str:
        body = bytes(entry.body)
        return next((rid for rid in self._rids if entry.rid == rid or rid.encode() in body), "")


def _reason(entry: Entry) -> str:
    """What a body says besides naming the request, where that is what a reader wants to know."""
    if entry.kind not in {"refused", "failed", "expired", "lost", "fenced"}:
        return ""
    match unpack(entry):
        case Problem(code, message):
            return f" ({code}: {message})"
        case Lost(_, worker, reason):
            return f" ({worker}: {reason})"
        case Fenced(_, reason):
            return f" ({reason})"
        case _:
            return ""
