"""SGLang's `/load_lora_adapter` and `/unload_lora_adapter`, for all workers or for none."""

import asyncio
from collections.abc import Iterable
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response

from rolloutbus.bus.wire.errors import BusError, Refused
from rolloutbus.bus.wire.messages.control import Adapters, ServerFacts
from rolloutbus.bus.wire.messages.endings import bad_request
from rolloutbus.gateway.engine_routes import SLOW_S
from rolloutbus.gateway.exchange import Json, as_json, body_of, converted, while_connected
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.gateway.sglang.replies import refuse_unserved, telling_success
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import FleetCommandFailed, FleetResult

Name = Annotated[str, msgspec.Meta(min_length=1)]
UNSERVED = {
    "pinned": "workers keep every adapter that is loaded; leave it out",
    "lora_id": "adapters are known by their names; leave it out",
    "rid": "it names no request; leave it out",
}


class LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/load_lora_adapter`."""

    lora_name: Name
    lora_path: Name
    """Directory of a PEFT adapter, relative to the workers' `weights_root`."""


class UnloadBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/unload_lora_adapter`."""

    lora_name: Name


class AdaptersApi:
    """Answers through a client of the bus."""

    def __init__(self, client: RolloutClient, settings: GatewaySettings) -> None:
        self._client = client
        self._settings = settings
        self.router = APIRouter()
        for path, answer in (
            ("/load_lora_adapter", self.load),
            ("/unload_lora_adapter", self.unload),
        ):
            told = telling_success(answer, sentence="error_message")
            self.router.add_api_route(path, told, methods=["POST"])

    async def load(self, request: Request) -> Response:
        """`POST /load_lora_adapter`: loads it on all workers; where one cannot, on none."""
        fields = await body_of(request, self._settings.max_body_bytes)
        body = converted(refuse_unserved(fields, UNSERVED), LoadBody)
        return as_json(await while_connected(request, self._loaded(body)))

    async def _loaded(self, body: LoadBody) -> Json:
        await self._require_new(body.lora_name)
        try:
            result = await self._client.load_lora(body.lora_name, path=body.lora_path)
        except FleetCommandFailed as error:
            did = [name for name, each in error.result.by_worker.items() if _is_done(each)]
            await self._undo(body.lora_name, did)
            raise
        return _reply(result)

    async def _require_new(self, name: str) -> None:
        """Raises Refused: some worker has an adapter of this name."""
        facts = await self._client.server_info()
        for worker, each in facts.by_worker.items():
            if isinstance(each, ServerFacts) and name in each.adapters:
                message = f"worker {worker} has an adapter {name[:64]!r}; unload that first"
                raise Refused(bad_request("lora_name", message))

    async def _undo(self, name: str, workers: Iterable[str]) -> None:
        await asyncio.gather(
            *(
                self._client.unload_lora(name, target=worker, deadline_s=SLOW_S, check=False)
                for worker in workers
            )
        )

    async def unload(self, request: Request) -> Response:
        """`POST /unload_lora_adapter`: all workers forget it."""
        fields = await body_of(request, self._settings.max_body_bytes)
        body = converted(refuse_unserved(fields, UNSERVED), UnloadBody)
        return as_json(_reply(await self._client.unload_lora(body.lora_name, deadline_s=SLOW_S)))


def _is_done(ended: msgspec.Struct | BusError) -> bool:
    return not isinstance(ended, BusError)


def _reply(result: FleetResult) -> Json:
    loaded: dict[str, str] = {}
    for each in result.by_worker.values():
        if isinstance(each, Adapters):
            loaded |= {name: f"{name}@{version}" for name, version in each.adapters.items()}
    return {"success": True, "loaded_adapters": loaded, "workers": list(result.by_worker)}
