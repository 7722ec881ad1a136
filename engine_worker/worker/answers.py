"""Answers that a worker gives from what it knows, without asking its engine."""

from rolloutbus.bus.membership.core import Vitals
from rolloutbus.bus.membership.outbox import Outbox
from rolloutbus.bus.wire.codec import unpack, unpack_result
from rolloutbus.bus.wire.commands import done_by
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.control import ServerFacts
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Generated, Repair
from rolloutbus.bus.wire.messages.host import EngineHeartbeat, EngineReady
from rolloutbus.bus.wire.messages.membership import WorkerFacts
from rolloutbus.engine_worker.worker.controller import Controller, Ending, key_of, refused
from rolloutbus.engine_worker.worker.generation import Generation
from rolloutbus.engine_worker.worker.requests import repaired, repaired_from_result


def worker_facts(
    policy: str, engine: EngineReady, stream: str, pid: int, adapters: dict[str, int]
) -> WorkerFacts:
    """What this worker offers; `stream`: endpoint of its PUB socket, `adapters`: changes later."""
    return WorkerFacts(
        policy=policy,
        stream=stream,
        slots=engine.slots,
        max_context=engine.max_context,
        vocab_size=engine.vocab_size,
        engine=engine.engine,
        capabilities=sorted({*engine.capabilities, *done_by("worker")}),
        eos_token_ids=engine.eos_token_ids,
        pid=pid,
        host=engine.host,
        gpus=engine.gpus,
        bulk=engine.bulk,
        transports=engine.transports,
        adapters=adapters,
    )


def vitals_of(slots: int, n_steps: int, controller: Controller, generation: Generation) -> Vitals:
    """What a heartbeat says; `slots` is 0 while there is no engine."""
    return Vitals(
        version=controller.version,
        state=controller.state.name,
        steps=n_steps,
        free=max(0, slots + slots // 4 + 1 - len(generation)),
        n_tokens=generation.n_sampled,
        stalled_ms=controller.stalled_ms,
    )


def server_facts(
    engine: EngineReady, heartbeat: EngineHeartbeat, controller: Controller
) -> ServerFacts:
    """Result of `server_info`; counters as of the engine host's last heartbeat."""
    return ServerFacts(
        engine=engine.engine,
        version=controller.version,
        state=controller.state.name,
        steps=heartbeat.steps,
        n_running=heartbeat.n_running,
        n_waiting=heartbeat.n_waiting,
        n_kv_tokens=heartbeat.n_kv_tokens,
        vocab_size=engine.vocab_size,
        max_context=engine.max_context,
        slots=engine.slots,
        parallel=engine.parallel,
        software=engine.software,
        features=engine.features,
        adapters=controller.adapters,
        asleep=controller.state.asleep,
    )


def repair_ending(entry: Entry, generation: Generation, outbox: Outbox) -> Ending:
    """Ends a `repair`: from the running request, or from a result that still waits."""
    try:
        body = unpack(entry)
    except RemoteProtocolError as error:
        return refused(entry, Problem("bad_request", str(error), "not_started"))
    assert isinstance(body, Repair)
    request = generation.get(body.rid)
    if request is not None and request.key[1] == body.attempt:
        found = repaired(request, body)
        kind = "refused" if isinstance(found, Problem) else "finished"
        return Ending(kind, key_of(entry), found)
    parcel = outbox.get((body.rid, body.attempt))
    if parcel is not None and parcel.has_result:
        result = unpack_result("generate", parcel.entry)
        assert isinstance(result, Generated)
        return Ending("finished", key_of(entry), repaired_from_result(result, body))
    message = "This attempt does not run here."
    return refused(entry, Problem("bad_request", message, "not_started", field="rid"))
