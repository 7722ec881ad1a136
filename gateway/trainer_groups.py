"""Groups of trainers that a gateway joins: what a body may say of one, and where it may lie.

Receiving needs torch, which a gateway that only samples does without: it is imported when the first
group is joined.
"""

import asyncio
import socket
from collections.abc import Sequence
from http import HTTPStatus
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from rolloutbus.bus.weights.manifest import DTYPES
from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.limits import MAX_DIMENSIONS, MAX_TENSORS, TensorName
from rolloutbus.bus.wire.messages.endings import bad_request
from rolloutbus.bus.wire.messages.weights import TensorForm
from rolloutbus.gateway.exchange import Json
from rolloutbus.gateway.weight_replies import reply_of_published, with_torch
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.joined_group.orders import Invitation

if TYPE_CHECKING:
    from rolloutbus.trainer_adapter.joined_group.incoming import IncomingWeights, Progress

GROUP = "weight_update_group"
"""The name of a group that says none, as SGLang has it."""
GroupName = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
JOIN_DEADLINE_S = 300.0
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
_BY_TORCH_NAME = {each.torch: name for name, each in DTYPES.items() if each.torch}


class GroupBody(msgspec.Struct, frozen=True, kw_only=True):
    """A group of a trainer's, and the fleet's rank in it."""

    master_address: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    """Of rank 0: a name or an IP address."""
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    rank_offset: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    """The fleet is this one rank."""
    world_size: Annotated[int, msgspec.Meta(ge=2, le=1_000_000)]
    group_name: GroupName = GROUP
    backend: Literal["nccl", "gloo"] = "nccl"
    policy: str = "default"
    """Whose weights come over it."""
    timeout: Seconds = JOIN_DEADLINE_S
    """Seconds for all ranks to come."""


Names = Annotated[list[TensorName], msgspec.Meta(min_length=1, max_length=MAX_TENSORS)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Shapes = list[Annotated[list[Size], msgspec.Meta(max_length=MAX_DIMENSIONS)]]


def forms_of(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, field: str
) -> list[TensorForm]:
    """The tensors of a bucket.

    Args:
        names: in the order in which they are sent.
        dtypes: torch's names of their types.
        shapes: one for each.
        field: what a body calls the dtypes.

    Raises:
        Refused: the lists differ in length, or a dtype cannot be published.
    """
    if not len(names) == len(dtypes) == len(shapes):
        counts = f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes"
        raise Refused(bad_request(field, f"one of each for every tensor, not {counts}"))
    for dtype in dtypes:
        if dtype not in _BY_TORCH_NAME:
            known = ", ".join(_BY_TORCH_NAME)
            raise Refused(bad_request(field, f"{dtype[:64]!r} is no dtype here; there are {known}"))
    return [
        TensorForm(name, _BY_TORCH_NAME[dtype], tuple(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


class TrainerGroups:
    """The groups that one API key's trainer has had this gateway join."""

    def __init__(self, client: RolloutClient, *, joins_any_address: bool = False) -> None:
        """Joins nothing yet.

        Args:
            client: publishes what comes.
            joins_any_address: also a group on a public network; else loopback and private ones.
        """
        self._client = client
        self._joins_any_address = joins_any_address
        self._incoming: IncomingWeights | None = None

    @property
    def incoming(self) -> "IncomingWeights":
        """What comes over them.

        Raises:
            Refused: no group was ever joined.
        """
        if self._incoming is None:
            message = "no trainer's group is joined here: begin with that"
            raise Refused(bad_request("group_name", message))
        return self._incoming

    async def join(self, body: GroupBody) -> Json:
        """Become a rank of a group; returns the body of the reply.

        Raises:
            Refused: the address is not allowed, or as `IncomingWeights.join`.
            PeerLost, DeadlineExceeded: the group did not come together.
        """
        if body.rank_offset >= body.world_size:
            message = (
                f"the fleet is one rank, {body.rank_offset}, and ranks of a world of "
                f"{body.world_size} go from 0, the trainer, to {body.world_size - 1}"
            )
            raise Refused(bad_request("rank_offset", message))
        # Asked first: a trainer's command. Who may not publish makes this host connect nowhere.
        forms = await self._client.list_weights(policy=body.policy)
        address = await self._address(body)
        if self._incoming is None:
            made = await asyncio.to_thread(with_torch, self._made)
            self._incoming = self._incoming or made  # another trainer may have joined meanwhile
        invitation = Invitation(
            body.group_name,
            address,
            body.master_port,
            body.rank_offset,
            body.world_size,
            body.backend,
            body.timeout,
        )
        await self._incoming.join(invitation, body.policy, forms)
        message = (
            f"joined group {body.group_name!r} as rank {body.rank_offset} of {body.world_size}; a "
            f"version has {len(forms)} tensors"
        )
        return {"success": True, "message": message, "n_expected": len(forms)}

    async def refuse(self, said: Json | None, why: str) -> None:
        """End the group of a bucket that cannot be received.

        Its rank 0 would wait for somebody to take what it sends.

        Args:
            said: the fields of the bucket, which name the group; None: they cannot be read.
            why: it cannot be received.
        """
        if self._incoming is not None:
            name = str(said.get("group_name", GROUP)) if said is not None else ""
            await self._incoming.refuse(name, why)

    def require_none_open(self) -> None:
        """Raises Refused: `update_in_progress`: an update waits for tensors."""
        if self._incoming is not None:
            self._incoming.require_none_open()

    async def close(self) -> None:
        """Leave all groups."""
        if self._incoming is not None:
            await self._incoming.close()

    def _made(self) -> "IncomingWeights":
        from rolloutbus.trainer_adapter.joined_group.incoming import (  # noqa: PLC0415
            IncomingWeights,
        )

        return IncomingWeights(self._client)

    async def _address(self, body: GroupBody) -> str:
        """The IP address of rank 0.

        Whoever may publish has this host connect there. Without API keys that is whoever reaches
        its loopback address, so that only networks of its own are allowed then.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(
                body.master_address, body.master_port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError) as error:
            message = f"{body.master_address[:100]!r} is not known here: {error}"
            raise Refused(bad_request("master_address", message)) from error
        address = str(found[0][4][0]).partition("%")[0]
        if not (self._joins_any_address or _is_near(address)):
            message = (
                f"{address} is neither a loopback nor a private address, and this gateway asks "
                "nobody for a key: give it --http-keys FILE"
            )
            raise Refused(bad_request("master_address", message))
        return address


def reply_of(progress: "Progress") -> tuple[Json, HTTPStatus]:
    """Body and status of what has become of an update."""
    counts: Json = {"n_tensors": progress.n_in, "n_expected": progress.n_all}
    if progress.published is None:
        message = f"{progress.sentence}; nothing is published yet"
        return {"success": True, "message": message, "version": None, **counts}, HTTPStatus.OK
    told, status = reply_of_published(progress.published)
    return {**told, **counts}, status


def _is_near(address: str) -> bool:
    ip = ip_address(address)
    ip = (ip.ipv4_mapped if ip.version == 6 else None) or ip  # noqa: PLR2004 - of IP
    # Link-local ones are where clouds tell their secrets.
    return ip.is_loopback or (ip.is_private and not ip.is_link_local and not ip.is_unspecified)
