"""Calls around an update: SGLang's `/update_weight_version`, and miles' begin and end of one."""

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.gateway.exchange import as_json, body_of, converted
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.gateway.sglang.labels import WeightLabels
from rolloutbus.gateway.sglang.replies import telling_success
from rolloutbus.trainer_adapter.client.client import RolloutClient

POLICY = "default"
NOT_BEGUN = "no update was begun: send /begin_weight_update first"
NOTHING_CAME = (
    "no version was committed since /begin_weight_update: some tensors of the model have not come"
)


class NameBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/update_weight_version`."""

    new_version: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    abort_all_requests: bool = True
    """As SGLang has it: of this gateway."""


class BeginBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/begin_weight_update`."""

    selector: Literal["all"] = "all"
    """Of which model's weights; there are no others here."""


class NoBody(msgspec.Struct, frozen=True):
    """Body of `/end_weight_update`: nothing."""


class UpdateStepsApi:
    """Answers through a client of the bus."""

    def __init__(
        self, client: RolloutClient, settings: GatewaySettings, labels: WeightLabels
    ) -> None:
        self._client = client
        self._settings = settings
        self._labels = labels
        self._begun_at: int | None = None
        """The committed version when an update was begun; None: none is under way."""
        self.router = APIRouter()
        for path, answer in (
            ("/update_weight_version", self.name),
            ("/begin_weight_update", self.begin),
            ("/end_weight_update", self.end),
        ):
            self.router.add_api_route(path, telling_success(answer), methods=["POST"])

    async def name(self, request: Request) -> Response:
        """`POST /update_weight_version`: what the trainer calls the committed version."""
        fields = await body_of(request, self._settings.max_body_bytes)
        body = converted(fields, NameBody)
        if body.abort_all_requests:
            await self._client.abort()
        version = await self._committed()
        self._labels.note(POLICY, version, body.new_version)
        message = f"version {version} is called {body.new_version}"
        return as_json({"success": True, "message": message, "new_version": body.new_version})

    async def begin(self, request: Request) -> Response:
        """`POST /begin_weight_update`: remembers what is committed; engines need no preparation."""
        converted(await body_of(request, self._settings.max_body_bytes), BeginBody)
        self._begun_at = await self._committed()
        return as_json({"success": True, "message": f"version {self._begun_at} is active"})

    async def end(self, request: Request) -> Response:
        """`POST /end_weight_update`: refused unless a version was committed since the beginning."""
        converted(await body_of(request, self._settings.max_body_bytes), NoBody)
        begun_at, version = self._begun_at, await self._committed()
        if begun_at is None or version <= begun_at:
            why = NOT_BEGUN if begun_at is None else NOTHING_CAME
            raise Refused(Problem("bad_request", why, "not_started"))
        self._begun_at = None
        return as_json({"success": True, "message": f"version {version} is active"})

    async def _committed(self) -> int:
        return (await self._client.status()).committed.get(POLICY, 0)
