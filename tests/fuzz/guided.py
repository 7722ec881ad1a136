"""Coverage-guided fuzzing of all readers: `python tests/fuzz/guided.py CORPUS -max_total_time=9`.

libFuzzer keeps inputs that reach new branches of our code, or a new refusal of the decoder, and
goes on from there. The directory CORPUS is filled with good messages of each kind if it is empty.
Options are libFuzzer's own. A reader that raises anything but a protocol error ends the run; so do
2 GiB of memory.
"""

# pyright: reportUnknownMemberType=false, reportAttributeAccessIssue=false
# atheris takes its names from a compiled module that has no stubs.

import asyncio
import random
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import atheris
import msgspec

with atheris.instrument_imports(include=["rolloutbus"]):
    from rolloutbus.bus.wire.codec import SIGNATURE
    from rolloutbus.bus.wire.commands import COMMANDS, KINDS
    from rolloutbus.bus.wire.entry import Entry
    from tests.conformance.representatives import NAMES
    from tests.fuzz.mutations import changed_bytes, changed_map
    from tests.fuzz.readers import Readers

AS_FRAME, AS_HOST_FRAME, AS_BODY, AS_RESULT = range(4)
"""What the first byte of an input says about the rest."""
KIND_NAMES = sorted(KINDS)
COMMAND_NAMES = sorted(COMMANDS)


N_LANDMARKS = 1 << 12
NUMBERS = re.compile(r"\d+|`[^$`]*`$|'[^']*'")
"""What a refusal quotes: its sort is the same."""


class Landmarks:
    """Shows libFuzzer what the decoder, which is compiled, made of an input.

    Each sort of refusal of each field runs a function of its own, which counts as a branch.
    """

    def __init__(self) -> None:
        self._functions: list[Callable[[], None]] = [
            atheris.instrument_func(_landmark()) for _ in range(N_LANDMARKS)
        ]

    def reach(self, outcome: str) -> None:
        """Run the function of this outcome."""
        self._functions[zlib.crc32(NUMBERS.sub("", outcome).encode()) % N_LANDMARKS]()


def _landmark() -> Callable[[], None]:
    def landmark() -> None:
        return None

    return landmark


def mutated(data: bytes, max_size: int, seed: int) -> bytes:
    """The next input: often of other bytes, sometimes of other values in good MessagePack."""
    rng = random.Random(seed)
    n_head = 2 if data[:1] and data[0] % 4 >= AS_BODY else 1
    head, rest = data[:n_head], data[n_head:]
    match rng.randrange(3):
        case 0 if rest:
            return (head + changed_bytes(rest, rng))[:max_size]
        case 1:
            try:
                return (head + changed_map(rest, rng))[:max_size]
            except (ValueError, TypeError, RecursionError, OverflowError):  # no value at all
                pass
        case _:
            pass
    return bytes(atheris.Mutate(data, max_size))


def fill(corpus: Path) -> None:
    """Put a good input of every sort in there."""
    for name, entry in NAMES.items():
        body = bytes(entry.body)
        kind, _, command = name.partition(".")
        frame = msgspec.msgpack.encode([entry])
        (corpus / f"{name}.frame").write_bytes(bytes([AS_FRAME]) + frame)
        (corpus / f"{name}.host").write_bytes(bytes([AS_HOST_FRAME]) + frame)
        if kind in KINDS:
            at = KIND_NAMES.index(kind)
            (corpus / f"{name}.body").write_bytes(bytes([AS_BODY, at]) + body)
        if command in COMMANDS:
            at = COMMAND_NAMES.index(command)
            (corpus / f"{name}.result").write_bytes(bytes([AS_RESULT, at]) + body)


def feed(readers: Readers, data: bytes) -> None:
    """One input to the reader that it is meant for."""
    how, at, rest = data[:1], int.from_bytes(data[1:2]), data[1:]
    match int.from_bytes(how) % 4:
        case 0:  # AS_FRAME
            readers.frame(SIGNATURE + rest)
        case 1:  # AS_HOST_FRAME
            readers.host_frame(SIGNATURE + rest)
        case 2:  # AS_BODY
            kind = KIND_NAMES[at % len(KIND_NAMES)]
            readers.entry(Entry(kind, "a/1", body=msgspec.Raw(rest[1:])))
        case _:  # AS_RESULT
            command = COMMAND_NAMES[at % len(COMMAND_NAMES)]
            readers.result(command, Entry("finished", "a/1", body=msgspec.Raw(rest[1:])))


async def main() -> None:
    """Fuzz until the time is over; does not return."""
    readers = Readers(Landmarks().reach)

    def one(data: bytes) -> None:
        feed(readers, data)
        if readers.crashes:
            raise AssertionError(readers.crashes[0])

    atheris.Setup(sys.argv, one, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    if not any(Path(sys.argv[1]).iterdir()):
        fill(Path(sys.argv[1]))
    asyncio.run(main())
