"""Bodies of SGLang's `/update_weights_from_*`: what they say, and which fields are not served."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.weights import InFlight
from rolloutbus.gateway.exchange import Json
from rolloutbus.gateway.trainer_groups import GROUP, GroupName, Names, Shapes

LOAD_FORMATS = (None, "", "auto", "safetensors")
UPDATE_DEADLINE_S = 600.0
MAX_DEADLINE_S = 86_400.0
UNSERVED: dict[str, str] = {
    "is_async": "the reply comes when the version is committed; leave it out, and wait elsewhere",
    "torch_empty_cache": "engines give no memory back for an update; leave it out",
    "keep_pause": "a pause outlives every update; leave it out, and send /pause_generation first",
    "recapture_cuda_graph": "an update leaves captured graphs as they are; leave it out",
    "token_step": "a version is known by its number; leave it out",
    "manifest": "the files tell what they hold; leave it out",
    "disable_draft_model": "an update is of the policy's model; leave it out",
    "selector": "an update is of the policy's model; leave it out",
    "rid": "an update has no request id; leave it out",
}
"""SGLang's fields that are not served -> why not, and what to do. Empty values ask for nothing."""
PICKLED = (
    "serialized_named_tensors holds pickles, which run code where they are opened, and handles of "
    "memory that only the sender's host has: send the tensors as safetensors "
    "(safetensors.torch.save), as the body with content type application/octet-stream or as "
    "base64 in the field `safetensors`"
)


class UpdateBody(msgspec.Struct, frozen=True, kw_only=True):
    """What all of them say."""

    load_format: str | None = None
    flush_cache: bool = True
    """Requests that run recompute their cache with the new weights; else they keep it."""
    abort_all_requests: bool = False
    """Requests of this gateway end, and answer what they have; others' start again."""
    weight_version: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    """What the trainer calls the version, beside the number that the fleet gives it."""
    allow_zeros: bool = False
    """Tensors may have become all zero."""
    timeout: Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_S)] = UPDATE_DEADLINE_S
    """Seconds for everything."""


class FileBody(UpdateBody, frozen=True, kw_only=True):
    """Of updates that bring all tensors at once."""

    policy: str = "default"


class DiskBody(FileBody, frozen=True, kw_only=True):
    """Body of `/update_weights_from_disk`."""

    model_path: Annotated[str, msgspec.Meta(min_length=1)]
    """Directory below the gateway's weights root."""


class TensorBody(FileBody, frozen=True, kw_only=True):
    """Body of `/update_weights_from_tensor`, where it is JSON."""

    safetensors: bytes
    """In base64."""


class BucketBody(UpdateBody, frozen=True, kw_only=True):
    """Body of `/update_weights_from_distributed`: tensors that rank 0 broadcasts next."""

    names: Names
    dtypes: list[str]
    """torch's names."""
    shapes: Shapes
    group_name: GroupName = GROUP


class DestroyBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/destroy_weights_update_group`."""

    group_name: GroupName = GROUP


def in_flight_of(body: UpdateBody) -> InFlight:
    """What becomes of requests that run."""
    if body.abort_all_requests:
        return "abort"
    return "retract" if body.flush_cache else "keep"


def check_load_format(body: FileBody) -> None:
    """Raises Refused: the tensors are to be of another format than safetensors."""
    if body.load_format not in LOAD_FORMATS:
        message = f"{body.load_format[:64]!r} is not read here; safetensors files are"
        raise Refused(Problem("unsupported", message, "not_started", field="load_format"))


def fields_of_query(query: Mapping[str, str]) -> Json:
    """The fields of a body that stand in a URL.

    Raises:
        Refused: a number is none.
    """
    fields: Json = {}
    for name, value in query.items():
        if name == "timeout":
            try:
                fields[name] = float(value)
            except ValueError as error:
                raise Refused(bad_request(name, f"{value[:32]!r} is no number")) from error
        else:
            fields[name] = {"true": True, "false": False}.get(value, value)
    return fields
