"""Everything in the code that reads bytes or values which a peer has chosen.

A reader may raise `RemoteProtocolError`, which its caller counts, and nothing else.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from rolloutbus.bus.membership.lease import lease_number
from rolloutbus.bus.paths import WEIGHTS, check_path
from rolloutbus.bus.streams.reassembly import rows_of
from rolloutbus.bus.streams.tap import TapMark
from rolloutbus.bus.weights.manifest import check_tensors, lay_out
from rolloutbus.bus.weights.weight_delta import check_parts
from rolloutbus.bus.wire.codec import decode_batch, pack, unpack, unpack_fleet, unpack_result
from rolloutbus.bus.wire.commands import COMMANDS, KINDS, RESULTS
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.generation import Deltas, Generate
from rolloutbus.bus.wire.messages.membership import Hello, Member
from rolloutbus.bus.wire.messages.weights import Manifest, ReserveVersion, WeightDelta
from rolloutbus.bus.wire.validation import check_generate, check_name, check_placement, check_rid
from rolloutbus.engine_worker.host.link import LENGTH_BYTES, HostLink
from rolloutbus.replay.choice import Filter
from rolloutbus.replay.journal.records import Stream, Tap, ToldRecord, payload_of, record_in
from rolloutbus.replay.player_core import PlayerCore, Programme
from rolloutbus.replay.recorder_core import RecorderCore
from rolloutbus.replay.regenerating import Again, difference, to_sample, to_score
from rolloutbus.replay.trajectories import AnsweredRequests
from rolloutbus.trainer_adapter.client.core.endings import fleet_result, generated_of

VOCAB_SIZE, MAX_CONTEXT = 32_000, 4096
SAMPLED = Again(np.zeros(2, np.int32), np.zeros(2, np.float32), [(0, 2)], "stop")
PLAYED = Member("w0", "e.1", "ipc:///w0", "ready", 0, "p")
LAYOUT = lay_out([("embed", "F32", (64, 8)), ("head", "BF16", (8,))])
"""Of the version that a delta is for."""


class Readers:
    """Feeds bytes to all readers and counts what they made of them. Needs a running event loop."""

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        """`tell` hears what became of each reading, in words."""
        self._tell = tell
        self.n_understood: dict[str, int] = dict.fromkeys(
            (
                "batch", "bodies", "results", "host link", "streams", "recorder", "journal",
                "player", "regeneration",
            ), 0
        )  # fmt: skip
        self._recorders = [RecorderCore(Filter()), RecorderCore(Filter(session=["s"]))]
        self.n_refused = 0
        self.crashes: list[str] = []

    def frame(self, frame: bytes) -> bool:
        """A batch frame as it comes from a socket; whether it held entries."""
        entries = self._try("batch", lambda: decode_batch(frame), frame)
        for entry in entries or ():
            self.entry(entry)
        if entries:
            self._try("journal", lambda: record_in(frame[3:]), frame)
            self._try("recorder", lambda: self._recorded(frame[:41], entries), frame)
            self._try("player", lambda: _played(frame[:41], entries), frame)
            self._try("regeneration", lambda: _asked_again(entries), frame)
        return bool(entries)

    def host_frame(self, frame: bytes) -> None:
        """The same bytes on the link between a worker and its engine's host."""
        heard: list[Entry] = []
        link = HostLink(heard.extend)
        prefixed = len(frame).to_bytes(LENGTH_BYTES, "little") + frame
        self._try("host link", lambda: link.data_received(prefixed), frame)

    def entry(self, entry: Entry) -> None:
        """An entry that a batch held: its header, and its body by its kind."""
        self._try("bodies", lambda: _look_at_header(entry), repr(entry)[:200])
        if entry.kind in ("finished", "cancelled"):
            for command in COMMANDS:
                self.result(command, entry)
        else:
            self.body(entry)

    def body(self, entry: Entry) -> None:
        """A body of a kind."""
        body = self._try("bodies", lambda: unpack(entry), entry)
        if body is not None:
            self._try("streams", lambda: _look_at_body(entry, body), entry)
            self._encodes_again(entry, KINDS[entry.kind], body)

    def result(self, command: str, entry: Entry) -> None:
        """The body of an ending."""
        body = self._try("results", lambda: unpack_result(command, entry), entry)
        if body is not None:
            self._encodes_again(entry, RESULTS[command], body)
        if command == "generate":
            self._try("results", lambda: generated_of(entry), entry)
        elif command == "pause":
            self._try("results", lambda: fleet_result("pause", entry), entry)
            self._try("results", lambda: unpack_fleet(entry), entry)

    def _recorded(self, topic: bytes, entries: list[Entry]) -> None:
        """What is heard can be written down, and read again."""
        heard = TapMark("sent", 1, 0.0, 1, "w0").topic
        for recorder in self._recorders:
            for builds in (
                recorder.tapped(topic, entries, 1),
                recorder.tapped(heard, entries, 2),
                recorder.published(topic, entries, 3),
                recorder.told(entries),
                recorder.tick(10**10),
            ):
                for build in builds:
                    record_in(payload_of(build(1, 1)))

    def _encodes_again(self, entry: Entry, kind: type[msgspec.Struct], body: object) -> None:
        """Whatever is taken in can be passed on."""

        def passes() -> None:
            msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=kind)

        self._try("bodies", passes, entry)

    def _try(self, reader: str, read: Callable[[], Any], what: object) -> Any:  # noqa: ANN401
        try:
            value = read()
        except RemoteProtocolError as error:
            self.n_refused += 1
            if self._tell is not None:
                self._tell(f"{reader}: {error}")
            return None
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            self.crashes.append(f"{reader}: {error!r} on {what!r}"[:2000])
            return None
        self.n_understood[reader] += 1
        if self._tell is not None:
            self._tell(f"{reader}: {type(value).__name__}")
        return value


def _played(topic: bytes, entries: list[Entry]) -> None:
    """What was recorded, whatever it is, can be played, and asked for by a client."""
    by_w0 = [msgspec.structs.replace(entry, route="w0") for entry in entries]
    rids = frozenset(entry.rid for entry in entries)
    for chosen in (frozenset[str](), rids | {"c/1"}):
        core = PlayerCore(Programme([PLAYED], "ipc:///tap", chosen), "i" * 32)
        core.router.receive(Peer(b"x"), [Entry("hello", body=pack(Hello("client", "c", "b")))], 1.0)
        for record in (
            Tap(1, 1, "sent", 1, 0.0, 1, "w0", entries),
            Stream(2, 2, topic, by_w0),
            ToldRecord(3, 3, entries),
        ):
            message = core.step(record).message
            if message is not None:
                core.published(message)
        core.router.receive(Peer(b"x"), entries, 2.0)
        core.router.receive(
            Peer(b"x"), [msgspec.structs.replace(e, route="worker:w0") for e in entries], 3
        )
        core.router.tick(60.0)


def _asked_again(entries: list[Entry]) -> None:
    """The same of what a client asked for and got."""
    heard = [Tap(1, 1, event, 1, 0.0, 1, "c", entries) for event in ("received", "sent")]
    for answered in AnsweredRequests(heard):
        to_sample(answered)
        to_score(answered)
        difference(answered, SAMPLED)


def _look_at_header(entry: Entry) -> None:
    check_rid(entry.rid, client="trainer")
    check_name(entry.route)
    lease_number(entry.epoch)
    check_path(entry.route, WEIGHTS)
    if entry.place is not None:
        check_placement(entry.place)


def _look_at_body(entry: Entry, body: msgspec.Struct) -> None:
    match body:
        case Generate():
            check_generate(body, vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT)
        case Deltas():
            list(rows_of(body))
        case ReserveVersion(tensors=tensors) | Manifest(tensors=tensors):
            check_tensors(tensors)
        case WeightDelta():
            check_parts(body.parts, body.size_bytes, LAYOUT)
        case Hello():
            check_name(body.name)
            lease_number(body.epoch)
        case _:
            del entry
