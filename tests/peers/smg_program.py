"""A program on SMG's own RL client; prints one JSON object of what it got: `smg_program.py URL`."""

# pyright: basic, reportMissingImports=false
# What it imports is installed in the environment that runs it.

import json
import sys
from typing import Any

from smg.rl import RL, FanoutError, RlError, paused


def run(url: str) -> dict[str, Any]:
    rl = RL(url, timeout=60)
    workers = rl.workers()
    told: dict[str, Any] = {
        "workers": [[each.id, each.health, each.weight_version] for each in workers]
    }
    first = workers[0]
    told["called"] = rl.call(first.id, "server_info", method="GET").body["state"]
    with paused(rl, f"engine={first.engine}", mode="in_place") as result:
        told["paused"] = [result.succeeded, [each.health for each in rl.workers()]]
    told["flushed"] = sorted(rl.fanout("flush_cache", {}, selector=f"id!={first.id}").results)
    try:
        rl.fanout("release_memory_occupation", {"tags": ["nothing"]}, selector=f"id={first.id}")
    except FanoutError as error:
        told["wrong_tag"] = [each.message for each in error.result.failed]
    except RlError as error:
        told["wrong_tag"] = [error.code, str(error)]
    try:
        rl.worker("nobody")
    except RlError as error:
        told["unknown"] = [error.status, error.code]
    return told


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
