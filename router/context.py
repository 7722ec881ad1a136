"""What the parts of the router core share: tables, identity, and the way out."""

from dataclasses import dataclass, field

from msgspec import Raw

from bus.codec import pack
from bus.entry import NO_BODY, Entry
from bus.ids import Attempt
from bus.messages.endings import Problem
from router.clients import Clients
from router.members import SERVING, MemberRecord, Members
from router.outgoing import Outgoing
from router.settings import RouterSettings


@dataclass(slots=True)
class Context:
    """Shared state of one router core."""

    settings: RouterSettings
    instance: str
    members: Members = field(default_factory=Members)
    clients: Clients = field(default_factory=Clients)
    out: Outgoing = field(default_factory=Outgoing)
    router_epoch: int = 1
    is_recovering: bool = True
    committed: dict[str, int] = field(default_factory=dict[str, int])
    """Last committed version per policy."""
    counters: dict[str, int] = field(default_factory=dict[str, int])
    has_member_news: bool = False
    """Clients are to be told of the members again."""
    _n_attempts: int = 0

    def next_attempt(self) -> Attempt:
        """A number no attempt had before."""
        self._n_attempts += 1
        return (self.router_epoch, self._n_attempts)

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + by

    def committed_of(self, policy: str) -> int:
        """Last committed version of a policy; 0 before the first."""
        return self.committed.get(policy, 0)

    def is_fit(self, worker: MemberRecord) -> bool:
        """Whether it could serve: alive, ready, not behind, and not tripped."""
        return (
            worker.state == "live"
            and worker.beat.state in SERVING
            and worker.version >= self.committed_of(worker.policy)
            and not worker.is_tripped
        )

    def is_serving(self, worker: MemberRecord) -> bool:
        """Whether it takes any request."""
        return self.is_fit(worker) and not worker.is_set_aside

    def to_client(self, client: str, entry: Entry) -> None:
        """Send to a client by name; dropped if it is away (whoever cares re-sends)."""
        record = self.clients.named(client)
        if record is not None:
            self.out.send(record.peer, entry)

    def to_member(self, member: MemberRecord, kind: str, body: Raw) -> None:
        """Send a message outside of any command to a member."""
        self.out.send(member.peer, Entry(kind, epoch=member.epoch, body=body))

    def finish(self, client: str, rid: str, body: Raw = NO_BODY) -> None:
        """Answer a client's command with `finished`."""
        self.to_client(client, Entry("finished", rid, body=body))

    def refuse(self, client: str, rid: str, problem: Problem, kind: str = "refused") -> None:
        """Answer a client's command with `refused`, `expired` or `failed`."""
        self.to_client(client, Entry(kind, rid, body=pack(problem)))


def refusal(code: str, message: str, field_name: str = "", retry_after_ms: int = 0) -> Problem:
    """Why nothing was started."""
    return Problem(code, message, "not_started", field_name, retry_after_ms)


def check_deadline(entry: Entry) -> Problem | None:
    """Every command has a deadline."""
    if entry.deadline_ms > 0:
        return None
    return refusal("bad_request", "a command needs a deadline of at least 1 ms", "deadline_ms")
