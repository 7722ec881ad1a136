"""A router that a test plays: it says what the test makes of each entry."""

from collections.abc import Callable
from pathlib import Path

from rolloutbus.bus.transport.zmq_ports import RouterPort
from rolloutbus.bus.wire.entry import Entry, Peer

Answers = Callable[[Entry], list[Entry]]
"""An entry of a client -> what it is told."""


class PretendRouter:
    """Listens below a folder; a command that comes again, for its answer was late, is not new."""

    def __init__(self, folder: Path, answers: Answers) -> None:
        self._port = RouterPort([f"ipc://{folder}/router"], self._arrived)
        self._answers = answers
        self._told: dict[str, list[Entry]] = {}
        """By rid."""
        self.address = self._port.endpoints[0]

    def close(self) -> None:
        self._port.close()

    def _arrived(self, peer: Peer, entries: list[Entry]) -> None:
        for entry in entries:
            told = self._told.get(entry.rid)
            if told is None:
                told = self._answers(entry)
            if entry.rid:
                self._told[entry.rid] = told
            for answer in told:
                self._port.send(peer, answer)
