"""A worker's weight receiver in a process of its own: pulls one version, prints its digests."""

import asyncio
import json
import sys

import msgspec
import numpy as np

from rolloutbus.bus.actor.resources import keep_freed_memory
from rolloutbus.bus.weights.manifest import digest_of
from rolloutbus.bus.wire.messages.weights import PrepareUpdate
from rolloutbus.engine_worker.engine import TensorSpec
from rolloutbus.engine_worker.weights.receiver import WeightReceiver, ways_of_this_host


async def main() -> None:
    keep_freed_memory()
    prepare = msgspec.convert(json.loads(sys.argv[1]), PrepareUpdate)
    specs = [
        TensorSpec(name, dtype, tuple(shape), n)
        for name, dtype, shape, n in json.loads(sys.argv[2])
    ]
    receiver = WeightReceiver(specs, ways_of_this_host())
    prepare = msgspec.structs.replace(prepare, transport=sys.argv[3])
    prepared = await receiver.prepare(prepare, timeout_s=30.0)
    digests = {
        name: digest_of(np.asarray(each)) for name, each in receiver.staged(prepare.version).items()
    }
    print(json.dumps({"transport": prepared.transport, "digests": digests}))


if __name__ == "__main__":
    asyncio.run(main())
