"""Turns traces on where the environment says so, and only there imports what they need.

Cores know nothing of traces.
"""

import os

from rolloutbus.bus.actor.spans import Role, Tracer
from rolloutbus.bus.wire.entry import Entry, TracedEntry
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.near_names import nearest

TRACES_VARIABLE = "ROLLOUTBUS_TRACES"
CHOICES = ("off", "otlp")
PREFIX = "ROLLOUTBUS_"
INSTALL = "pip install 'rolloutbus[otel]'"

POLLED = frozenset({"status", "get_load", "server_info", "list_detached", "repair", "abort"})
"""Commands that programs send by themselves, and again and again: no trace tells of them."""


def tracer_of(role: Role, name: str) -> Tracer | None:
    """What an actor tells of its requests with; None: traces are off.

    Raises:
        SettingsError: the environment asks for something that there is not.
    """
    require_known_variables()
    choice = os.environ.get(TRACES_VARIABLE, "off")
    if choice not in CHOICES:
        choices = " or ".join(CHOICES)
        raise SettingsError(f"{TRACES_VARIABLE} is {choice[:40]!r}; it can be {choices}")
    if choice == "off":
        return None
    try:
        # Here: nobody else should need, or wait for, these packages.
        from rolloutbus.bus.actor.otlp import otlp_tracer  # noqa: PLC0415
    except ImportError as error:
        missing = f"{TRACES_VARIABLE}=otlp needs packages that are not installed: {INSTALL}"
        raise SettingsError(f"{missing} ({error})") from error
    return otlp_tracer(role, name)


KNOWN = (TRACES_VARIABLE,)
"""Variables that people set."""


def require_known_variables() -> None:
    """Checks that no variable of the environment is a misspelt one of ours.

    Raises:
        SettingsError: one is.
    """
    for name in sorted(os.environ):
        meant = nearest(name, KNOWN) if name.startswith(PREFIX) and name not in KNOWN else ""
        if meant:
            raise SettingsError(f"{name} is no variable of rolloutbus; did you mean {meant}?")


def trace_of(entry: Entry) -> str:
    """The traceparent that an entry bears; empty: none."""
    return entry.trace if isinstance(entry, TracedEntry) else ""
