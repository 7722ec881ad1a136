"""How commands report an incomplete journal: on stderr, in JSON, by their exit status."""

import sys
from collections.abc import Collection
from typing import Annotated, Any, NoReturn

import typer

from rolloutbus.cli.terminal import ExitStatus, fail, print_json
from rolloutbus.replay.journal.format import JournalDamaged
from rolloutbus.replay.journal.reader import GapKind, Journal

AllowGaps = Annotated[
    bool,
    typer.Option(
        "--allow-gaps",
        help="Take a journal that is not whole as it is, and go on behind damage; "
        "without it that is an error.",
    ),
]


def gaps_told(journal: Journal) -> dict[str, Any]:
    """Returns the known gaps of a journal, for the JSON of a command that has read all of it."""
    return {
        "first_record": journal.first_seq,
        "is_being_written": journal.is_being_written,
        "gaps": [each._asdict() for each in journal.gaps],
        "damages": [damage.sentence for damage in journal.damages],
        "torn": journal.torn._asdict() if journal.torn is not None else None,
        "lost": sum(each.count for each in journal.lost),
    }


def tell_gaps(journal: Journal) -> None:
    """Say on stderr what is missing of a journal that was read."""
    if journal.first_seq > 0:
        first = journal.first_seq
        sys.stderr.write(f"note: retention has deleted what was before record {first:,}\n")
    if journal.is_being_written:
        sys.stderr.write("note: the journal is being written: this is what it held by now\n")
    for gap in journal.gaps:
        sys.stderr.write(f"{gap.kind.replace('_', ' ')}: {gap.sentence}\n")
    sys.stderr.flush()


def fail_reading(error: Exception) -> NoReturn:
    """End the program because a journal cannot be read, or not without gaps."""
    advice = "; --allow-gaps goes on behind it" if isinstance(error, JournalDamaged) else ""
    fail(f"{error}{advice}", ExitStatus.FAILED)


def refuse_gaps(
    journal: Journal, *, are_allowed: bool, harmless: Collection[GapKind] = frozenset()
) -> None:
    """End the program with an error if anything that is not harmless is missing of a journal."""
    if not are_allowed and any(gap.kind not in harmless for gap in journal.gaps):
        sys.stdout.flush()
        fail(f"{journal.directory} is not whole: --allow-gaps takes it as it is", ExitStatus.FAILED)


def finish(
    journal: Journal,
    told: dict[str, Any],
    text: str,
    *,
    as_json: bool,
    allow_gaps: bool,
    harmless: Collection[GapKind] = frozenset(),
) -> None:
    """Print what a command made of a journal, and what is missing of it; see `refuse_gaps`."""
    if as_json:
        print_json({**told, **gaps_told(journal)})
    else:
        sys.stdout.write(f"{text}\n")
    tell_gaps(journal)
    refuse_gaps(journal, are_allowed=allow_gaps, harmless=harmless)
