"""What one open page is told next: the latest frame, what happened, and new tokens. Pure.

All of it is bounded. What a slow browser does not take is left out, and the page is told how much.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rolloutbus.bus.wire.entry import Attempt
from rolloutbus.bus.wire.errors import BusError
from rolloutbus.replay.stream.events import (
    Demoted,
    Finished,
    GapLost,
    Interrupted,
    LetGo,
    StreamEvent,
    Tokens,
)
from rolloutbus.trainer_adapter.client.fleet_events import FleetEvent, faults_of
from rolloutbus.trainer_adapter.client.fleet_observer import Look
from rolloutbus.trainer_adapter.client.text import TextPieces

Json = dict[str, Any]
Decode = Callable[[list[int]], str]

MAX_STREAMS = 8
"""Followed at once; others are shown when one of them has ended."""
MAX_UNTOLD = 512
"""Tokens of one stream that wait for the page; of more the oldest are left out."""
MAX_HAPPENED = 200
"""Events that wait for the page."""


@dataclass(slots=True)
class _Followed:
    """A stream that is shown, as far as the page was not told of it."""

    rid: str
    worker: str
    attempt: Attempt
    texts: "TokenTexts | None"
    start: int
    """Index of the first token that waits."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    end: str | None = None
    """How it ended; empty: nobody heard how. None: it is under way."""
    has_news: bool = True

    @property
    def next(self) -> int:
        return self.start + len(self.tokens)

    def drop(self, n_tokens: int) -> None:
        """Leaves the oldest out."""
        self.start += n_tokens
        for each in (self.tokens, self.logprobs, self.versions):
            del each[:n_tokens]

    def begin(self, start: int) -> None:
        """Tokens from `start` on are void, or those before it will not come."""
        keep = start - self.start
        if 0 <= keep <= len(self.tokens):
            for each in (self.tokens, self.logprobs, self.versions):
                del each[keep:]
        else:
            self.drop(len(self.tokens))
            self.start = start


class TokenTexts:
    """The text that each token of a stream adds; empty while a character is not whole."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._pieces = TextPieces(decode)
        self._n = 0
        self._next = 0

    def of(self, start: int, tokens: list[int]) -> list[str]:
        """Texts of the tokens from index `start` on; after a jump it begins anew."""
        if start != self._next:
            self._pieces, self._n = TextPieces(self._decode), 0
        texts: list[str] = []
        for token in tokens:
            texts.append(self._pieces.add(self._n, [token], is_last=False))
            self._n += 1
        self._next = start + len(tokens)
        return texts


class LiveView:
    """Takes what a subscriber and an observer say, and gives what the page is to know."""

    def __init__(self, decode: Decode | None = None, match: str = "") -> None:
        """Show streams.

        Args:
            decode: token ids to text; None: the page shows ids.
            match: only streams whose request id or worker contains it.
        """
        self._decode = decode
        self._match = match
        self._frame: Json | None = None
        self._happened: deque[FleetEvent] = deque()
        self._followed: dict[str, _Followed] = {}
        self._skipped = {"frames": 0, "events": 0, "tokens": 0}
        self.error: BusError | None = None
        """Why nothing more will come."""

    def looked(self, look: Look) -> None:
        """The fleet at one moment."""
        self._put_frame(
            msgspec.to_builtins(look.frame)
            | {
                "kind": "frame",
                "pause": look.status.pause,
                "has_store": look.status.store is not None,
                "faults": faults_of(look.status),
                "sessions": {
                    name: n for name, n in look.status.counters.items() if "session" in name
                },
            }
        )
        for event in look.events:
            self._say(event)

    def silent(self, why: str) -> None:
        """The router did not answer."""
        self._put_frame({"kind": "silent", "why": why})

    def heard(self, event: StreamEvent) -> None:
        """Something about the streams."""
        match event:
            case Tokens():
                self._tokens(event)
            case Finished():
                self._finished(event)
            case GapLost(rid=rid) if rid in self._followed:
                self._skipped["tokens"] += event.stop - event.start
            case Demoted():
                self._say(
                    FleetEvent("warning", "page", "shows ends of streams only: too many come")
                )
            case LetGo():
                self._say(FleetEvent("warning", "page", "has let streams go: too many come"))
            case Interrupted():
                self._say(FleetEvent("warning", "page", "lost connections to workers' streams"))
            case _:
                pass

    def take(self) -> Iterator[Json]:
        """All that is to be told now, in order; it is not told again."""
        if any(self._skipped.values()):
            yield {"kind": "skipped", **self._skipped}
            self._skipped = dict.fromkeys(self._skipped, 0)
        if self._frame is not None:
            frame, self._frame = self._frame, None
            yield frame
        if self._happened:
            events = [msgspec.to_builtins(each) for each in self._happened]
            self._happened.clear()
            yield {"kind": "happened", "events": events}
        streams = [self._told(each) for each in self._followed.values() if each.has_news]
        if streams:
            self._followed = {rid: s for rid, s in self._followed.items() if s.end is None}
            yield {"kind": "tokens", "streams": streams}

    def _put_frame(self, frame: Json) -> None:
        if self._frame is not None:
            self._skipped["frames"] += 1
        self._frame = frame

    def _say(self, event: FleetEvent) -> None:
        if len(self._happened) == MAX_HAPPENED:
            self._happened.popleft()
            self._skipped["events"] += 1
        self._happened.append(event)

    def _tokens(self, event: Tokens) -> None:
        stream = self._followed.get(event.rid)
        if stream is None:
            stream = self._follow(event)
        if stream is None:
            return
        if event.start != stream.next:
            stream.begin(event.start)
        stream.worker, stream.attempt = event.worker, event.attempt
        stream.tokens += event.tokens.tolist()
        stream.logprobs += event.logprobs.tolist()
        stream.versions += [event.version] * len(event.tokens)
        stream.has_news = True
        n_over = len(stream.tokens) - MAX_UNTOLD
        if n_over > 0:
            stream.drop(n_over)
            self._skipped["tokens"] += n_over

    def _finished(self, event: Finished) -> None:
        stream = self._followed.get(event.rid)
        if stream is not None:
            stream.end = event.finish_reason or ""
            stream.has_news = True

    def _follow(self, event: Tokens) -> _Followed | None:
        if len(self._followed) >= MAX_STREAMS:
            return None
        if self._match not in event.rid and self._match not in event.worker:
            return None
        texts = TokenTexts(self._decode) if self._decode is not None else None
        stream = _Followed(event.rid, event.worker, event.attempt, texts, event.start)
        self._followed[event.rid] = stream
        return stream

    def _told(self, stream: _Followed) -> Json:
        told: Json = {
            "rid": stream.rid,
            "worker": stream.worker,
            "attempt": stream.attempt,
            "start": stream.start,
            "ids": list(stream.tokens),
            "logprobs": list(stream.logprobs),
            "versions": list(stream.versions),
            "end": stream.end,
        }
        if stream.texts is not None:
            told["texts"] = stream.texts.of(stream.start, stream.tokens)
        stream.drop(len(stream.tokens))
        stream.has_news = False
        return told
