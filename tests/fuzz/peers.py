"""What a hostile peer that knows the protocol may say: good MessagePack, bad intentions."""

import random
from typing import Any

import msgspec

from rolloutbus.bus.wire.codec import encode_batch
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.limits import MAX_DEADLINE_MS, MAX_ROUTER_EPOCH
from tests.conformance.representatives import NAMES
from tests.fuzz.mutations import changed_map

GOOD = list(NAMES.values())
HUGE = 2**64 - 1


class HostilePeer:
    """Makes entries; `name` is the name it goes by, `victims` are names and rids of others."""

    def __init__(self, rng: random.Random, name: str, victims: list[str]) -> None:
        self._rng = rng
        self._name = name
        self._victims = victims
        self._said: list[Entry] = []
        self._n = 0

    def entry(self) -> Entry:
        """The next thing it says."""
        rng = self._rng
        if self._said and rng.random() < 0.1:
            return rng.choice(self._said)
        entry = rng.choice(GOOD)
        body = bytes(entry.body)
        if rng.random() < 0.5:
            body = changed_map(body, rng)
        self._n += 1
        entry = Entry(
            kind=entry.kind if rng.random() < 0.97 else rng.choice(("", "dance", "x" * 250)),
            rid=rng.choice((self._rid(), self._rid(), entry.rid, rng.choice(self._rids()))),
            attempt=rng.choice(((0, 0), (1, 1), (1, self._n), (HUGE, HUGE))),
            epoch=rng.choice(("", entry.epoch, "x." + "9" * 200, "é" * 100)),
            route=rng.choice(("", "fleet", "store", *self._routes())),
            deadline_ms=rng.choice((0, -1, 1, 500, 30_000, MAX_DEADLINE_MS, -(2**63))),
            place=rng.choice((None, entry.place, self._placement())),
            body=msgspec.Raw(body),
            detached=rng.random() < 0.02,
        )
        if len(self._said) < 1000:
            self._said.append(entry)
        return entry

    def hello(self) -> dict[str, Any]:
        """Fields of a hello that passes the types and claims too much."""
        rng = self._rng
        role = rng.choice(("client", "client", "worker", "store"))
        return {
            "role": role,
            "name": rng.choice((self._name, self._name, *self._victims, "", "a b", "x" * 64)),
            "boot": rng.choice(("0" * 32, "", "é" * 64)),
            "epoch": rng.choice(("", "0.1", "0." + "9" * 60, "٣.٣")),
            "router_epoch": rng.choice((0, 1, 7, MAX_ROUTER_EPOCH)),
            "router_instance": rng.choice(("", "other")),
            "protocol": rng.choice(([1, 1], [0, HUGE], [2, 1], [-5, 9])),
            "worker": {
                "policy": "default",
                "stream": rng.choice(("", "tcp://127.0.0.1:1", "ipc:///nowhere", "x" * 256)),
                "slots": rng.choice((1, 1_000_000)),
                "max_context": rng.choice((0, HUGE)),
                "vocab_size": rng.choice((0, HUGE)),
                "engine": "fake",
                "capabilities": [],
            }
            if role == "worker"
            else None,
            "store": {"bulk": "", "committed": {"other": rng.choice((0, HUGE)), "": 5}}
            if role == "store"
            else None,
        }

    def batch(self) -> list[Entry]:
        """Several entries; now and then with a hello among them."""
        entries = [self.entry() for _ in range(self._rng.choice((1, 1, 1, 5, 40)))]
        if self._rng.random() < 0.15:
            at = self._rng.randrange(len(entries) + 1)
            body = msgspec.Raw(msgspec.msgpack.encode(self.hello()))
            entries.insert(at, Entry("hello", body=body))
        return entries

    def frame(self) -> bytes:
        """A batch as bytes."""
        return encode_batch(self.batch())

    def _rid(self) -> str:
        return f"{self._name}/{self._n}"

    def _rids(self) -> list[str]:
        return [f"{victim}/1" for victim in self._victims] + [
            *("", "/", "a/b", f"{self._name}/01", f"{self._name}/1@w0", "x" * 150, "٣/٣"),
        ]

    def _routes(self) -> list[str]:
        return ["worker:", "worker:w0", "worker:" + "x" * 200, *self._victims]

    def _placement(self) -> Placement:
        rng = self._rng
        return Placement(
            policy=rng.choice(("default", "", "other", "x" * 200)),
            versions=rng.choice(("any", "latest", f"min:{HUGE}", "exact:5", "max-staleness:9")),
            session=rng.choice(("", "s", "é")),
            group=rng.choice(("", "g")),
            cost=rng.choice((0, 10, 2**31 - 1, HUGE, -(2**63))),
            priority=rng.choice((0, 100, -100, HUGE)),
            resend=rng.random() < 0.3,
        )
