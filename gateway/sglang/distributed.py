"""SGLang's `/update_weights_from_distributed`: new weights over a group that the trainer made.

To its trainer the fleet is one engine of one rank. Buckets are collected; the one that completes
the model publishes it, as one version for all workers.
"""

from fastapi import APIRouter, Request, Response

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.gateway.exchange import (
    BodyTooLarge,
    Json,
    as_json,
    body_of,
    converted,
    while_connected,
)
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.gateway.sglang.labels import WeightLabels
from rolloutbus.gateway.sglang.replies import refuse_unserved, telling_success
from rolloutbus.gateway.sglang.update_body import (
    UNSERVED,
    BucketBody,
    DestroyBody,
    in_flight_of,
)
from rolloutbus.gateway.trainer_groups import GroupBody, TrainerGroups, forms_of, reply_of
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.joined_group.orders import Bucket, PublishRules

FLATTENED = "flattened_bucket"
"""All tensors of a bucket come in one broadcast, as bytes."""
LOAD_FORMATS = (None, "", "auto", FLATTENED)


class DistributedApi:
    """Answers through a client of the bus, whose principal must be allowed to publish."""

    def __init__(
        self,
        client: RolloutClient,
        settings: GatewaySettings,
        labels: WeightLabels,
        groups: TrainerGroups,
    ) -> None:
        self._client = client
        self._settings = settings
        self._labels = labels
        self._groups = groups
        self.router = APIRouter()
        for path, answer in (
            ("/init_weights_update_group", self.join),
            ("/update_weights_from_distributed", self.receive),
            ("/destroy_weights_update_group", self.leave),
        ):
            self.router.add_api_route(path, telling_success(answer), methods=["POST"])

    async def join(self, request: Request) -> Response:
        """`POST /init_weights_update_group`: answers when all ranks of the group are there."""
        body = converted(await self._fields(request), GroupBody)
        return as_json(await while_connected(request, self._groups.join(body)))

    async def leave(self, request: Request) -> Response:
        """`POST /destroy_weights_update_group`: an update that came over it is given up."""
        body = converted(await self._fields(request), DestroyBody)
        return as_json(
            {"success": True, "message": await self._groups.incoming.leave(body.group_name)}
        )

    async def receive(self, request: Request) -> Response:
        """`POST /update_weights_from_distributed`: takes a bucket; the last one is published."""
        fields: Json | None = None
        try:
            fields = await self._fields(request)
            body = converted(refuse_unserved(fields, UNSERVED), BucketBody)
            bucket, rules = _read(body)
        except (Refused, BodyTooLarge) as error:
            await self._groups.refuse(fields, str(error))
            raise
        incoming = self._groups.incoming
        if body.abort_all_requests:
            await self._client.abort()
        work = incoming.receive(body.group_name, bucket, rules, body.timeout)
        progress = await while_connected(request, work)
        if progress.published is not None and body.weight_version is not None:
            version = progress.published.version
            self._labels.note(progress.policy, version, body.weight_version)
        return as_json(*reply_of(progress))

    async def _fields(self, request: Request) -> Json:
        return await body_of(request, self._settings.max_body_bytes)


def _read(body: BucketBody) -> tuple[Bucket, PublishRules]:
    """Raises Refused: a value is wrong."""
    if body.load_format not in LOAD_FORMATS:
        message = f"{body.load_format[:64]!r} is not received here; {FLATTENED} is, or none"
        raise Refused(Problem("unsupported", message, "not_started", field="load_format"))
    forms = forms_of(body.names, body.dtypes, body.shapes, field="dtypes")
    packed_bytes = 0 if body.load_format == FLATTENED else None
    return Bucket(forms, packed_bytes), PublishRules(in_flight_of(body), body.allow_zeros)
