"""The `rolloutbus` command; it imports little before Ctrl-C can end it without a traceback."""

import os

from rolloutbus.cli.interrupts import leaving_at_once

PROGRAM = "rolloutbus"
"""Also when it is run as `python -m`: what the help tells to type works."""
COMPLETE_VARIABLE = f"_{PROGRAM.upper()}_COMPLETE"
"""Set by the script of `completion`: this process prints what may follow, and ends."""


def main() -> None:
    """Entry point of the console script."""
    with leaving_at_once():
        from rolloutbus.cli.app import app  # noqa: PLC0415 - takes a while

        if COMPLETE_VARIABLE in os.environ:
            # Typer knows the shells only if it may add options of its own to install scripts.
            from typer.completion import (  # noqa: PLC0415
                completion_init,  # pyright: ignore[reportPrivateImportUsage]
            )

            completion_init()
    app(prog_name=PROGRAM)


if __name__ == "__main__":
    main()
