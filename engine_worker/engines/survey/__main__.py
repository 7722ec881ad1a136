"""`python -m rolloutbus.engine_worker.engines.survey [MODEL]`: one finding per line, as JSON.

A process of its own, since what it imports may break it: what was found until then is out.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from rolloutbus.engine_worker.engines.survey.machine import Finding, devices, machine, packages
from rolloutbus.engine_worker.engines.survey.model import model
from rolloutbus.engine_worker.engines.survey.sglang_probes import probes


def survey(model_path: str) -> Iterator[Finding]:
    """Everything, what is quick first."""
    sections: list[Callable[[], Iterable[Finding]]] = [machine, packages, devices, probes]
    if model_path:
        sections.append(lambda: model(Path(model_path)))
    for section in sections:
        yield from section()


def main(arguments: Sequence[str]) -> None:
    """Print the findings."""
    out = sys.stdout.buffer
    # Libraries print what they like while they are imported: that is none of the findings.
    sys.stdout = sys.stderr
    for finding in survey(arguments[0] if arguments else ""):
        out.write(msgspec.json.encode(finding) + b"\n")
        out.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
