"""The `rolloutbus` command; it imports little before Ctrl-C can end it without a traceback."""

from rolloutbus.cli.interrupts import leaving_at_once


def main() -> None:
    """Entry point of the console script."""
    with leaving_at_once():
        from rolloutbus.cli.app import app  # noqa: PLC0415 - takes a while
    app()


if __name__ == "__main__":
    main()
