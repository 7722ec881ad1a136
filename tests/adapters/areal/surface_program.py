"""What AReaL finds where it looks for a backend and a routing strategy; prints one JSON object.

Run by the tests beside it, in an environment with AReaL: `surface_program.py GATEWAY NOBODY`, with
the addresses of a gateway and of a port where nobody listens.
"""

# pyright: basic, reportMissingImports=false
# What it imports is installed in the environment that runs it.

import inspect
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from areal.api import WeightUpdateMeta
from areal.api.cli_args import InferenceEngineConfig
from areal.experimental.inference_service.router.config import RouterConfig
from areal.infra import RemoteInfBackendProtocol
from fastapi.testclient import TestClient

from rolloutbus.trainer_adapter.frameworks.areal import FleetBackend, RemoteFleetEngine, router_app

DEADLINE_S = 30.0


def lacks() -> list[str]:
    """Methods of AReaL's protocol that the backend has not."""
    names = [name for name, _ in inspect.getmembers(RemoteInfBackendProtocol, inspect.isfunction)]
    own = [name for name in names if not name.startswith("_")]
    assert own, "AReaL's protocol has no methods any more"
    return [name for name in own if not callable(getattr(FleetBackend(), name, None))]


def reason(call: Callable[[], Any]) -> str:
    """Why it is refused."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test judges which
        return f"{type(error).__name__}: {error}"
    return ""


def routed(gateway: str, nobody: str) -> list[str]:
    """Where AReaL's router sends requests for a model that both addresses serve."""
    config = RouterConfig(poll_interval=0.05)
    headers = {"Authorization": f"Bearer {config.admin_api_key}"}
    urls = [f"http://{nobody}", f"http://{gateway}"]
    with TestClient(router_app(config), headers=headers) as router:
        for url in urls:
            router.post("/register", json={"worker_addr": url}).raise_for_status()
        model = {"model": "tiny", "data_proxy_addrs": urls}
        router.post("/register_model", json=model).raise_for_status()
        give_up_at = time.monotonic() + DEADLINE_S
        while all(each["healthy"] for each in router.get("/workers").json()["workers"]):
            assert time.monotonic() < give_up_at, "it found nobody missing"
        routes = [router.post("/route", json={"model": "tiny"}).json() for _ in range(4)]
        return [each["worker_addr"].removeprefix("http://") for each in routes]


def main() -> None:
    gateway, nobody = sys.argv[1:]
    config = InferenceEngineConfig(backend="sglang:d1")
    backend = FleetBackend()
    meta = WeightUpdateMeta(type="xccl")
    second = InferenceEngineConfig(backend="sglang:d1", _version="v2")
    hasty = InferenceEngineConfig(backend="sglang:d1", setup_timeout=1)
    told = {
        "lacks": lacks(),
        "routed": routed(gateway, nobody),
        "two": reason(lambda: RemoteFleetEngine(config).initialize("0", [gateway, nobody])),
        "none": reason(lambda: RemoteFleetEngine(config).initialize("0")),
        "absent": reason(lambda: RemoteFleetEngine(hasty).initialize("0", nobody)),
        "second": reason(lambda: RemoteFleetEngine(second)),
        "group": reason(lambda: backend.build_init_weights_group_request(gateway, 0, meta)),
        "chunk": reason(lambda: backend.build_distributed_weight_update_requests(meta, [])),
        "launch": reason(lambda: backend.launch_server({})),
        "stranger": reason(
            lambda: backend.parse_generation_response(
                {
                    "meta_info": {
                        "finish_reason": {"type": "stop"},
                        "output_token_logprobs": [[-0.5, 7, None]],
                        "weight_version": "default",
                    }
                }
            )
        ),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
