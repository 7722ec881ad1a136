"""Protections switched off, one at a time: a simulator that does not notice tests nothing.

A mutant changes the processes of one world before they do anything; the product has no hooks.
"""

# pyright: reportPrivateUsage=false
# It reaches inside on purpose: what it switches off are private decisions of the cores.

from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from rolloutbus.bus.membership.core import MemberCore
from rolloutbus.bus.wire.commands import COMMANDS
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Entry
from rolloutbus.router.members.records import Reason
from rolloutbus.router.settings import TAKEOVER_S
from rolloutbus.trainer_adapter.client.core.effects import Complete
from tests.drills.simulation.process import Process
from tests.drills.simulation.scenario import (
    BARRIER,
    BLINKING,
    DESERTED,
    FORGETFUL,
    FORSAKEN,
    HAUNTED,
    PAIRED,
    SUCCEEDED,
    Scenario,
)
from tests.drills.simulation.sim_client import ClientNode
from tests.drills.simulation.sim_pair import PairNode
from tests.drills.simulation.sim_router import RouterNode
from tests.drills.simulation.sim_store import StoreNode
from tests.drills.simulation.sim_worker import WorkerNode

NEVER = float("inf")
AGES_S = 1000.0
SHORT_WINDOW_S = 1.0


def without_fencing(process: Process) -> None:
    """Stale commands, executions and endings are taken for current ones."""
    if isinstance(process, WorkerNode):
        member = process.core.member
        receive = member.receive

        def receive_all(entries: Iterable[Entry], now: float) -> Any:  # noqa: ANN401 - as wrapped
            return receive([_current(entry, member) for entry in entries], now)

        member.receive = receive_all
    elif isinstance(process, RouterNode):
        table, executions = process.core.table, process.core._executions
        ended = executions.ended

        def ended_anyhow(worker: Any, entry: Entry, now: float) -> None:  # noqa: ANN401 - as wrapped
            request = table.get(entry.rid)
            if request is None or request.state not in {"sent", "running", "ended"}:
                ended(worker, entry, now)
                return
            table.finish(request)
            executions._forward(worker, entry, request.client)

        table.fence = _nothing
        executions.ended = ended_anyhow
    elif isinstance(process, ClientNode):
        core = process.core
        judge = core._endings.ended

        def judge_alike(entry: Entry, now: float) -> None:
            request = core._book.open.get(entry.rid)
            if request is not None:
                request.dead_attempts.clear()
            judge(entry, now)

        core._endings.ended = judge_alike


def without_retry(process: Process) -> None:
    """A client does nothing about lost executions."""
    if isinstance(process, ClientNode):
        book = process.core._book
        resend = book._resend

        def resend_unheard(request: Any, now: float) -> None:  # noqa: ANN401 - as wrapped
            if request.state != "running":  # or else the silence would give the loss away
                resend(request, now)

        book.go_on = _nothing
        book._resend = resend_unheard


def without_self_fence(process: Process) -> None:
    """A worker whose lease has run out goes on."""
    member = _member(process)
    if member is not None:
        member._judge_lease = _no_list
        member._holder.is_held = _always


def without_outbox(process: Process) -> None:
    """An ending is sent once and forgotten."""
    member = _member(process)
    if member is not None:
        member.deliveries.outbox.put = _nothing


def without_client_resend(process: Process) -> None:
    """A client sends each command once per connection."""
    if isinstance(process, ClientNode):
        book = process.core._book
        send = book._resend

        def resend_deferred(request: Any, now: float) -> None:  # noqa: ANN401 - as wrapped
            if request.state == "deferred":
                send(request, now)

        book._resend = resend_deferred


def without_holding_back(process: Process) -> None:
    """A client tells a router without a name all that it holds."""
    if isinstance(process, ClientNode):
        process.core._fleet.holds_back = _not_at_all


def without_client_dedup(process: Process) -> None:
    """Every ending that reaches a client is an outcome."""
    if isinstance(process, ClientNode):
        core = process.core
        ended = core._endings.ended

        def ended_again(entry: Entry, now: float) -> None:
            case = process.cases.get(entry.rid)
            if case is not None and case.outcomes and entry.attempt != NO_ATTEMPT:
                core._out.append(Complete(entry.rid, case.outcomes[0]))
            ended(entry, now)

        core._endings.ended = ended_again


def without_recovery_window(process: Process) -> None:
    """A new router places re-sent requests at once."""
    if isinstance(process, RouterNode):
        process.core.context.is_recovering = False


def with_short_window(process: Process) -> None:
    """A new router waits for less than a lease."""
    if isinstance(process, RouterNode):
        process.core._recovered_at = process.time.now + SHORT_WINDOW_S


def without_pause_grace(process: Process) -> None:
    """A router that was frozen judges leases as if it had not been."""
    if isinstance(process, RouterNode):
        membership = process.core._membership
        tick = membership.tick

        def tick_as_ever(now: float) -> Any:  # noqa: ANN401 - as wrapped
            membership._last_tick_at = None
            return tick(now)

        membership.tick = tick_as_ever


def with_lease_from_receipt(process: Process) -> None:
    """A holder counts its lease from the answer instead of from its heartbeat."""
    member = _member(process)
    if member is not None:
        holder = member._holder
        renew = holder.renew

        def renew_from_now(seq: int) -> bool:
            is_known = renew(seq)
            if is_known:
                holder._until = process.time.now + holder._holder_s
            return is_known

        holder.renew = renew_from_now


def without_router_resend(process: Process) -> None:
    """A router sends each command once."""
    if isinstance(process, RouterNode):
        process.core.table.resend_first_s = NEVER
        fleet = process.core._fleet
        send_first = fleet._send_first

        def send_only(command: Any, member: Any, now: float) -> None:  # noqa: ANN401 - as wrapped
            send_first(command, member, now)
            fleet._parts[f"{command.rid}@{member.name}"].resend_at = NEVER

        fleet._send_first = send_only


def without_expiry(process: Process) -> None:
    """Neither router nor workers look at deadlines."""
    if isinstance(process, RouterNode):
        dispatcher = process.core._dispatcher
        made = dispatcher._made

        def made_patient(
            client: Any,  # noqa: ANN401 - as wrapped
            entry: Entry,
            now: float,
            *,
            may_run: bool,
        ) -> Any:  # noqa: ANN401 - as wrapped
            request = made(client, entry, now, may_run=may_run)
            request.deadline_at += AGES_S
            return request

        dispatcher._made = made_patient
    elif isinstance(process, WorkerNode):
        process.core._generation.expired = _no_list


def with_epoch_per_boot(process: Process) -> None:
    """A process keeps the name of its first lease for ever."""
    member = _member(process)
    if member is not None:
        holder = member._holder

        def renounce() -> None:
            holder._until = 0.0
            holder._first_seq = holder._heartbeat_seq + 1

        holder.renounce = renounce


def without_commit_record(process: Process) -> None:
    """A router commits weights before the store has written the decision down."""
    if isinstance(process, RouterNode):
        updates = process.core._updates

        def commit_at_once(update: Any, now: float) -> None:  # noqa: ANN401 - as wrapped
            update.advance("recorded")
            updates._commit(update, now)

        updates._record = commit_at_once


def without_decision(process: Process) -> None:
    """What the store has recorded counts for a router once all workers have swapped."""
    if isinstance(process, RouterNode):
        updates = process.core._updates

        def commit_uncounted(update: Any, now: float) -> None:  # noqa: ANN401 - as wrapped
            update.left = update.ready
            updates._commit_wave(update, now)

        updates._commit = commit_uncounted


def without_doubt(process: Process) -> None:
    """A router says that an update failed where the store has not answered."""
    if isinstance(process, RouterNode):
        records = process.core._updates._records
        write = records.write

        def write_surely(decision: Any, now: float) -> None:  # noqa: ANN401 - as wrapped
            def told(is_so: Any, at: float) -> None:  # noqa: ANN401 - as wrapped
                decision.on_written(bool(is_so), at)

            write(decision._replace(on_written=told), now)

        records.write = write_surely


def without_quarantine(process: Process) -> None:
    """A router gives requests to workers that are behind."""
    if isinstance(process, RouterNode):
        eligibility = process.core.context.eligibility
        block = eligibility.block

        def block_for_others(worker: Any, reason: Reason) -> None:  # noqa: ANN401 - as wrapped
            if reason is not Reason.BEHIND:
                block(worker, reason)

        eligibility.block = block_for_others


def without_isolation(process: Process) -> None:
    """Whatever kills engines is tried again like anything else, by routers and clients."""
    if isinstance(process, RouterNode):
        process.core._health._charge = _nothing
    elif isinstance(process, ClientNode):
        process.core._book._settings = replace(process.core._book._settings, max_crashes=1_000_000)


def without_session_news(process: Process) -> None:
    """A session moves without anybody being told."""
    if isinstance(process, RouterNode):
        sessions = process.core._sessions

        def move_silently(session: Any, worker: str, reason: str) -> None:  # noqa: ANN401 - as replaced
            del reason
            sessions.places.settle(session, worker)
            sessions._affinity.stick(session.name, worker)
            session.has_lost_worker, session.waits_since = False, None

        sessions.move = move_silently


def with_doubled_session_news(process: Process) -> None:
    """Each move of a session is told twice."""
    if isinstance(process, RouterNode):
        sessions = process.core._sessions
        move = sessions.move

        def move_twice(session: Any, worker: str, reason: str) -> None:  # noqa: ANN401 - as replaced
            move(session, worker, reason)
            move(session, worker, reason)

        sessions.move = move_twice


def without_requeue(process: Process) -> None:
    """A router leaves lost detached requests to clients that are gone."""
    if isinstance(process, RouterNode):
        process.core._executions._kept_from_loss = _never
        process.core._reattachment.reported_lost = _nothing


def without_over(process: Process) -> None:
    """A router forgets at once which detached requests have ended for their callers."""
    if isinstance(process, RouterNode):
        process.core.context.detached.over.add = _nothing


def without_intent(process: Process) -> None:
    """A router pauses those who are here, and nobody who comes."""
    if isinstance(process, RouterNode):
        process.core._intents.asked = _nothing


def without_copies_of_the_intent(process: Process) -> None:
    """A router believes nobody who tells what an earlier one was asked for."""
    if isinstance(process, RouterNode):
        intents = process.core._intents
        joined = intents.joined

        def joined_unheard(member: Any, now: float) -> None:  # noqa: ANN401 - as wrapped
            told = member.hello.intent
            if told is not None:
                told = replace(told, pause="", workers={})
                member.hello = replace(member.hello, intent=told)
            joined(member, now)

        intents.joined = joined_unheard


def without_asking(process: Process) -> None:
    """The first router of a pair is active as soon as it is started."""
    if isinstance(process, PairNode) and process.pair.state == "asking":
        process.pair.state = "active"


def without_wish(process: Process) -> None:
    """A router takes over when it alone cannot hear the other one."""
    if isinstance(process, PairNode):
        process.pair._is_wanted = _is_silent


def without_standing_down(process: Process) -> None:
    """Two active routers that hear each other both stay."""
    if isinstance(process, PairNode):
        process.pair._outranks = _never_outranked


def without_waking_up(process: Process) -> None:
    """A router that stood still judges the other one as if it had not."""
    if isinstance(process, PairNode):
        leases = process.pair._leases
        process.pair._leases = replace(leases, late_tick_s=NEVER)


def with_borrowed_life(process: Process) -> None:
    """A router takes the other one's hello for a sign that its own link to it works."""
    if isinstance(process, PairNode):
        pair = process.pair
        turned_away = pair.turned_away

        def turned_away_relieved(hello: Any, now: float) -> None:  # noqa: ANN401 - as wrapped
            turned_away(hello, now)
            if hello.role == "router":
                pair._carried_at = now

        pair.turned_away = turned_away_relieved


def with_old_news(process: Process) -> None:
    """A router that members have rejected goes by what it heard before it was active."""
    if isinstance(process, PairNode):
        pair = process.pair
        rejected = pair.rejected

        def rejected_unmoved(why: str, own: Any) -> None:  # noqa: ANN401 - as wrapped
            other = pair._other
            rejected(why, own)
            pair._other = other

        pair.rejected = rejected_unmoved


MUTANTS: dict[str, Callable[[Process], None]] = {
    "fencing": without_fencing,
    "retry": without_retry,
    "self_fence": without_self_fence,
    "outbox": without_outbox,
    "client_resend": without_client_resend,
    "holding_back": without_holding_back,
    "client_dedup": without_client_dedup,
    "recovery_window": without_recovery_window,
    "own_pause_grace": without_pause_grace,
    "lease_from_receipt": with_lease_from_receipt,
    "router_resend": without_router_resend,
    "expiry": without_expiry,
    "short_window": with_short_window,
    "epoch_per_boot": with_epoch_per_boot,
    "commit_record": without_commit_record,
    "decision": without_decision,
    "doubt": without_doubt,
    "quarantine": without_quarantine,
    "isolation": without_isolation,
    "session_news": without_session_news,
    "session_news_once": with_doubled_session_news,
    "detached_requeue": without_requeue,
    "detached_over": without_over,
    "intent": without_intent,
    "intent_copies": without_copies_of_the_intent,
    "pair_asking": without_asking,
    "pair_wish": without_wish,
    "pair_outranked": without_standing_down,
    "pair_waking": without_waking_up,
    "pair_link": with_borrowed_life,
    "pair_old_news": with_old_news,
}
"""Protection -> how it is switched off."""
SCENARIOS: dict[str, Scenario] = {
    "fencing": HAUNTED,
    "doubt": FORGETFUL,
    "holding_back": SUCCEEDED,
    "lease_from_receipt": HAUNTED,
    "epoch_per_boot": HAUNTED,
    "short_window": BLINKING,
    "detached_requeue": DESERTED,
    "detached_over": FORSAKEN,
    "intent": BARRIER,
    "intent_copies": BARRIER,
    "pair_asking": PAIRED,
    "pair_wish": PAIRED,
    "pair_outranked": PAIRED,
    "pair_waking": PAIRED,
    "pair_link": PAIRED,
    "pair_old_news": PAIRED,
}
"""Where protections are looked for that are seldom needed, or that others stand in front of (a
fresh connection for each lease, heartbeats that tell the truth)."""


def _member(process: Process) -> MemberCore | None:
    if isinstance(process, WorkerNode):
        return process.core.member
    return process.member if isinstance(process, StoreNode) else None


def _current(entry: Entry, member: MemberCore) -> Entry:
    return replace(entry, epoch=member.epoch) if entry.kind in COMMANDS else entry


def _nothing(*_arguments: object, **_named: object) -> None:
    """Does nothing."""


def _never(request: object, worker: object) -> bool:
    """Says no."""
    del request, worker
    return False


def _is_silent(now: float, silent_s: float) -> bool:
    """Asks for nothing but silence."""
    del now
    return silent_s >= TAKEOVER_S


def _never_outranked(own: object) -> bool:
    """Says no."""
    del own
    return False


def _not_at_all(request: object) -> bool:
    """Says no."""
    del request
    return False


def _no_list(now: float) -> list[Any]:
    """Finds nothing."""
    del now
    return []


def _always(now: float) -> bool:
    """Says yes."""
    del now
    return True
