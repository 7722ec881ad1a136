"""What does not change about an engine while its worker lives: asked once, then remembered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from rolloutbus.bus.actor.ref import FLEET
from rolloutbus.bus.wire.errors import Refused, SettingsError
from rolloutbus.bus.wire.messages.control import ServerFacts, ServerInfo
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.membership import Member
from rolloutbus.trainer_adapter.client.commands import Commands

MAX_TOLD = 8
"""Names of workers in one sentence."""


@dataclass(frozen=True, slots=True)
class FixedFacts:
    """An engine as it was started."""

    engine: str
    """Kind of it: `sglang`, `transformers`, `fake`."""
    vocab_size: int
    """Tokens."""
    max_context: int
    """Prompt + new tokens of one request, at most."""
    slots: int
    """Requests that run side by side."""
    tp_size: int
    """Ranks that the tensors are split over."""
    pp_size: int
    """Stages of the pipeline."""
    dp_size: int
    """Replicas within a worker."""
    ep_size: int
    """Ranks that the experts are split over."""
    features: frozenset[str]
    """What a `generate` may ask for; docs/protocol.md, "Generation"."""
    software: Mapping[str, str]
    """Name -> version of what the engine is made of."""


class FactsBook:
    """Facts of workers by name, under the lease that each had when it was asked."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._known: dict[str, tuple[str, FixedFacts]] = {}
        """Worker -> (epoch of its lease, facts)."""

    async def of(self, worker: str, policy: str, deadline_s: float) -> FixedFacts:
        """Facts of one worker, or of all workers of a policy, which must be alike.

        Raises:
            Refused: no such worker is there.
            SettingsError: they differ; the message says in what.
            BusError: none of those that were asked has answered.
        """
        here = self._commands.connection.members
        members = [
            each for each in here if (each.name == worker if worker else each.policy == policy)
        ]
        if not members:
            raise Refused(_nobody(worker, policy, here))
        strange = [each for each in members if not self._knows(each)]
        if strange:
            await self._ask(strange, deadline_s)
        return _alike({m.name: self._known[m.name][1] for m in members if self._knows(m)})

    def _knows(self, member: Member) -> bool:
        return self._known.get(member.name, ("",))[0] == member.epoch

    async def _ask(self, members: Sequence[Member], deadline_s: float) -> None:
        """Note what these tell; one that is lost meanwhile tells nothing."""
        target = members[0].name if len(members) == 1 else FLEET
        result = await self._commands.to_workers(ServerInfo(), target, deadline_s, check=False)
        told = {
            each.name: (each.epoch, _fixed(facts))
            for each in members
            if isinstance(facts := result.by_worker.get(each.name), ServerFacts)
        }
        if not told:
            result.check()
        self._known |= told


def _nobody(worker: str, policy: str, here: Sequence[Member]) -> Problem:
    if not worker:
        message = f"no worker of policy {policy[:80]!r} is there"
        return Problem("not_ready", message, "not_started", retry_after_ms=250)
    names = ", ".join(sorted(each.name for each in here)[:MAX_TOLD])
    there = f"there are {names}" if names else "there is no worker"
    message = f"no worker {worker[:80]!r} is there; {there}"
    return Problem("unknown_worker", message, "not_started", field="worker")


def _fixed(facts: ServerFacts) -> FixedFacts:
    """What of these facts stays. An engine that tells of no ranks has one."""
    sizes = {f"{kind}_size": facts.parallel.get(kind, 1) for kind in ("tp", "pp", "dp", "ep")}
    return FixedFacts(
        engine=facts.engine,
        vocab_size=facts.vocab_size,
        max_context=facts.max_context,
        slots=facts.slots,
        features=frozenset(facts.features),
        software=dict(facts.software),
        **sizes,
    )


def _alike(by_worker: Mapping[str, FixedFacts]) -> FixedFacts:
    (name, first), *others = by_worker.items()
    for other, facts in others:
        for field in (each.name for each in fields(FixedFacts)):
            one, another = getattr(first, field), getattr(facts, field)
            if one != another:
                message = (
                    f"workers differ in {field}: {name} has {one!r:.80}, {other} {another!r:.80}"
                )
                raise SettingsError(f"{message}; ask one, as facts({name!r})")
    return first
