"""The error tree: what a caller can catch, and what state each error leaves the world in.

    BusError                    .outcome: "not_started" | "unknown" | "failed"
    ├─ ProtocolError            someone broke docs/protocol.md
    │  ├─ LocalProtocolError    we did: a bug
    │  └─ RemoteProtocolError   the peer did: its frame was dropped
    ├─ SettingsError            not_started: a setting is wrong; the message says which
    ├─ SecurityError            failed: the locks on our own sockets do not work
    ├─ DeliveryError            no ending came
    │  ├─ MailboxFull           not_started: retry later or elsewhere
    │  ├─ PeerLost              unknown: retry only what may run twice
    │  │  └─ OtherFleet         unknown: another fleet answers at the router's address
    │  └─ DeadlineExceeded      unknown
    ├─ RequestError             an ending came, and it was not `finished`
    │  ├─ Refused               not_started: safe to submit again
    │  │  └─ StaleVersion       not_started: the weight version does not fit
    │  ├─ RequestCancelled      unknown: it was aborted; `.partial` holds what was sampled
    │  ├─ OutcomeUnknown        unknown: a weight version may be committed; ask for its `outcome`
    │  ├─ RequestExpired        unknown: its deadline passed at the router or a worker
    │  └─ EngineFailed          failed
    ├─ FleetCommandFailed       some workers did not do a command; `.result` tells of each
    ├─ WrongEventLoop           not_started: it belongs to another event loop
    ├─ ProcessFailed            failed: a process kept dying, and its supervisor gave up
    └─ ActorStopped             not_started: the actor stopped first

Callers branch on `.outcome` and `.code`, never on text.
"""

from typing import ClassVar

from rolloutbus.bus.wire.messages.endings import Outcome, Problem


class BusError(Exception):
    """Root of everything this project raises on purpose."""

    default_outcome: ClassVar[Outcome] = "unknown"

    def __init__(self, message: str, *, outcome: Outcome | None = None) -> None:
        super().__init__(message)
        self.outcome: Outcome = outcome or self.default_outcome

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles class, arguments and fields, so that a process pool can return the error."""
        return restored, (type(self), self.args, dict(self.__dict__))


def restored(kind: type[BusError], args: tuple[object, ...], fields: dict[str, object]) -> BusError:
    """Rebuild an error that was pickled in another process."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


def cannot_be_pickled(what: object, instead: str) -> TypeError:
    """The error of `__reduce__` for objects that are bound to a process; pass `instead`."""
    return TypeError(
        f"a {type(what).__name__} cannot be pickled or copied: its sockets belong to this process; "
        f"pass {instead}"
    )


class ProtocolError(BusError):
    """Someone broke docs/protocol.md."""


class LocalProtocolError(ProtocolError):
    """We did: a bug."""


class RemoteProtocolError(ProtocolError):
    """The peer did; its frame was dropped and counted."""


class SettingsError(BusError):
    """A setting is wrong; nothing was started."""

    default_outcome = "not_started"


class WrongEventLoop(BusError):
    """An object was used on another event loop than that which opened it; nothing was done."""

    default_outcome = "not_started"


class SecurityError(BusError):
    """The locks on our own sockets do not work: nothing is served (any more)."""

    default_outcome = "failed"


class DeliveryError(BusError):
    """No ending came."""


class MailboxFull(DeliveryError):
    """The local queue is at its limit; nothing was sent."""

    default_outcome = "not_started"


class PeerLost(DeliveryError):
    """The worker or router went away while the command ran."""


class OtherFleet(PeerLost):
    """Another fleet answers at the router's address: versions of the former one mean nothing."""


class DeadlineExceeded(DeliveryError):
    """The deadline passed before an ending came."""


class RequestError(BusError):
    """A command ended, and not with `finished`."""

    def __init__(self, problem: Problem, *, rid: str = "") -> None:
        place = f" (field {problem.field})" if problem.field else ""
        super().__init__(f"{problem.code}: {problem.message}{place}", outcome=problem.outcome)
        self.problem = problem
        self.code = problem.code
        self.field = problem.field
        self.retry_after_ms = problem.retry_after_ms
        self.rid = rid


class Refused(RequestError):
    """Nothing was started; safe to submit again."""


class StaleVersion(Refused):
    """The weight version does not fit; nothing was started.

    `.code` is `version_unavailable` if no one who could answer has it: not yet, not in time, or not
    any more. It is `stale_version` if an update would go back to it: numbers only grow.
    """


class RequestCancelled(RequestError):
    """The request was aborted."""


class OutcomeUnknown(RequestError):
    """A weight version may be committed, or never be: ask `WeightPublisher.outcome`."""

    version = 0
    """Which one; 0 if that is not known here."""


class RequestExpired(RequestError):
    """The deadline passed at the router or at a worker."""


class EngineFailed(RequestError):
    """The command ran and failed."""


class ProcessFailed(BusError):
    """A supervised process could not be kept running; everything beside it was stopped."""

    default_outcome = "failed"

    def __init__(self, name: str, message: str, log: str = "") -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.log = log
        """The last lines of its log."""


class ActorStopped(BusError):
    """The actor stopped before it took the command up."""

    default_outcome = "not_started"
