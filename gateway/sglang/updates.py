"""SGLang's `/update_weights_from_disk` and `/update_weights_from_tensor`: one version for a fleet.

Publishing needs torch, which a gateway that only samples does without: it is imported when the
first update comes.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import IO, TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from rolloutbus.bus.paths import below
from rolloutbus.bus.weights.manifest import bytes_in
from rolloutbus.bus.weights.tensor_files import LENGTH_BYTES, MAX_HEADER_BYTES
from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.gateway.exchange import (
    BodyTooLarge,
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
    FileBody,
    TensorBody,
    check_load_format,
    fields_of_query,
    in_flight_of,
)
from rolloutbus.gateway.weight_replies import reply_of_published, with_torch
from rolloutbus.trainer_adapter.client.client import RolloutClient

if TYPE_CHECKING:
    from rolloutbus.trainer_adapter.publisher.checkpoint import Checkpoint
    from rolloutbus.trainer_adapter.publisher.transfer import Published

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
        with TemporaryFile() as file:
            if request.headers.get("content-type", "").partition(";")[0].strip() == OCTETS:
                fields = fields_of_query(request.query_params)
                body = converted(refuse_unserved(fields, UNSERVED), FileBody)
                check_load_format(body)
                await _spool(request, file, await self._largest_file(body.policy))
            else:
                fields = await body_of(request, self._settings.max_body_bytes)
                if "serialized_named_tensors" in fields:
                    field = "serialized_named_tensors"
                    raise Refused(Problem("unsupported", PICKLED, "not_started", field=field))
                body = converted(refuse_unserved(fields, UNSERVED), TensorBody)
                check_load_format(body)
                file.write(body.safetensors)
            file.flush()

            def opened() -> "Checkpoint":
                from rolloutbus.trainer_adapter.publisher.checkpoint import (  # noqa: PLC0415
                    Checkpoint,
                )

                return Checkpoint([os.dup(file.fileno())], field="safetensors")

            return await self._published(request, body, opened)

    async def _largest_file(self, policy: str) -> int:
        """Bytes that a file of the policy's whole model may have.

        Raises:
            Refused: no worker tells; or who asks may not publish.
        """
        forms = await self._client.list_weights(policy=policy)
        return sum(map(bytes_in, forms)) + LENGTH_BYTES + MAX_HEADER_BYTES

    async def _published(
        self, request: Request, body: FileBody, opened: Callable[[], "Checkpoint"]
    ) -> Response:
        checkpoint = await asyncio.to_thread(with_torch, opened)
        with checkpoint:
            published = await while_connected(request, self._publish(body, checkpoint))
        if body.weight_version is not None:
            self._labels.note(body.policy, published.version, body.weight_version)
        return as_json(*reply_of_published(published))

    async def _publish(self, body: FileBody, checkpoint: "Checkpoint") -> "Published":
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
            in_flight=in_flight_of(body),
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


async def _spool(request: Request, file: IO[bytes], limit: int) -> None:
    """Write a body to a file as it comes: a piece of it is in memory at a time.

    Raises:
        BodyTooLarge: it has more than `limit` bytes.
        Refused: there is no room for it.
    """
    if int(request.headers.get("content-length", 0)) > limit:  # the server has read it as a number
        raise BodyTooLarge(limit)
    n_bytes = 0
    async for piece in request.stream():
        n_bytes += len(piece)
        if n_bytes > limit:
            raise BodyTooLarge(limit)
        try:
            await asyncio.to_thread(file.write, piece)
        except OSError as error:
            message = f"the gateway has no room for the body in {gettempdir()}: {error.strerror}"
            raise Refused(Problem("store_full", message, "not_started")) from error
