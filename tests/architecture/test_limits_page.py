"""Every field on the wire has a limit, and docs/protocol.md lists it."""

import subprocess
import sys

from bus.codec import MAX_BATCH_BYTES
from bus.messages.limits import (
    CHUNK_BYTES,
    MAX_BATCH_ENTRIES,
    MAX_BODY_BYTES,
    MAX_BULK_IN_BYTES,
    MAX_FRAMES,
    MAX_RID_CHARS,
)
from bus.security.zmq_turnstile import MAX_ASKED
from bus.validation import MAX_NAME_BYTES, MAX_RID_BYTES
from router.offences import OFFENCES, SHUNNED_S, WINDOW_S
from tests.architecture.source_tree import ROOT

KIB = 1024
MIB = 1024 * KIB


def test_the_protocol_lists_the_limit_of_every_field() -> None:
    check = [sys.executable, "docs/list_limits.py", "--check"]

    found = subprocess.run(
        check, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )

    assert found.returncode == 0, found.stderr


def test_the_protocol_states_the_limits_of_frames_and_names() -> None:
    page = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    for row in (
        f"| batch frame | {MAX_BATCH_BYTES // MIB} MiB, at most {MAX_BATCH_ENTRIES} entries |",
        f"| detached body | {MAX_BODY_BYTES // MIB} MiB; ",
        f"to a store's bulk socket {MAX_BULK_IN_BYTES // KIB} KiB",
        f"after its first {MAX_FRAMES} |",
        f"| 1 to {MAX_NAME_BYTES} bytes of printable ASCII without space and `@` |",
        f"; {MAX_RID_BYTES} bytes in all |",
        f"| chunk | {CHUNK_BYTES // MIB} MiB,",
        f"; at a guarded publisher {MAX_ASKED:,} from one connection",
        f"| {OFFENCES} in {WINDOW_S:.0f} s; then `dismissed(protocol)` |",
        f"silent for\n{SHUNNED_S:.0f} s",
    ):
        assert row in page


def test_a_share_of_the_longest_rid_fits() -> None:
    assert MAX_RID_BYTES + len("@") + MAX_NAME_BYTES <= MAX_RID_CHARS
