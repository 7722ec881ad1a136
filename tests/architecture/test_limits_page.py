"""Every field on the wire has a limit, and docs/protocol.md lists it."""

import subprocess
import sys

import pytest

from rolloutbus.bus.security.zmq_guard import MAX_ASKED
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import MAX_BATCH_BYTES
from rolloutbus.bus.wire.limits import (
    CHUNK_BYTES,
    MAX_BATCH_ENTRIES,
    MAX_BODY_BYTES,
    MAX_BULK_IN_BYTES,
    MAX_FRAMES,
    MAX_RID_CHARS,
)
from rolloutbus.bus.wire.validation import MAX_NAME_BYTES, MAX_RID_BYTES
from rolloutbus.router.members.authority import OFFENCES, SHUNNED_S, WINDOW_S
from rolloutbus.router.pair import ASKED_S
from rolloutbus.router.settings import TAKEOVER_S
from rolloutbus.trainer_adapter.client.core.request_book import MUTE_S
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


def test_what_the_protocol_says_of_times_is_what_its_table_says() -> None:
    page = " ".join((ROOT / "docs/protocol.md").read_text(encoding="utf-8").split())
    lease = LeaseSettings()
    resend = (
        f"after {lease.resend_first_s:g} s, then after waits that grow by "
        f"{lease.resend_factor:g} up to {lease.resend_max_s:g} s"
    )
    for sentence in (
        f"A member heartbeats every {lease.heartbeat_s:g} s with a growing `seq`",
        f"The member's lease runs for {lease.holder_s:g} s **from",
        f"view of it runs for {lease.lease_s:g} s from receipt",
        f"no answer to its heartbeats for {lease.silence_s:g} s, or whose link",
        f"doubles from {lease.reconnect_first_s:g} s to {lease.reconnect_max_s:g} s. A",
        f"shown no life for `takeover_s` ({TAKEOVER_S:g} s unless set)",
        f"asked this one for a router within the last {ASKED_S:g} s",
        f"itself stopped for more than {lease.late_tick_s:g} s",
        f"nothing was heard for {MUTE_S:g} s is sent again",
        f"A client repeats the abort each {lease.resend_first_s:g} s",
        f"For {lease.recovery_s:g} s the router is *recovering*",
    ):
        assert sentence in page, sentence
    assert page.count(resend) == 3, "client, router and worker send again alike"


@pytest.mark.parametrize("n_sent", [1, 2, 3, 5, 100, 1_000_000])
def test_the_router_sends_again_as_the_protocol_says(n_sent: int) -> None:
    lease = LeaseSettings()
    waits = [lease.resend_first_s]
    while len(waits) < min(n_sent, 50):
        waits.append(min(waits[-1] * lease.resend_factor, lease.resend_max_s))
    assert lease.resend_after(n_sent) == pytest.approx(waits[-1])


def test_a_share_of_the_longest_rid_fits() -> None:
    assert MAX_RID_BYTES + len("@") + MAX_NAME_BYTES <= MAX_RID_CHARS
