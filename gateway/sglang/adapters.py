"""SGLang's `/load_lora_adapter` and `/unload_lora_adapter`, for all workers or for none."""

from fastapi import APIRouter, Request, Response

from rolloutbus.bus.wire.messages.control import Adapters
from rolloutbus.gateway.adapters import LoadBody, UnloadBody, load_on_all
from rolloutbus.gateway.engine_routes import SLOW_S
from rolloutbus.gateway.exchange import Json, as_json, body_of, converted, while_connected
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.gateway.sglang.replies import refuse_unserved, telling_success
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import FleetResult

UNSERVED = {
    "pinned": "workers keep every adapter that is loaded; leave it out",
    "lora_id": "adapters are known by their names; leave it out",
    "rid": "it names no request; leave it out",
}


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
        work = load_on_all(self._client, body, replaces=False)
        return as_json(_reply(await while_connected(request, work)))

    async def unload(self, request: Request) -> Response:
        """`POST /unload_lora_adapter`: all workers forget it."""
        fields = await body_of(request, self._settings.max_body_bytes)
        body = converted(refuse_unserved(fields, UNSERVED), UnloadBody)
        return as_json(_reply(await self._client.unload_lora(body.lora_name, deadline_s=SLOW_S)))


def _reply(result: FleetResult) -> Json:
    loaded: dict[str, str] = {}
    for each in result.by_worker.values():
        if isinstance(each, Adapters):
            loaded |= {name: f"{name}@{version}" for name, version in each.adapters.items()}
    return {"success": True, "loaded_adapters": loaded, "workers": list(result.by_worker)}
