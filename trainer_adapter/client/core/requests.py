"""A request as its client sees it: its record and its life cycle.

The client holds the truth: what was asked, what came back so far, which executions are dead.
"""

from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import Raw

from rolloutbus.bus.actor.effects import next_state
from rolloutbus.bus.actor.ref import ROUTER, Command
from rolloutbus.bus.prefix_hashes import marks_of
from rolloutbus.bus.streams.reassembly import Assembly
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.commands import KINDS
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Attempt, Entry, Placement
from rolloutbus.bus.wire.errors import LocalProtocolError, Refused
from rolloutbus.bus.wire.limits import MAX_DEADLINE_MS, MAX_TOKENS_BYTES
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Generate
from rolloutbus.bus.wire.messages.weights import PublishVersion
from rolloutbus.bus.wire.outgoing import sealed
from rolloutbus.bus.wire.validation import cost_of, is_pinned, truncates
from rolloutbus.trainer_adapter.client.core.results import OnLoss

RequestState = Literal["unsent", "sent", "queued", "running", "deferred", "ended"]

REQUEST_LIFE: dict[RequestState, dict[str, RequestState]] = {
    # waits for the link, or to be sent again
    "unsent": {"sent": "sent", "relinked": "unsent", "lost": "unsent", "ended": "ended",
               "deferred": "deferred", "queued": "queued", "accepted": "running"},
    # nothing heard of it yet: sent again every now and then
    "sent": {"sent": "sent", "queued": "queued", "accepted": "running", "lost": "unsent",
             "deferred": "deferred", "relinked": "unsent", "ended": "ended"},
    # waits at the router
    "queued": {"queued": "queued", "accepted": "running", "lost": "unsent",
               "deferred": "deferred", "relinked": "unsent", "ended": "ended"},
    # a worker has begun
    "running": {"queued": "running", "accepted": "running", "lost": "unsent",
                "deferred": "deferred", "relinked": "unsent", "ended": "ended"},
    # no worker was ready for it: waits here, held by nobody else
    "deferred": {"sent": "sent", "relinked": "deferred", "lost": "deferred", "ended": "ended",
                 "queued": "deferred", "accepted": "deferred", "deferred": "deferred"},
    "ended": {},
}  # fmt: skip
"""state -> event -> state."""

MAX_DEAD = 256
"""Limit of void executions remembered per request; the oldest are forgotten first."""


class Ask(msgspec.Struct, frozen=True):
    """What a caller asks for, once and for all."""

    kind: str
    """A command of `bus.wire.commands.COMMANDS`."""
    body: msgspec.Struct
    route: str = ""
    place: Placement | None = None
    """Set on a `generate`, and only there."""
    on_loss: OnLoss = "resume"
    retries_busy: bool = False
    """Wait out `refused(busy)` instead of raising it."""
    rid: str = ""
    """Of an `attach`: the request taken up; empty: a new one."""
    is_followed: bool = False
    """Of an `attach`: a caller reads its deltas."""
    n_prompt_dropped: int = 0
    """Of a `generate`: see `Rollout`."""

    @property
    def is_detached(self) -> bool:
        """Whether it goes on without its caller."""
        return bool(self.rid) or (self.place is not None and self.place.outlives_client)


def asked_by(command: Command | Ask, *, stream: bool = False) -> Ask:
    """Returns the Ask for a message to a ref; its generate has no placement wishes.

    Raises:
        Refused: a generate names its worker.
        LocalProtocolError: a stream of something that has no deltas.
    """
    if isinstance(command, Ask):
        return command
    body = command.body
    if not isinstance(body, Generate):
        if stream:
            raise LocalProtocolError(f"{command.kind} has no deltas")
        return Ask(command.kind, body, route=command.route)
    if command.route != ROUTER:
        sentence = "the router places a generate; it has no other address"
        raise Refused(Problem("bad_request", sentence, "not_started", field="route"))
    cost = cost_of(body)
    body = msgspec.structs.replace(body, stream=stream)
    return Ask(command.kind, body, place=Placement("default", cost=cost))


def sealed_ask(ask: Ask) -> tuple[Ask, Raw]:
    """The ask with what its receiver will read, and its body's bytes; both can be sent.

    Raises:
        Refused: a field has a wrong type or size; `.field` names it.
    """
    body, packed = sealed(ask.body, KINDS[ask.kind])
    header = Entry(ask.kind, rid=ask.rid, route=ask.route, place=ask.place)
    header, _ = sealed(header, Entry)
    return (
        msgspec.structs.replace(
            ask, body=body, route=header.route, place=header.place, rid=header.rid
        ),
        packed,
    )


@dataclass(slots=True)
class OpenRequest:
    """One command under way."""

    rid: str
    ask: Ask
    deadline_at: float
    packed: Raw | None = None
    """Its body's bytes, until it was sent once: a prompt is not kept twice."""
    state: RequestState = "unsent"
    assembly: Assembly = field(default_factory=Assembly)
    """Only a `generate` fills it."""
    attempt: Attempt = NO_ATTEMPT
    """The latest execution heard of."""
    dead_attempts: set[Attempt] = field(default_factory=set[Attempt])
    """Executions that were lost, refused or stopped: nothing of theirs counts any more."""
    worker: str = ""
    n_attempts: int = 0
    n_crashes: int = 0
    n_tries: int = 0
    """Times it was deferred because no worker was ready: the more, the longer the next wait."""
    owes_retry: bool = False
    """An engine crashed under it: sending it again takes from the budget for retries."""
    was_sent: bool = False
    may_run: bool = False
    """Sent over an earlier link, so that a worker may have it without its router knowing."""
    n_sent: int = 0
    """Times in a row that it was sent without an answer: the more, the longer the next wait."""
    heard_at: float = 0.0
    """When an execution of it was last heard of."""
    n_prefix: int = 0
    """Tokens that the last send carried along."""
    refusal: Problem | None = None
    """Why it is deferred."""
    abort_since: float | None = None
    """When the caller first wanted it stopped."""

    @property
    def is_generate(self) -> bool:
        """Whether it samples tokens (else it is a control command)."""
        return self.ask.kind in ("generate", "attach")

    @property
    def is_update(self) -> bool:
        """Whether it publishes weights."""
        return isinstance(self.ask.body, PublishVersion)

    @property
    def is_wanted(self) -> bool:
        """Whether it is to be sent again: only it can tell that an aborted update was committed."""
        return self.abort_since is None or self.is_update

    def may_be_aborted(self, *, by_name: bool) -> bool:
        """Whether an abort concerns it; an update has to be named."""
        return self.is_generate or (by_name and self.is_update)

    @property
    def n_prompt_tokens(self) -> int:
        """0 for a control command."""
        return len(self.ask.body.prompt) // 4 if isinstance(self.ask.body, Generate) else 0

    @property
    def max_tokens(self) -> int:
        """Limit of the tokens in its result; the client rejects more."""
        if isinstance(self.ask.body, Generate):
            return max(0, self.ask.body.sampling.max_new_tokens)
        return MAX_TOKENS_BYTES // 4

    @property
    def is_streamed(self) -> bool:
        """Whether a caller reads its deltas."""
        return self.ask.is_followed or (
            isinstance(self.ask.body, Generate) and self.ask.body.stream
        )

    @property
    def is_truncated(self) -> bool:
        """Whether its tokens are drawn from less than the whole vocabulary."""
        if not isinstance(self.ask.body, Generate):
            return False
        return truncates(self.ask.body.sampling)

    @property
    def is_held_here(self) -> bool:
        """Whether only this client can know of the request."""
        return self.state == "deferred" or (self.state == "unsent" and not self.may_run)

    @property
    def may_resume(self) -> bool:
        """Whether another execution may go on after the tokens held.

        An adapter that was named without its version may be another one there: it begins again.
        """
        lora = self.ask.body.lora if isinstance(self.ask.body, Generate) else ""
        return self.ask.on_loss != "retry" and (not lora or is_pinned(lora))

    def advance(self, event: str) -> RequestState:
        """Move along REQUEST_LIFE.

        Raises:
            LocalProtocolError: the event has no meaning in this state; nothing changed.
        """
        self.state = next_state(REQUEST_LIFE, self.state, event, f"request {self.rid}")
        return self.state

    def saw(self, attempt: Attempt, worker: str) -> bool:
        """Records an execution; returns False if it is dead or older than the latest."""
        if attempt == self.attempt:
            return attempt not in self.dead_attempts
        if attempt < self.attempt or attempt in self.dead_attempts:
            return False
        self.attempt = attempt
        self.worker = worker
        self.n_attempts += 1
        self.assembly.begin(self.n_prefix)
        return True

    def bury(self, attempt: Attempt) -> bool:
        """Marks an execution as void; returns False if a later one is known."""
        is_latest = attempt >= self.attempt
        if attempt != NO_ATTEMPT:
            self.saw(attempt, self.worker)
            self.dead_attempts.add(attempt)
            if len(self.dead_attempts) > MAX_DEAD:
                self.dead_attempts.discard(min(self.dead_attempts))
        return is_latest

    def entry(self, now: float, *, has_marks: bool = False) -> Entry:
        """What is sent for it now: everything held goes along as a prefix.

        Args:
            now: seconds.
            has_marks: the router wants to know how the prompt begins.
        """
        ask = self.ask
        body, place = ask.body, ask.place
        if isinstance(body, Generate) and self.assembly.n_tokens and self.may_resume:
            body = msgspec.structs.replace(body, prefix=self.assembly.prefix())
            self.n_prefix = self.assembly.n_tokens
            self.packed = None
        else:
            self.n_prefix = 0
        if place is not None and self.may_run:
            place = msgspec.structs.replace(place, resend=True)
        if has_marks and place is not None:
            place = msgspec.structs.replace(place, marks=_marks_for(body))
        packed, self.packed = self.packed, None
        return Entry(
            kind=ask.kind,
            rid=self.rid,
            route=ask.route,
            deadline_ms=min(MAX_DEADLINE_MS, max(1, round(1000 * (self.deadline_at - now)))),
            place=place,
            body=pack(body) if packed is None else packed,
        )


def _marks_for(body: msgspec.Struct) -> bytes:
    """Of the prompt, if its tokens alone say what is cached of it."""
    if not isinstance(body, Generate) or body.lora or body.media:
        return b""
    return marks_of(body.prompt)
