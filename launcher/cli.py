"""The `rolloutbus` command: Ctrl-C ends it with 130 also in its first seconds, while it imports."""

import os
import signal

INTERRUPTED = 130


def main() -> None:
    """Entry point of the console script."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else a shell has it ignored
        signal.signal(signal.SIGINT, _leave)  # there is nothing yet to clean up
    from launcher.app import app  # noqa: PLC0415 - takes seconds

    signal.signal(signal.SIGINT, before)
    app()


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
