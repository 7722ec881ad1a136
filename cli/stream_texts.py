"""What streams say, put together for people: tokens as text, or as their ids.

It draws nothing; `rolloutbus tail` does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rolloutbus.replay.stream.events import (
    Demoted,
    Finished,
    GapLost,
    LetGo,
    Restored,
    StreamEvent,
    Tokens,
    WorkerJoined,
    WorkerLeft,
)

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""


def harmless(text: str) -> str:
    """For a terminal: what a model says may not command it."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def ids_of(tokens: Sequence[int]) -> str:
    """`3,17,4`: what is shown without a tokenizer."""
    return ",".join(map(str, tokens))


@dataclass(slots=True)
class OpenText:
    """A stream that has not ended."""

    rid: str
    worker: str = ""
    version: int = 0
    n_lost: int = 0
    tokens: list[int] = field(default_factory=list[int])
    """Those that came; what was lost is left out."""


class StreamTexts:
    """All open streams, in the order in which they began, and what is to be said of ended ones."""

    def __init__(self, decode: Decode = ids_of) -> None:
        self._decode = decode
        self.open: dict[str, OpenText] = {}
        self.note = ""
        """How well the reader keeps up; empty: all is told."""
        self.n_workers = 0

    def end_of(self, stream: OpenText, n_chars: int) -> str:
        """The last of what it says so far, on one line."""
        # A token is a character at least, nearly always.
        return " ".join(self._said(stream.tokens[-n_chars:]).split())[-n_chars:]

    def heard(self, event: StreamEvent) -> str:
        """Take an event in; returns what to say of a stream that has ended, or nothing."""
        match event:
            case Tokens():
                self._told(event)
            case Finished():
                self.open.pop(event.rid, None)
                return self._ending(event)
            case GapLost():
                stream = self._stream(event.rid)
                stream.n_lost += event.stop - event.start
            case Demoted(cause):
                slow = "this reader" if cause == "reader" else "this process"
                self.note = f"{slow} is too slow: only results are shown"
            case Restored():
                self.note = ""
            case LetGo(n_streams, _):
                self.open.clear()
                return f"({n_streams} streams were dropped: there was no room for them)"
            case WorkerJoined():
                self.n_workers += 1
            case WorkerLeft():
                self.n_workers -= 1
            case _:
                pass
        return ""

    def _stream(self, rid: str) -> OpenText:
        stream = self.open.get(rid)
        if stream is None:
            stream = self.open[rid] = OpenText(rid)
        return stream

    def _told(self, event: Tokens) -> None:
        stream = self._stream(event.rid)
        stream.worker, stream.version = event.worker, event.version
        del stream.tokens[max(0, event.start - stream.n_lost) :]
        stream.tokens += event.tokens.tolist()

    def _ending(self, event: Finished) -> str:
        versions = "+".join(f"v{version}" for version, _ in event.version_runs) or "v?"
        facts = [event.worker, versions, f"{len(event.tokens)} tokens"]
        if event.n_missing:
            facts.append(f"{event.n_missing} lost")
        facts.append(event.finish_reason or "end not heard")
        return f"{event.rid} ({', '.join(facts)})\n{self._said(event.tokens.tolist())}"

    def _said(self, tokens: Sequence[int]) -> str:
        return harmless(self._decode(tokens))
