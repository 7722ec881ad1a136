"""Waits until a publisher lets a key in no more: `python -m tests.integration.key_check FILE URL`.

Prints a line of JSON then.
"""

import asyncio
import json
import sys

import zmq

from rolloutbus.bus.security.key_files import read_key_pair
from rolloutbus.bus.security.zmq_guard import prove
from rolloutbus.bus.transport.endpoints import split_key
from rolloutbus.bus.wire.errors import SecurityError

DEADLINE_S = 60.0


async def main(key_file: str, endpoint: str) -> None:
    address, key = split_key(endpoint)
    pair = read_key_pair(key_file)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await prove(address, zmq.SUB, key, pair)
            except SecurityError as error:
                sys.stdout.write(json.dumps({"kept_out": str(error)}) + "\n")
                return


asyncio.run(main(*sys.argv[1:]))
