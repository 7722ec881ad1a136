"""Ray: one actor process for each worker, called by the driver directly, in turn.

There is no router between them, as nobody who uses Ray would put one there; with one in between a
call costs about twice as much.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# Ray is not installed where types are checked.

import logging
import os
import sys
import tempfile
from itertools import cycle

import ray
import uvloop

from benchmarks.command_peers.closed_loop import BODY, check, measure
from rolloutbus.bus.actor.process import die_with_parent

STORE_BYTES = 80 << 20
"""The least that Ray takes; bodies of 200 bytes do not go there."""


@ray.remote(num_cpus=0)
class Worker:
    """Sends back what it gets."""

    def answer(self, body: bytes) -> bytes:
        """One command."""
        return body


async def _client(n_workers: int) -> None:
    actors = [Worker.remote() for _ in range(n_workers)]
    ray.get([actor.answer.remote(BODY) for actor in actors])
    turns = cycle(actors)

    async def ask() -> None:
        check(await next(turns).answer.remote(BODY))

    await measure(ask)


def main(n_workers: int) -> None:
    """A cluster of this machine alone, for this process."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with tempfile.TemporaryDirectory(prefix="rb-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=n_workers,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=STORE_BYTES,
            _temp_dir=folder,
        )
        try:
            uvloop.run(_client(n_workers))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    die_with_parent()
    match sys.argv[1:]:
        case ["client", n]:
            main(int(n))
        case wrong:
            sys.exit(f"no such role: {wrong}")
