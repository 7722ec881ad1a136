"""A trainer on a host of its own: it reads a stream, publishes, and says what it saw.

`python -m tests.integration.far_trainer KEY_FILE WORKER RELAY` prints one line of JSON. RELAY is
where the worker passes weights on.
"""

import asyncio
import json
import sys
from pathlib import Path

import torch
import zmq

import rolloutbus
from rolloutbus import SamplingParams
from rolloutbus.bus.security.key_files import read_key_pair, router_addresses_beside
from rolloutbus.bus.security.zmq_guard import prove
from rolloutbus.bus.transport.endpoints import split_key

N_TOKENS = 12
DEADLINE_S = 60.0


async def main(key_file: str, worker: str, relay: str) -> None:
    address = router_addresses_beside(Path(key_file)).frontend
    async with rolloutbus.connect(address, key_file=key_file) as client:
        streams = {each.name: each.stream for each in client.connection.members}
        _, key = split_key(streams[worker])
        await prove(relay, zmq.DEALER, key, read_key_pair(key_file))  # raises if it is kept out
        sampling = SamplingParams(max_new_tokens=N_TOKENS)
        deltas: list[list[int]] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(deltas) < 2:  # a subscription takes effect some time after it is made
                deltas = [
                    delta.tokens.tolist()
                    async for delta in client.stream(
                        [1, 2, 3], sampling, worker=worker, deadline_s=DEADLINE_S
                    )
                ]
        publisher = rolloutbus.WeightPublisher(client)
        tensors = {"embed.weight": torch.ones(8, 4), "head.weight": torch.ones(4)}
        published = await publisher.publish(tensors, require="all", deadline_s=DEADLINE_S)
        rollout = await client.generate(
            [1, 2, 3], sampling, worker=worker, versions="latest", deadline_s=DEADLINE_S
        )
    report = {
        "deltas": deltas,
        "published": published.version,
        "workers": sorted(published.stall_ms),
        "sampled_by": rollout.version_runs,
        "stream": streams[worker],
    }
    sys.stdout.write(json.dumps(report) + "\n")


asyncio.run(main(*sys.argv[1:]))
