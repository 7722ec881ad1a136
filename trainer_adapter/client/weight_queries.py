"""Asking workers for the weights that they have active: digests of all, or the bytes of one."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from rolloutbus.bus.actor.ref import FLEET, worker
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import DTYPES, Bytes
from rolloutbus.bus.wire.errors import EngineFailed, PeerLost, RemoteProtocolError
from rolloutbus.bus.wire.limits import CHUNK_BYTES
from rolloutbus.bus.wire.messages.weights import (
    CheckedWeights,
    CheckWeights,
    GetWeights,
    GotWeights,
    Manifest,
    PullManifest,
)
from rolloutbus.trainer_adapter.client.control import FleetClient
from rolloutbus.trainer_adapter.client.core.results import FleetResult
from rolloutbus.trainer_adapter.client.weights_report import (
    Digests,
    Version,
    WeightsReport,
    compare,
)

N_AT_ONCE = 4
"""Ranges under way."""
STORE_S = 10.0
"""For the store to tell what a version holds; without it workers are compared with each other."""


@dataclass(frozen=True, slots=True)
class ActiveTensor:
    """One tensor as a worker had it active."""

    name: str
    version: int
    dtype: str
    """safetensors name."""
    shape: tuple[int, ...]
    content: Bytes
    """uint8 [size_bytes]: its bytes, little-endian, row-major."""

    @property
    def array(self) -> np.ndarray:
        """As numpy has it, [shape]; BF16 is widened to float32, which is exact.

        Raises:
            ValueError: numpy has no such type.
        """
        if self.dtype == "BF16":
            wide = self.content.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape)
        kind = DTYPES[self.dtype].numpy if self.dtype in DTYPES else ""
        if not kind:
            raise ValueError(f"numpy has no type for {self.dtype}; see .content")
        return self.content.view(kind).reshape(self.shape)


async def check_weights(
    client: FleetClient, names: Sequence[str], target: str, deadline_s: float
) -> WeightsReport:
    """Have workers digest what they have active, and compare; see `RolloutClient.check_weights`."""
    policies = {each.name: each.policy for each in (await client.status()).workers}
    ref = client.ref(FLEET if target == FLEET else worker(target))
    body = CheckWeights(list(names))
    result = await ref.ask_for(FleetResult, body, deadline_s=deadline_s)
    checked = {
        name: (policies.get(name, ""), each)
        for name, each in result.by_worker.items()
        if isinstance(each, CheckedWeights)
    }
    versions = {(policy, each.version) for policy, each in checked.values() if each.version}
    manifests = await _manifests(client, versions)
    return WeightsReport(compare(checked, manifests, names), result.errors, result.silent)


async def get_weights(
    client: FleetClient, name: str, from_worker: str, deadline_s: float
) -> ActiveTensor:
    """Fetch one tensor in ranges of one version; see `RolloutClient.get_weights`."""
    async with asyncio.timeout(deadline_s):
        while True:
            tensor = await _fetched(client, name, from_worker, deadline_s)
            if tensor is not None:
                return tensor


async def _fetched(
    client: FleetClient, name: str, from_worker: str, deadline_s: float
) -> ActiveTensor | None:
    """None if another version became active meanwhile."""

    async def ask(offset: int, size_bytes: int) -> GotWeights:
        body = GetWeights(name, offset, size_bytes)
        ref = client.ref(worker(from_worker))
        result = await ref.ask_for(FleetResult, body, deadline_s=deadline_s)
        got = result.only(GotWeights)
        if (got.offset, len(got.content)) != (offset, size_bytes):
            raise RemoteProtocolError("get_weights was answered with other bytes")
        return got

    first = await ask(0, 0)
    if first.dtype not in DTYPES:
        raise RemoteProtocolError(f"a tensor of the unknown type {first.dtype!r}")
    content = np.empty(prod(first.shape) * DTYPES[first.dtype].size_bytes, np.uint8)
    offsets = iter(range(0, len(content), CHUNK_BYTES))
    has_changed = False

    async def lane() -> None:
        nonlocal has_changed
        for offset in offsets:
            got = await ask(offset, min(CHUNK_BYTES, len(content) - offset))
            has_changed = has_changed or got.version != first.version
            if has_changed:
                return
            content[offset : offset + len(got.content)] = np.frombuffer(got.content, np.uint8)

    try:
        async with asyncio.TaskGroup() as lanes:
            for _ in range(N_AT_ONCE):
                lanes.create_task(lane())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if has_changed:
        return None
    return ActiveTensor(name, first.version, first.dtype, tuple(first.shape), content)


async def _manifests(client: FleetClient, versions: set[Version]) -> dict[Version, Digests]:
    """Of those that the store keeps and tells of in time."""
    found: dict[Version, Digests] = {}
    if not client.bulk:
        return found
    try:
        async with asyncio.timeout(STORE_S), BulkLink(client.bulk, client.dialer) as store:
            for policy, version in versions:
                try:
                    answer = await store.ask("pull_manifest", PullManifest(policy, version))
                except EngineFailed:
                    continue  # not kept any more
                if isinstance(answer, Manifest):
                    found[policy, version] = {each.name: each.digest for each in answer.tensors}
    except (TimeoutError, PeerLost):
        pass
    return found
