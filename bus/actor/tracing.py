"""Turns traces and structured logs on where the environment says so; imports what they need there.

Cores know nothing of either.
"""

from rolloutbus.bus.actor.json_log import LogTracer, json_log_of
from rolloutbus.bus.actor.spans import Role, Tracer
from rolloutbus.bus.actor.variables import TRACES, choice_of
from rolloutbus.bus.wire.entry import Entry, TracedEntry
from rolloutbus.bus.wire.errors import SettingsError

INSTALL = "pip install 'rolloutbus[otel]'"

POLLED = frozenset({"status", "get_load", "server_info", "list_detached", "repair", "abort"})
"""Commands that programs send by themselves, and again and again: no trace tells of them."""


def tracer_of(role: Role, name: str) -> Tracer | None:
    """What an actor tells of its requests with; None: neither traces nor structured logs are on.

    Raises:
        SettingsError: the environment asks for something that there is not.
    """
    exported = _exporter(role, name) if choice_of(TRACES) == "otlp" else None
    log = json_log_of({"role": role, "actor": name})
    return exported if log is None else LogTracer(log, exported)


def _exporter(role: Role, name: str) -> Tracer:
    try:
        # Here: nobody else should need, or wait for, these packages.
        from rolloutbus.bus.actor.otlp import otlp_tracer  # noqa: PLC0415
    except ImportError as error:
        missing = f"{TRACES}=otlp needs packages that are not installed: {INSTALL}"
        raise SettingsError(f"{missing} ({error})") from error
    return otlp_tracer(role, name)


def trace_of(entry: Entry) -> str:
    """The traceparent that an entry bears; empty: none."""
    return entry.trace if isinstance(entry, TracedEntry) else ""
