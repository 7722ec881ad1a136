"""What the weight store has written down, as a router takes it: commits, waves, adapters.

Spec: docs/protocol.md, "Weights", 3 and 10.
"""

from rolloutbus.bus.wire.messages.membership import StoreFacts
from rolloutbus.router.context import Context, Waves
from rolloutbus.router.members.records import MemberRecord


def store_facts(context: Context) -> StoreFacts | None:
    """What the store that is connected offers."""
    store = context.members.store()
    return None if store is None else store.hello.store


def why_no_store(context: Context, now: float) -> str:
    """Why workers wait for the store in vain; empty: it is connected and talks."""
    store = context.members.store()
    if store is None:
        return "no weight store is connected; start one with `rolloutbus store` and publish again"
    silent_s = now - store.heartbeat_at
    silence_s = context.settings.leases.silence_s
    return f"it has said nothing for {silent_s:.1f} s" if silent_s > silence_s else ""


def note_record(context: Context, facts: StoreFacts) -> None:
    """A store tells what it has written down."""
    context.in_waves.clear()
    context.adapters.update(facts.adapters)
    for policy, version in facts.committed.items():
        before, floor = facts.waves.get(policy, (version, 0))
        if floor:
            context.in_waves[policy] = Waves(version, floor)
            if context.is_recovering and context.committed_of(policy) == version:
                del context.committed[policy]  # what is noted is what a worker attests
        context.note_commit(policy, before)


def lacking(context: Context, worker: MemberRecord) -> list[tuple[str, int]]:
    """Adapters of the store, (name, version), that it could have and has not."""
    facts = worker.hello.worker
    if not context.adapters or facts is None or "load_lora" not in facts.capabilities:
        return []
    named = ((*key.rpartition("."), version) for key, version in context.adapters.items())
    return [
        (name, version)
        for policy, _, name, version in named
        if policy == worker.policy and worker.adapters.get(name) != version
    ]


def is_recorded(context: Context, policy: str, version: int) -> bool:
    """Whether this is the version that was decided for last."""
    waves = context.in_waves.get(policy)
    return version == (context.committed_of(policy) if waves is None else waves.version)
