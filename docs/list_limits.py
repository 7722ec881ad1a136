"""Writes tables of docs/protocol.md from where the code has them: `make docs`.

These are the commands, the counters, the codes of errors, the limit of every field on the wire,
from its type, and the times, from settings.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect

from rolloutbus.bus.membership.outbox import MAX_AGE_S
from rolloutbus.bus.membership.tombstones import SETTLED_S
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.transport import bulk as bulk_ports
from rolloutbus.bus.transport.zmq_sockets import GONE_MS
from rolloutbus.bus.wire.commands import COMMANDS, KINDS, RESULTS, Target
from rolloutbus.bus.wire.counters import (
    ROUTER_COUNTERS,
    STORE_GAUGES,
    WORKER_COUNTERS,
    WORKER_DURATIONS,
)
from rolloutbus.bus.wire.entry import Placement, TracedEntry
from rolloutbus.bus.wire.messages.control import FleetOutcome
from rolloutbus.bus.wire.problem_codes import CODES
from rolloutbus.engine_worker.host import __main__ as engine_host
from rolloutbus.engine_worker.prefixes import PACE_S
from rolloutbus.engine_worker.settings import HostSettings, StreamSettings
from rolloutbus.engine_worker.weights.relay_core import PARK_S
from rolloutbus.engine_worker.worker import actor as worker_actor
from rolloutbus.router import actor as router_actor
from rolloutbus.router.placement.sessions import PATIENCE_S
from rolloutbus.router.requests.detached import UNHEARD_S
from rolloutbus.router.settings import RouterSettings
from rolloutbus.trainer_adapter.client.core.request_book import MUTE_S
from rolloutbus.trainer_adapter.client.core.settings import TICK_S as CLIENT_TICK_S
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from rolloutbus.trainer_adapter.store import actor as store_actor

NATURAL = "0 to uint64"
PAGE = Path(__file__).with_name("protocol.md")
BEGIN = "<!-- fields by limit: made by `make docs` -->\n"
END = "<!-- end of fields by limit -->\n"
BEGIN_TIMES = "<!-- timing: made by `make docs` -->\n"
END_TIMES = "<!-- end of timing -->\n"
BEGIN_COMMANDS = "<!-- commands: made by `make docs` -->\n"
END_COMMANDS = "<!-- end of commands -->\n"
BEGIN_COUNTERS = "<!-- counters: made by `make docs` -->\n"
END_COUNTERS = "<!-- end of counters -->\n"
BEGIN_CODES = "<!-- codes: made by `make docs` -->\n"
END_CODES = "<!-- end of codes -->\n"
HOUR_S = 3600.0

CHECKED_BY_VALUE = {
    "Placement.cost",
    "Placement.priority",
    "SamplingParams.max_new_tokens",
    "SamplingParams.min_new_tokens",
    "SamplingParams.top_k",
    "SamplingParams.seed",
    "SamplingParams.stop_token_ids[]",
    "SamplingParams.logit_bias[key]",
    "Want.top_logprobs",
    "Want.logprobs_of[]",
    "Want.prompt_logprobs_start",
    "Processor.params[]",
    "Processor.params[][]",
    "Score.label_token_ids[]",
    "Array.shape[]",
    "Repair.start",
    "Tensor.shape[]",
    "GotWeights.shape[]",
    "TensorForm.shape[]",
    "Hello.protocol[]",
    "Welcome.protocol",
    "WorkerStatus.beat_age_ms",
    "StoreStatus.beat_age_ms",
    "WorkerFacts.eos_token_ids[]",
    "EngineReady.eos_token_ids[]",
}
"""Integers of any sign that fit 64 bits: compared or checked with a message of their own."""
ATTEMPT = re.compile(
    r"(\.attempt\[\]|\.attempts\[\]\[\]|\.(items|running|outbox|acked)\[\]\[\]\[\])$"
)
"""The same holds for the two numbers of an attempt."""


def page_with(rows: str, page: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with the list between its marks."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}{rows}{end}{after}"


def commands() -> str:
    """The table of commands, sorted by who carries them out."""
    head = "| command | from | done by | result | refused in | |\n|---|---|---|---|---|---|\n"
    order = get_args(Target)
    lines = [
        f"| `{kind}` | {row.sender} | {row.target} | `{row.result.__name__}` "
        f"| {', '.join(sorted(row.refused_in))} | {', '.join(sorted(row.traits))} |\n"
        for kind, row in sorted(COMMANDS.items(), key=lambda each: order.index(each[1].target))
    ]
    return head + "".join(lines)


def counters() -> str:
    """The table of what actors count and measure."""
    tables = {
        "`FleetStatus.counters`": ROUTER_COUNTERS,
        "`counters` of workers": WORKER_COUNTERS,
        "`durations` of workers": WORKER_DURATIONS,
        "`gauges` of stores": STORE_GAUGES,
    }
    lines = [
        f"| `{name}` | {where} | {sentence} |\n"
        for where, table in tables.items()
        for name, sentence in table.items()
    ]
    return "| name | in | what |\n|---|---|---|\n" + "".join(lines)


def codes() -> str:
    """The table of codes of errors."""
    lines = [
        f"| `{name}` | {', '.join(code.endings)} | {', '.join(code.outcomes)} | {code.meaning} |\n"
        for name, code in CODES.items()
    ]
    return "| code | ending | outcome | meaning |\n|---|---|---|---|\n" + "".join(lines)


def times() -> str:
    """The table of times, as settings and constants have them."""
    lease, host, stream = LeaseSettings(), HostSettings(), StreamSettings()
    resend = (
        f"{seconds(lease.resend_first_s)}, growing by {lease.resend_factor:g}, "
        f"at most {seconds(lease.resend_max_s)}"
    )
    backoff = (
        "random from 0 to a bound that doubles from "
        f"{seconds(lease.reconnect_first_s)} to {seconds(lease.reconnect_max_s)}"
    )
    wedged = (
        f"{seconds(host.wedged_s)}; {seconds(host.phase_s)} while weights or memory move; "
        f"{seconds(host.start_timeout_s)} at the start"
    )
    bulk = (
        f"{seconds(bulk_ports.ANSWER_S)}; that makes it leave a worker for another source "
        f"{seconds(bulk_ports.SILENT_S)}"
    )
    table = {
        "beat": seconds(lease.heartbeat_s),
        "lease, at the holder from sending": seconds(lease.holder_s),
        "lease, at the router from receipt": seconds(lease.lease_s),
        "silence that makes a peer reconnect": seconds(lease.silence_s),
        "wait before reconnecting": backoff,
        "re-sending of commands, and of endings": resend,
        "re-sending of an unaccepted command by the router": resend,
        "re-sending of an abort by a client": seconds(lease.resend_first_s),
        "silence about a running request, after which its client sends it again": seconds(MUTE_S),
        "tick of the router (`queued`, expiry), of a worker, of a client": ", ".join(
            seconds(each) for each in (router_actor.TICK_S, worker_actor.TICK_S, CLIENT_TICK_S)
        ),
        "tick of a weight store": seconds(store_actor.TICK_S),
        "a tick so late means that the process was stopped": seconds(lease.late_tick_s),
        "recovery of a restarted router": seconds(lease.recovery_s),
        "a silent client is gone": seconds(default_of(RouterSettings, "client_grace_s")),
        "a session's turn waits for its worker": seconds(PATIENCE_S),
        "memory of ended and aborted executions": seconds(lease.tombstone_s),
        "unacknowledged endings": seconds(MAX_AGE_S),
        "what ended at the router of detached requests": seconds(UNHEARD_S),
        "detached requests that are acknowledged": seconds(SETTLED_S),
        "idle heartbeat of a stream": seconds(stream.idle_s),
        "deltas of a request that is not streamed": (
            f"each {stream.coarse_tokens} tokens or {seconds(stream.coarse_s)}"
        ),
        "heartbeat of an engine host": seconds(engine_host.HEARTBEAT_S),
        "between two `prefixes` of a worker, at least": seconds(PACE_S),
        "silence of an engine host that keeps new requests away": seconds(host.silent_s),
        "silence of a stopped engine host after which its requests go on elsewhere": seconds(
            host.give_up_s
        ),
        "silence or standstill of an engine host that ends it": wedged,
        "silence of a host, or no room for what it is sent, after which the system ends a TCP "
        "connection": seconds(GONE_MS / 1000),
        "overtime of a client beyond a deadline": seconds(default_of(ClientSettings, "overtime_s")),
        "silence of a bulk socket that makes a puller ask anew": bulk,
        "wait of a question for bytes that have not arrived at a worker yet": seconds(PARK_S),
    }
    rows = [f"| {what} | {value} |" for what, value in table.items()]
    return "\n".join(["| what | value |", "|---|---|", *rows, ""])


def default_of(struct: type[msgspec.Struct], name: str) -> float:
    """Of one setting, in seconds."""
    return next(each.default for each in msgspec.structs.fields(struct) if each.name == name)


def seconds(value: float) -> str:
    """As people write it."""
    if value >= HOUR_S and value % HOUR_S == 0:
        return f"{value / HOUR_S:g} h"
    return f"{value:g} s"


def rows() -> str:
    """The list as a table: one line per limit."""
    fields_by_limit: dict[str, list[str]] = {}
    for name, limit in limits():
        fields_by_limit.setdefault(limit, []).append(f"`{name}`")
    fields_by_limit[NATURAL] = ["all other integers"]
    lines = ["| limit | fields |", "|---|---|"]
    for limit, names in sorted(fields_by_limit.items(), key=lambda row: (row[0] == NATURAL, row)):
        lines.append(f"| {limit} | {', '.join(sorted(names))} |")
    return "\n".join([*lines, ""])


def limits() -> Iterator[tuple[str, str]]:
    """(field, limit) of every part of every field whose size or value a peer chooses.

    Raises:
        AssertionError: a field has no limit.
    """
    for struct in structs():
        for field in msgspec.structs.fields(struct):
            kind = inspect.type_info(field.type)
            name = "Entry" if struct is TracedEntry else struct.__name__
            yield from _limits_of(f"{name}.{field.encode_name}", kind)


def structs() -> list[type[msgspec.Struct]]:
    """Every struct that crosses the wire, bodies and what is inside of them, by name."""
    found: dict[str, type[msgspec.Struct]] = {}
    for info in inspect.multi_type_info(
        [TracedEntry, Placement, FleetOutcome, *KINDS.values(), *RESULTS.values()]
    ):
        _collect(info, found)
    return [found[name] for name in sorted(found)]


def _collect(info: inspect.Type, found: dict[str, type[msgspec.Struct]]) -> None:
    if isinstance(info, inspect.StructType) and info.cls.__name__ not in found:
        found[info.cls.__name__] = info.cls
        for field in info.fields:
            _collect(field.type, found)
    for child in _children(info):
        _collect(child[1], found)


def _children(info: inspect.Type) -> list[tuple[str, inspect.Type]]:
    match info:
        case inspect.UnionType(types=types):
            return [("", each) for each in types]
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return [("[]", item)]
        case inspect.TupleType(item_types=items):
            return [("[]", each) for each in items]
        case inspect.DictType(key_type=key, value_type=value):
            return [("[key]", key), ("[]", value)]
        case _:
            return []


def _limits_of(name: str, info: inspect.Type) -> Iterator[tuple[str, str]]:
    limit = _own_limit(name, info)
    if limit:
        yield name, limit
    seen: set[tuple[str, str]] = set()
    for suffix, child in _children(info):
        for each in _limits_of(name + suffix, child):
            if each not in seen:
                seen.add(each)
                yield each


def _own_limit(name: str, info: Any) -> str:  # noqa: ANN401 - each kind of type has other constraints
    match info:
        case inspect.StrType():
            assert info.max_length is not None, f"{name} has no limit"
            return f"{info.max_length} characters"
        case inspect.BytesType():
            assert info.max_length is not None, f"{name} has no limit"
            mebibytes, rest = divmod(info.max_length, 1024**2)
            return f"{info.max_length // 1024} KiB" if rest else f"{mebibytes} MiB"
        case inspect.ListType() | inspect.VarTupleType() | inspect.DictType():
            assert info.max_length is not None, f"{name} has no limit"
            return f"{info.max_length} items"
        case inspect.IntType(ge=None, le=None):
            assert name in CHECKED_BY_VALUE or ATTEMPT.search(name), f"{name} has no limit"
            return "int64 or uint64"
        case inspect.IntType(ge=low, le=high):
            return f"{'int64' if low is None else low} to {'uint64' if high is None else high}"
        case _:
            return ""


if __name__ == "__main__":
    text = PAGE.read_text()
    listed = page_with(rows(), page_with(times(), text, BEGIN_TIMES, END_TIMES))
    listed = page_with(commands(), listed, BEGIN_COMMANDS, END_COMMANDS)
    listed = page_with(counters(), listed, BEGIN_COUNTERS, END_COUNTERS)
    listed = page_with(codes(), listed, BEGIN_CODES, END_CODES)
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if text == listed else "docs/protocol.md has other tables: run `make docs`")
    PAGE.write_text(listed)
