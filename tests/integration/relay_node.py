"""A worker's weight receiver and its relay, in a process of its own; told what to do by lines.

Standard input: `{"prepare": {…}}` one after another. Standard output: where it
serves; then, for each prepare, a line when the version begins to arrive, one each time that tensors
were proven, and one with what came of it.
"""

import asyncio
import json
import sys
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from rolloutbus.bus.actor.resources import keep_freed_memory
from rolloutbus.bus.weights.manifest import Bytes, digest_of
from rolloutbus.bus.wire.errors import BusError, RequestError
from rolloutbus.bus.wire.messages.weights import Manifest, PrepareUpdate
from rolloutbus.engine_worker.engine import TensorSpec
from rolloutbus.engine_worker.weights.receiver import WeightReceiver, ways_of_this_host
from rolloutbus.engine_worker.weights.relay import Relay

PULL_S = 60.0


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


class TalkingRelay(Relay):
    """Says how far it is."""

    def __init__(self) -> None:
        super().__init__()
        self._n_proven = 0

    def begin(self, manifest: Manifest, content: Bytes) -> None:
        super().begin(manifest, content)
        self._n_proven = 0
        say(began=manifest.version)

    def proven(self, manifest: Manifest, content: Bytes, tensors: Iterable[int]) -> None:
        indices = list(tensors)
        super().proven(manifest, content, indices)
        self._n_proven += len(indices)
        say(proven=self._n_proven)


async def serve(endpoint: str, specs: list[TensorSpec]) -> None:
    relay = TalkingRelay()
    relay.listen(endpoint)
    receiver = WeightReceiver(specs, ways_of_this_host(relay), relay=relay)
    say(bulk=relay.bulk)
    while line := await asyncio.to_thread(sys.stdin.readline):
        told: dict[str, Any] = json.loads(line)
        ask = msgspec.convert(told["prepare"], PrepareUpdate)
        try:
            prepared = await receiver.prepare(ask, timeout_s=PULL_S)
        except RequestError as error:
            say(code=error.code, field=error.field)
            continue
        except BusError as error:
            say(code=str(error), field="")
            continue
        staged = receiver.staged(ask.version)
        digests = {name: digest_of(np.asarray(each)) for name, each in staged.items()}
        say(digests=digests, moved_bytes=prepared.moved_bytes, sent_bytes=relay.sent_bytes)
    receiver.close()
    relay.close()


def main() -> None:
    keep_freed_memory()
    rows = json.loads(sys.argv[2])
    specs = [TensorSpec(name, dtype, tuple(shape), n) for name, dtype, shape, n in rows]
    asyncio.run(serve(sys.argv[1], specs))


if __name__ == "__main__":
    main()
