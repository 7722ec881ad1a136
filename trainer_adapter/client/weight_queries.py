"""Asking workers for the weights that they have active: digests of all, or the bytes of one.

Digests are compared with the store's manifest of the version that a worker attests, while the store
keeps it; else with the other workers of that version.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from rolloutbus.bus.actor.ref import FLEET, worker
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import DTYPES, Bytes
from rolloutbus.bus.wire.errors import (
    BusError,
    EngineFailed,
    PeerLost,
    Refused,
    RemoteProtocolError,
)
from rolloutbus.bus.wire.limits import CHUNK_BYTES
from rolloutbus.bus.wire.messages.endings import bad_request
from rolloutbus.bus.wire.messages.weights import (
    CheckedWeights,
    CheckWeights,
    GetWeights,
    GotWeights,
    ListedWeights,
    ListWeights,
    Manifest,
    PullManifest,
    TensorForm,
)
from rolloutbus.trainer_adapter.client.commands import Commands
from rolloutbus.trainer_adapter.client.core.results import FleetResult

N_AT_ONCE = 4
"""Ranges under way."""
STORE_S = 10.0
"""For the store to tell what a version holds; without it workers are compared with each other."""

Digests = Mapping[str, int]
"""Tensor -> xxh3-64 of its bytes."""
Version = tuple[str, int]
"""(policy, version)."""


@dataclass(frozen=True, slots=True)
class WorkerWeights:
    """What one worker holds."""

    policy: str
    version: int
    """That it attests."""
    n_tensors: int
    is_in_store: bool
    """Whether it was compared with the store; otherwise with the other workers."""
    different: list[str]
    """Tensors whose bytes are not those of the version."""
    missing: list[str]
    """Tensors that it should hold and does not."""
    not_finite: Mapping[str, int]
    """Tensor -> how many of its numbers are infinite or NaN."""
    zero: list[str]
    """Tensors of which every byte is 0; they may be meant to be."""
    checksum: str
    """SHA-256, as hex, of all names and digests: equal where the same bytes are active."""

    @property
    def is_ok(self) -> bool:
        """It holds the bytes of its version, and all its numbers are finite."""
        return not (self.different or self.missing or self.not_finite)


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What all workers that were asked hold."""

    by_worker: Mapping[str, WorkerWeights]
    errors: Mapping[str, BusError] = field(default_factory=dict[str, BusError])
    """Worker -> why it could not tell."""
    silent: list[str] = field(default_factory=list[str])
    """Workers that had not answered at the deadline, or were lost."""

    @property
    def is_ok(self) -> bool:
        """Everybody answered, and holds what it says it holds."""
        return not self.errors and not self.silent and all(x.is_ok for x in self.by_worker.values())


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
    commands: Commands, names: Sequence[str], target: str, deadline_s: float
) -> WeightsReport:
    """Have workers digest what they have active, and compare; see `RolloutClient.check_weights`."""
    policies = {each.name: each.policy for each in (await commands.status()).workers}
    ref = commands.ref(FLEET if target == FLEET else worker(target))
    body = CheckWeights(list(names))
    result = await ref.ask_for(FleetResult, body, deadline_s=deadline_s)
    checked = {
        name: (policies.get(name, ""), each)
        for name, each in result.by_worker.items()
        if isinstance(each, CheckedWeights)
    }
    versions = {(policy, each.version) for policy, each in checked.values() if each.version}
    manifests = await _manifests(commands, versions)
    return WeightsReport(compare(checked, manifests, names), result.errors, result.silent)


async def get_weights(
    commands: Commands, name: str, from_worker: str, deadline_s: float, max_rows: int
) -> ActiveTensor:
    """Fetch one tensor in ranges of one version; see `RolloutClient.get_weights`."""
    if max_rows < 0:
        raise Refused(bad_request("max_rows", f"a number of rows is not below 0: {max_rows}"))
    async with asyncio.timeout(deadline_s):
        while True:
            tensor = await _fetched(commands, name, from_worker, deadline_s, max_rows)
            if tensor is not None:
                return tensor


async def list_weights(
    commands: Commands, worker: str, policy: str, deadline_s: float
) -> list[TensorForm]:
    """What a version must hold; see `RolloutClient.list_weights`."""
    listed = await commands.to_one(ListedWeights, ListWeights(), worker, policy, deadline_s)
    for each in listed.tensors:
        if each.dtype not in DTYPES or any(size < 0 for size in each.shape):
            raise RemoteProtocolError(f"list_weights told of {each.dtype} {list(each.shape)}")
    return listed.tensors


async def _fetched(
    commands: Commands, name: str, from_worker: str, deadline_s: float, max_rows: int
) -> ActiveTensor | None:
    """None if another version became active meanwhile."""

    async def ask(offset: int, size_bytes: int) -> GotWeights:
        body = GetWeights(name, offset, size_bytes)
        ref = commands.ref(worker(from_worker))
        result = await ref.ask_for(FleetResult, body, deadline_s=deadline_s)
        got = result.only(GotWeights)
        if (got.offset, len(got.content)) != (offset, size_bytes):
            raise RemoteProtocolError("get_weights was answered with other bytes")
        return got

    first = await ask(0, 0)
    if first.dtype not in DTYPES:
        raise RemoteProtocolError(f"a tensor of the unknown type {first.dtype!r}")
    shape = tuple(first.shape)
    if max_rows and shape:
        shape = (min(max_rows, shape[0]), *shape[1:])
    content = np.empty(prod(shape) * DTYPES[first.dtype].size_bytes, np.uint8)
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
    return ActiveTensor(name, first.version, first.dtype, shape, content)


async def _manifests(commands: Commands, versions: set[Version]) -> dict[Version, Digests]:
    """Of those that the store keeps and tells of in time."""
    found: dict[Version, Digests] = {}
    bulk = commands.connection.upstream.bulk
    if not bulk:
        return found
    try:
        async with asyncio.timeout(STORE_S), BulkLink(bulk, commands.connection.dialer) as store:
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


def compare(
    checked: Mapping[str, tuple[str, CheckedWeights]],
    manifests: Mapping[Version, Digests],
    names: Sequence[str],
) -> dict[str, WorkerWeights]:
    """Judge every worker.

    Args:
        checked: worker -> its policy, and what it answered.
        manifests: of the versions that the store keeps.
        names: the tensors that were asked for; empty: all.
    """
    groups: dict[Version, dict[str, Digests]] = {}
    for name, (policy, body) in checked.items():
        held = {each.name: each.digest for each in body.tensors}
        groups.setdefault((policy, body.version), {})[name] = held
    found: dict[str, WorkerWeights] = {}
    for version, members in groups.items():
        whole = manifests.get(version)
        right = _agreed(members.values()) if whole is None else _only(whole, names)
        for name, held in members.items():
            found[name] = WorkerWeights(
                policy=version[0],
                version=version[1],
                n_tensors=len(held),
                is_in_store=whole is not None,
                different=[each for each in held if right.get(each) != held[each]],
                missing=[each for each in right if each not in held],
                not_finite=_not_finite(checked[name][1]),
                zero=[each.name for each in checked[name][1].tensors if each.is_zero],
                checksum=_checksum(held),
            )
    return found


def _agreed(members: Iterable[Digests]) -> dict[str, int | None]:
    """Returns each tensor's digest in more than half of its holders; None without a majority."""
    votes: dict[str, Counter[int]] = {}
    for held in members:
        for name, digest in held.items():
            votes.setdefault(name, Counter())[digest] += 1
    agreed: dict[str, int | None] = {}
    for name, counted in votes.items():
        [(digest, n_votes)] = counted.most_common(1)
        agreed[name] = digest if 2 * n_votes > counted.total() else None
    return agreed


def _only(whole: Digests, names: Sequence[str]) -> Mapping[str, int | None]:
    return {name: digest for name, digest in whole.items() if not names or name in names}


def _checksum(held: Digests) -> str:
    lines = (f"{name}\0{digest:016x}\n" for name, digest in sorted(held.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _not_finite(body: CheckedWeights) -> dict[str, int]:
    return {each.name: each.n_not_finite for each in body.tensors if each.n_not_finite}
