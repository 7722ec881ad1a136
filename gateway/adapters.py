"""LoRA adapters, loaded on all workers or on none."""

from typing import Annotated

import msgspec

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.control import ServerFacts
from rolloutbus.bus.wire.messages.endings import bad_request
from rolloutbus.gateway.engine_routes import SLOW_S
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import FleetCommandFailed, FleetResult

Name = Annotated[str, msgspec.Meta(min_length=1)]


class LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be loaded."""

    lora_name: Name
    lora_path: Name
    """Directory of a PEFT adapter below the workers' `weights_root`, absolute or relative to it."""


class UnloadBody(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be forgotten."""

    lora_name: Name


async def load_on_all(client: RolloutClient, body: LoadBody, *, replaces: bool) -> FleetResult:
    """Load an adapter on all workers.

    Args:
        client: whose principal may.
        body: which.
        replaces: one of this name may be loaded; it is gone then even if this one fails.

    Raises:
        Refused: some worker has one of this name, and it is not to be replaced.
        FleetCommandFailed: some worker could not load it; now no worker has one of this name.
    """
    name = body.lora_name
    if not replaces:
        for worker, each in (await client.server_info()).by_worker.items():
            if isinstance(each, ServerFacts) and name in each.adapters:
                message = f"worker {worker} has an adapter {name[:64]!r}; unload that first"
                raise Refused(bad_request("lora_name", message))
    try:
        return await client.load_lora(name, path=body.lora_path)
    except FleetCommandFailed:
        await client.unload_lora(name, deadline_s=SLOW_S, check=False)
        raise
