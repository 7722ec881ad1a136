"""The environment variables that people set, their values, and what a mistake is told."""

import os

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.near_names import nearest

TRACES = "ROLLOUTBUS_TRACES"
LOG = "ROLLOUTBUS_LOG"
PROGRESS = "ROLLOUTBUS_PROGRESS"
"""Who hears what an actor does until it is ready: its `supervisor`, by a line on stdout, or people
at a `terminal`, by lines on stderr. Who starts the actor sets it."""
CHOICES = {
    TRACES: ("off", "otlp"),
    LOG: ("text", "json"),
    PROGRESS: ("off", "supervisor", "terminal"),
}
"""Variable -> its values; the first one holds where it is not set."""
PREFIX = "ROLLOUTBUS_"


def choice_of(variable: str) -> str:
    """The value of a variable.

    Raises:
        SettingsError: it has none of its values, or some variable is a misspelt one of ours.
    """
    _require_known_names()
    choices = CHOICES[variable]
    choice = os.environ.get(variable, choices[0])
    if choice not in choices:
        allowed = " or ".join(choices)
        raise SettingsError(f"{variable} is {choice[:40]!r}; it can be {allowed}")
    return choice


def _require_known_names() -> None:
    for name in sorted(os.environ):
        is_ours = name.startswith(PREFIX) and name not in CHOICES
        if meant := nearest(name, tuple(CHOICES)) if is_ours else "":
            raise SettingsError(f"{name} is no variable of rolloutbus; did you mean {meant}?")
