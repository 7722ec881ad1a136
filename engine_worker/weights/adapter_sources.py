"""Where an adapter comes from: a directory that the operator allows, or the weight store."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np

from rolloutbus.bus.paths import below, named_directory
from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.wire.errors import EngineFailed, PeerLost, RemoteProtocolError, SettingsError
from rolloutbus.bus.wire.messages.control import LoadLora
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.weights import PrepareUpdate
from rolloutbus.engine_worker.engine import LoraTensors, TensorSpec
from rolloutbus.engine_worker.weights.buffers import SpareBuffer
from rolloutbus.engine_worker.weights.relay import Relay
from rolloutbus.engine_worker.weights.staged import ask_manifest
from rolloutbus.engine_worker.weights.transports.tcp import Pull

CONFIG = "adapter_config.json"
"""A file in PEFT's layout; in the weight store a tensor of bytes."""
TENSORS = "adapter_model.safetensors"
PICKLES = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})
"""An engine might prefer such a file, and run what is in it."""


def adapter_folder(ask: LoadLora, root: str) -> Path:
    """The directory that was named, in which an adapter lies.

    Raises:
        Refused: the name is none, or there is no such adapter.
        EngineFailed: the operator allows no files.
    """
    if not root:
        message = "This worker reads no files: its operator has set no `weights_root`."
        raise EngineFailed(Problem("unsupported", message, "not_started", field="path"))
    name = below(ask.path, Path(root))
    folder = named_directory(name, Path(root), (CONFIG, TENSORS))
    for each in folder.iterdir():
        if each.suffix in PICKLES:
            raise EngineFailed(bad_request("path", f"{each.name} may hold code; remove it"))
    return folder


async def adapter_in_store(
    ask: LoadLora, policy: str, dialer: Dialer | None, timeout_s: float
) -> LoraTensors:
    """Pull an adapter, as version `ask.version` of the policy `<policy>.<name>`, and verify it.

    Raises:
        EngineFailed: it could not be had, or it is none.
    """
    version = PrepareUpdate(f"{policy}.{ask.name}", ask.version, ask.bulk)
    try:
        # The router asks again, where the store is then; to wait here would keep the next one out.
        link = BulkLink(ask.bulk, dialer, is_patient=False)
        async with asyncio.timeout(timeout_s), link as store:
            manifest = await ask_manifest(store, version)
            held = await Pull(SpareBuffer(), Relay(), dialer).fetch(version, manifest, store)
    except SettingsError as error:
        raise EngineFailed(bad_request("bulk", str(error))) from error
    except TimeoutError as error:
        message = f"adapter {ask.name!r} was not here after {timeout_s:g} s"
        raise EngineFailed(Problem("deadline", message, "failed")) from error
    except PeerLost as error:
        raise EngineFailed(Problem("no_store", str(error), "not_started")) from error
    except RemoteProtocolError as error:
        raise EngineFailed(Problem("internal", str(error), "failed")) from error
    tensors = dict(held.tensors)
    config = tensors.pop(CONFIG, None)
    specs = [
        TensorSpec(each.name, each.dtype, each.shape, each.size_bytes)
        for each in manifest.tensors
        if each.name != CONFIG
    ]
    return LoraTensors(
        _config(b"" if config is None else np.asarray(config).tobytes()), specs, tensors
    )


def _config(raw: bytes) -> dict[str, object]:
    try:
        return msgspec.json.decode(raw, type=dict[str, object])
    except msgspec.DecodeError as error:
        message = f"the version has no tensor {CONFIG!r} with a JSON object in it: {error}"
        raise EngineFailed(bad_request("version", message)) from error
