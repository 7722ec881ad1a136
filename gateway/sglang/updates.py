"""SGLang's `/update_weights_from_*`: new weights for the whole fleet, as one version.

Publishing needs torch, which a gateway that only samples does without: it is imported when the
first update comes.
"""

import asyncio
import os
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from rolloutbus.bus.paths import below
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
    PICKLED,
    UNSERVED,
    DiskBody,
    TensorBody,
    UpdateBody,
    check_load_format,
    fields_of_query,
)
from rolloutbus.trainer_adapter.client.client import RolloutClient

if TYPE_CHECKING:
    from rolloutbus.trainer_adapter.publisher.checkpoint import Checkpoint
    from rolloutbus.trainer_adapter.publisher.transfer import Published

NO_GROUP = (
    "a group of the trainer's own sends one tensor after another and never says which is the last, "
    "so that it cannot be one version for the whole fleet: publish with a WeightPublisher, whose "
    "transport `collective` broadcasts to all workers, or send /update_weights_from_disk"
)
OCTETS = "application/octet-stream"


class UpdatesApi:
    """Publishes through a client of the bus, whose principal must be allowed to."""

    def __init__(
        self, client: RolloutClient, settings: GatewaySettings, labels: WeightLabels
    ) -> None:
        self._client = client
        self._settings = settings
        self._labels = labels
        self.router = APIRouter()
        for path, answer in (
            ("/update_weights_from_disk", self.from_disk),
            ("/update_weights_from_tensor", self.from_tensor),
            ("/init_weights_update_group", self.no_group),
            ("/update_weights_from_distributed", self.no_group),
            ("/destroy_weights_update_group", self.no_group),
        ):
            self.router.add_api_route(path, telling_success(answer), methods=["POST"])

    async def from_disk(self, request: Request) -> Response:
        """`POST /update_weights_from_disk`: publishes a checkpoint that the gateway can read."""
        fields = await body_of(request, self._settings.max_body_bytes)
        body = converted(refuse_unserved(fields, UNSERVED), DiskBody)
        check_load_format(body)
        if not self._settings.weights_root:
            message = (
                "this gateway reads no files: start it with --weights-root DIR, and put "
                "checkpoints below that"
            )
            raise Refused(Problem("unsupported", message, "not_started", field="model_path"))
        root = Path(self._settings.weights_root)
        name = below(body.model_path, root, field="model_path")

        def opened() -> "Checkpoint":
            from rolloutbus.trainer_adapter.publisher.checkpoint import (  # noqa: PLC0415
                checkpoint_below,
            )

            return checkpoint_below(root, name, field="model_path")

        return await self._published(request, body, opened)

    async def from_tensor(self, request: Request) -> Response:
        """`POST /update_weights_from_tensor`: publishes the tensors of a safetensors body."""
        if request.headers.get("content-type", "").partition(";")[0].strip() == OCTETS:
            fields = fields_of_query(request.query_params)
            body = converted(refuse_unserved(fields, UNSERVED), UpdateBody)
            content = await _octets(request, self._settings.max_body_bytes)
        else:
            fields = await body_of(request, self._settings.max_body_bytes)
            if "serialized_named_tensors" in fields:
                field = "serialized_named_tensors"
                raise Refused(Problem("unsupported", PICKLED, "not_started", field=field))
            body = converted(refuse_unserved(fields, UNSERVED), TensorBody)
            content = body.safetensors
        check_load_format(body)

        def opened() -> "Checkpoint":
            from rolloutbus.trainer_adapter.publisher.checkpoint import Checkpoint  # noqa: PLC0415

            with TemporaryFile() as file:
                file.write(content)
                file.flush()
                return Checkpoint([os.dup(file.fileno())], field="safetensors")

        return await self._published(request, body, opened)

    async def no_group(self, request: Request) -> Response:
        """SGLang's updates over a process group of the trainer's: refused, with what to do."""
        del request
        raise Refused(Problem("unsupported", NO_GROUP, "not_started"))

    async def _published(
        self, request: Request, body: UpdateBody, opened: Callable[[], "Checkpoint"]
    ) -> Response:
        checkpoint = await asyncio.to_thread(_with_torch, opened)
        with checkpoint:
            published = await while_connected(request, self._publish(body, checkpoint))
        if body.weight_version is not None:
            self._labels.note(body.policy, published.version, body.weight_version)
        return as_json(*_reply(published))

    async def _publish(self, body: UpdateBody, checkpoint: "Checkpoint") -> "Published":
        from rolloutbus.trainer_adapter.publisher.publisher import (  # noqa: PLC0415 - needs torch
            WeightPublisher,
        )

        if body.abort_all_requests:
            await self._client.abort()
        publisher = WeightPublisher(self._client, body.policy)
        handle = publisher.start(
            checkpoint.tensors(),
            layout=checkpoint.layout,
            require="all",
            in_flight=_in_flight(body),
            allow_zeros=body.allow_zeros,
            deadline_s=body.timeout,
        )
        try:
            return await handle
        except asyncio.CancelledError:
            await handle.cancel()  # the files are read until it has ended
            raise
        finally:
            publisher.forget()


def _in_flight(body: UpdateBody) -> Any:  # noqa: ANN401 - a word of the publisher's
    if body.abort_all_requests:
        return "abort"
    return "retract" if body.flush_cache else "keep"


def _with_torch(opened: Callable[[], "Checkpoint"]) -> "Checkpoint":
    """Raises Refused: torch is not installed here."""
    try:
        return opened()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rolloutbus"):
            raise
        message = f"to publish weights this gateway needs the package {error.name}: install it"
        raise Refused(Problem("unsupported", message, "not_started")) from error


async def _octets(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise BodyTooLarge(limit)
    return bytes(body)


def _reply(published: "Published") -> tuple[Json, HTTPStatus]:
    """Body and status; a worker that has not swapped is named, and gets no requests until then."""
    version = published.version
    told: Json = {"version": version, "workers": sorted(published.stall_ms)}
    if not published.quarantined:
        message = f"version {version} is active on {len(published.stall_ms)} workers"
        return {"success": True, "message": message, **told}, HTTPStatus.OK
    reasons = "; ".join(f"{name}: {why}" for name, why in published.quarantined.items())
    message = (
        f"version {version} is committed, but these workers do not have it yet, and get no "
        f"requests until they do: {reasons}"
    )
    told["quarantined"] = published.quarantined
    return {"success": False, "message": message, **told}, HTTPStatus.INTERNAL_SERVER_ERROR
