"""A trainer of a fleet on several hosts: it publishes, then samples while hosts come and go.

`python -m tests.integration.far_load KEY_FILE` prints three lines of JSON: `published`;
`under_way`, once every worker has sampled something; `finished`.
"""

import asyncio
import json
import sys
from pathlib import Path

import torch

import rolloutbus
from rolloutbus import RolloutClient, SamplingParams
from rolloutbus.bus.security.key_files import router_addresses_beside

N_ROLLOUTS = 40
N_TOKENS = 600
N_WORKERS = 4
DEADLINE_S = 120.0


def say(**report: object) -> None:
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


async def publish(client: RolloutClient) -> None:
    tensors = {"embed.weight": torch.ones(8, 4), "head.weight": torch.ones(4)}
    publisher = rolloutbus.WeightPublisher(client)
    published = await publisher.publish(tensors, require="all", deadline_s=DEADLINE_S)
    say(published=published.version, transport=published.transport, why=published.why)


async def sample(client: RolloutClient, n: int, seen: set[str], all_seen: asyncio.Event) -> int:
    """Stream one rollout; returns its number of tokens."""
    n_tokens = 0
    sampling = SamplingParams(max_new_tokens=N_TOKENS, ignore_eos=True)
    async for delta in client.stream([1, 2, n], sampling, deadline_s=DEADLINE_S):
        n_tokens += len(delta.tokens)
        seen.add(delta.worker)
        if len(seen) == N_WORKERS:
            all_seen.set()
    return n_tokens


async def main(key_file: str) -> None:
    address = router_addresses_beside(Path(key_file)).frontend
    async with rolloutbus.connect(address, key_file=key_file) as client:
        await publish(client)
        seen, all_seen = set[str](), asyncio.Event()
        tasks = [asyncio.create_task(sample(client, n, seen, all_seen)) for n in range(N_ROLLOUTS)]
        await all_seen.wait()
        say(under_way=sorted(seen))
        say(finished=await asyncio.gather(*tasks))


asyncio.run(main(*sys.argv[1:]))
