"""Writes `vectors/<name>.hex`: one batch frame of one representative entry, as hex text.

Run it with `python -m tests.conformance.make_vectors`, and read the diff: a changed vector is a
changed protocol.
"""

from pathlib import Path

from rolloutbus.bus.wire.codec import encode_batch
from rolloutbus.bus.wire.entry import Entry
from tests.conformance.representatives import NAMES

FOLDER = Path(__file__).parent / "vectors"
BYTES_PER_LINE = 32


def hex_text(frame: bytes) -> str:
    """`frame` in lines of lower-case hex."""
    starts = range(0, len(frame), BYTES_PER_LINE)
    return "".join(f"{frame[start : start + BYTES_PER_LINE].hex()}\n" for start in starts)


def frame_of(entry: Entry) -> bytes:
    """The batch frame of a single entry."""
    return encode_batch([entry])


def main() -> None:
    """Replace every vector."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.hex"):
        old.unlink()
    for name, entry in NAMES.items():
        (FOLDER / f"{name}.hex").write_text(hex_text(frame_of(entry)), encoding="ascii")


if __name__ == "__main__":
    main()
