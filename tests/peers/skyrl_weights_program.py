"""One weight update as SkyRL's own remote client drives it; prints what each call answered.

    python skyrl_weights_program.py URL PORT UPDATE_INFO

The sender is another process: rank 0 of a group of torch.distributed at PORT. What SkyRL's
`BroadcastInitInfo` tells is told here, and the backend, for which that class has no field.
"""

# pyright: basic, reportMissingImports=false
# What it imports is installed in the environment that runs it.

import asyncio
import json
import sys
from typing import Any

from skyrl_program import skyrl_client


class InitInfo:
    """What the client asks of one."""

    def __init__(self, port: int, world_size: int) -> None:
        self._payload = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
        self._payload |= {"world_size": world_size, "backend": "gloo"}

    def for_servers(self, per_server: int, n_servers: int, dp_size: int) -> list["InitInfo"]:
        assert (per_server, n_servers, dp_size) == (1, 1, 1)
        return [self]

    def to_api_payload(self) -> dict[str, Any]:
        return self._payload


async def run(url: str, port: int, update_info: dict[str, Any]) -> list[Any]:
    client = skyrl_client()(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="tiny"
    )
    world_size, _ = await client.get_world_size()
    await client.pause("keep")
    told = [
        await client.init_weight_update_communicator(InitInfo(port, world_size + 1)),
        await client.start_weight_update(is_checkpoint_format=True),
        await client.update_weights_nccl(update_info),
        await client.finish_weight_update(),
    ]
    await client.resume()
    await client.teardown()
    return [each[url]["body"] for each in told]


if __name__ == "__main__":
    done = asyncio.run(run(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])))
    print(json.dumps(done))
