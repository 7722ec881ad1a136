"""SkyRL's weight updates: start, tensors over a group of the trainer's, finish: one version.

The routes are vLLM's. SkyRL's client sends the last three by `/collective_rpc`, as methods of its
own worker class; both ways do the same here.
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.gateway.exchange import (
    BodyTooLarge,
    Json,
    as_json,
    body_of,
    converted,
    while_connected,
)
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.gateway.sglang.replies import refuse_unserved
from rolloutbus.gateway.sglang.update_body import UPDATE_DEADLINE_S
from rolloutbus.gateway.trainer_groups import (
    GROUP,
    GroupBody,
    GroupName,
    Names,
    Seconds,
    Shapes,
    TrainerGroups,
    forms_of,
    reply_of,
)
from rolloutbus.trainer_adapter.joined_group.orders import Bucket, PublishRules

OF_VLLM = (
    "init_info names no backend, so its sender is vLLM's own: NCCLWeightTransferEngine sends by a "
    "communicator that only vLLM's StatelessProcessGroup and pynccl can be a rank of, and "
    "IPCWeightTransferEngine by pickled handles of GPU memory. Neither can be received without "
    "vLLM. Send over a torch.distributed group and say init_info.backend, gloo or nccl; or publish "
    "with a WeightPublisher"
)
PICKLED = (
    "pickled handles of GPU memory run code where they are opened: send over a torch.distributed "
    "group, or publish with a WeightPublisher"
)
PACKED_BYTES = 1 << 30
"""vLLM's: a broadcast ends with the tensor that makes it larger than this."""
RULES = PublishRules("keep")
"""As vLLM: what runs keeps its cache, which `/reset_prefix_cache` forgets."""
Reply = tuple[Json, HTTPStatus]


class StartBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/start_weight_update`."""

    is_checkpoint_format: Literal[True] = True
    """Names and shapes are the checkpoint's; those of vLLM's kernels mean nothing here."""
    policy: str = "default"


class UpdateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`update_info` of `/update_weights`: tensors that rank 0 broadcasts next."""

    names: Names
    dtype_names: list[str]
    """torch's names."""
    shapes: Shapes
    packed: bool = False
    """They come in few broadcasts, as bytes one after another."""
    packed_buffer_size_bytes: Annotated[int, msgspec.Meta(ge=1)] = PACKED_BYTES
    packed_num_buffers: Annotated[int, msgspec.Meta(ge=1)] = 2
    """How many rank 0 fills in turn; nothing to who receives."""
    group_name: GroupName = GROUP
    timeout: Seconds = UPDATE_DEADLINE_S


class FinishBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/finish_weight_update`."""

    policy: str = "default"
    allow_zeros: bool = False
    """Tensors may have become all zero."""
    timeout: Seconds = UPDATE_DEADLINE_S
    """Seconds until all workers have it."""


class SkyRLWeightsApi:
    """Answers the weight updates of SkyRL's remote client."""

    def __init__(self, settings: GatewaySettings, groups: TrainerGroups) -> None:
        self._settings = settings
        self._groups = groups
        self._methods: dict[str, Callable[[Json], Awaitable[Reply]]] = {
            "skyrl_start_weight_update": self.start,
            "update_weights_nccl": self.update,
            "skyrl_finish_weight_update": self.finish,
        }
        self.router = APIRouter()
        for path, work in (
            ("/init_weight_transfer_engine", self.join),
            ("/start_weight_update", self.start),
            ("/update_weights", self.update),
            ("/finish_weight_update", self.finish),
            ("/collective_rpc", self.called),
        ):
            self.router.add_api_route(path, self._answer(work), methods=["POST"])

    async def join(self, fields: Json) -> Reply:
        """`POST /init_weight_transfer_engine`: joins the group that `init_info` names."""
        info = _part(fields, "init_info")
        if "backend" not in info:
            raise Refused(Problem("unsupported", OF_VLLM, "not_started", "init_info.backend"))
        body = converted(info, GroupBody, within="init_info")
        return await self._groups.join(body), HTTPStatus.OK

    async def start(self, fields: Json) -> Reply:
        """`POST /start_weight_update`: tensors are collected from now on."""
        body = converted(fields, StartBody)
        self._groups.incoming.start(body.policy)
        message = "tensors are collected until /finish_weight_update"
        return {"success": True, "message": message}, HTTPStatus.OK

    async def update(self, fields: Json) -> Reply:
        """`POST /update_weights`: takes tensors."""
        incoming = self._groups.incoming
        info: Json | None = None
        try:
            info = _part(fields, "update_info")
            refuse_unserved(info, {"ipc_handles_pickled": PICKLED})
            body = converted(info, UpdateInfo, within="update_info")
            forms = forms_of(
                body.names, body.dtype_names, body.shapes, field="update_info.dtype_names"
            )
            incoming.require_started_over(body.group_name)
        except Refused as error:
            await self._groups.refuse(info, str(error))
            raise
        packed_bytes = body.packed_buffer_size_bytes if body.packed else None
        bucket = Bucket(forms, packed_bytes)
        return reply_of(await incoming.receive(body.group_name, bucket, RULES, body.timeout))

    async def finish(self, fields: Json) -> Reply:
        """`POST /finish_weight_update`: publishes what came, if all came."""
        body = converted(fields, FinishBody)
        rules = RULES._replace(allow_zeros=body.allow_zeros)
        return reply_of(await self._groups.incoming.finish(body.policy, rules, body.timeout))

    async def called(self, fields: Json) -> Reply:
        """`POST /collective_rpc`: the methods of SkyRL's workers that update weights."""
        method = fields.get("method")
        work = self._methods.get(str(method))
        if work is None:
            why = PICKLED if method == "update_weights_ipc" else "there is no engine to call it on"
            there = ", ".join(self._methods)
            message = f"{str(method)[:64]!r} cannot be called: {why}; there are {there}"
            raise Refused(Problem("unsupported", message, "not_started", field="method"))
        try:
            kwargs = _part(fields, "kwargs")
        except Refused as error:
            if work == self.update:
                await self._groups.refuse(None, str(error))
            raise
        told, status = await work(kwargs)
        return {"results": [told]}, status

    def _answer(
        self, work: Callable[[Json], Awaitable[Reply]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            try:
                fields = await body_of(request, self._settings.max_body_bytes)
            except (Refused, BodyTooLarge) as error:
                # Nobody can tell which method it calls: rank 0 may be sending already.
                if work in (self.update, self.called):
                    await self._groups.refuse(None, str(error))
                raise
            return as_json(*await while_connected(request, work(fields)))

        return answered


def _part(fields: Json, name: str) -> dict[str, Any]:
    """An object in a body; empty if it is absent.

    Raises:
        Refused: it is none.
    """
    part = fields.get(name, {})
    if not isinstance(part, dict):
        raise Refused(bad_request(name, "it is an object"))
    return part  # pyright: ignore[reportUnknownVariableType] - JSON's keys are texts
