"""Publishing a low-rank adapter: written into the store as a version, then loaded by every worker.

Spec: docs/protocol.md, "More of an engine".
"""

import asyncio
import json
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import torch

from rolloutbus.bus.actor.ref import ROUTER, worker
from rolloutbus.bus.wire.errors import BusError, Refused, SettingsError
from rolloutbus.bus.wire.messages.control import Adapters, FleetStatus, LoadLora, Status
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.trainer_adapter.client.core.results import FleetResult
from rolloutbus.trainer_adapter.publisher.publication import AssignedVersion, Policy, Publication
from rolloutbus.trainer_adapter.publisher.tensor_source import (
    HeldTensors,
    Tensors,
    are_held,
    named_tensors,
    renamed,
    require_tensors,
)
from rolloutbus.trainer_adapter.publisher.transfer import PublishedLora, UpdateOptions

CONFIG = "adapter_config.json"
"""PEFT's description of an adapter: in the store, a tensor of bytes."""
PREFIX = "base_model.model."
MATRIX = 2
"""Dimensions of a factor."""
_FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
"""A factor's name in a state dict; PEFT's models put the adapter's own name before `weight`."""


async def publish_adapter(
    policy: Policy,
    name: str,
    factors: Mapping[str, torch.Tensor],
    config: Mapping[str, object],
    options: UpdateOptions,
) -> PublishedLora:
    """See `WeightPublisher.publish_lora`.

    Args:
        policy: of the model; what its soundness knows of earlier versions is of this adapter.
        name: of the adapter.
        factors: see `factors_of`.
        config: see `config_of`.
        options: the deadline for everything, and whether factors may become all zero.
    """
    described = torch.frombuffer(bytearray(json.dumps(config).encode()), dtype=torch.uint8)
    own_name, own_latest = f"{policy.name}.{name}", deque[AssignedVersion](maxlen=1)
    # Its numbers are its own: the publisher's last version stays the model's.
    stored = replace(policy, name=own_name, dtype=None, offerings={}, latest=own_latest)
    publication = Publication(stored, options)
    async with publication:
        await publication.write(HeldTensors({**factors, CONFIG: described}))
        published = await _load(policy, name, publication)
        publication.keep()
        return published


def factors_of(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The adapter's tensors under the names of PEFT's files; others, of the model, are left out.

    Raises:
        SettingsError: there are none, or only one of a pair; or one is no matrix.
    """
    require_tensors(tensors)
    found: dict[str, torch.Tensor] = {}
    held = tensors if are_held(tensors) else _factors_copied(tensors)
    for name, tensor in named_tensors(held):
        if (parts := _FACTOR.fullmatch(name)) is not None:
            if tensor.dim() != MATRIX:
                shape = tuple(tensor.shape)
                raise SettingsError(f"this is no adapter: factor {name!r} has the shape {shape}")
            found[f"{PREFIX}{parts[1]}.lora_{parts[2]}.weight"] = tensor
    halves = {name for name in found if _other_factor(name) not in found}
    if not found or halves:
        what = f"one factor of a pair is missing: {min(halves)}" if halves else "no factors"
        raise SettingsError(f"this is no adapter: {what}")
    return found


def _factors_copied(tensors: Tensors) -> list[tuple[str, torch.Tensor]]:
    """What an iterator gives may be gone when the next is asked for; factors are small."""
    return [
        (name, each.detach().clone())
        for name, each in renamed(tensors, None)
        if _FACTOR.fullmatch(name) is not None
    ]


def config_of(
    factors: Mapping[str, torch.Tensor], alpha: float, *, use_rslora: bool
) -> dict[str, object]:
    """PEFT's description of these factors.

    Raises:
        SettingsError: their ranks differ.
    """
    ranks = {
        each.shape[0] if ".lora_A." in name else each.shape[-1] for name, each in factors.items()
    }
    if len(ranks) != 1:
        raise SettingsError(f"an adapter has one rank, not {sorted(ranks)}")
    modules = {name.rpartition(".lora_")[0] for name in factors}
    return {
        "peft_type": "LORA",
        "r": ranks.pop(),
        "lora_alpha": alpha,
        "use_rslora": use_rslora,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "bias": "none",
    }


def _other_factor(name: str) -> str:
    if ".lora_A." in name:
        return name.replace(".lora_A.", ".lora_B.")
    return name.replace(".lora_B.", ".lora_A.")


async def _load(policy: Policy, name: str, publication: Publication) -> PublishedLora:
    client, version = policy.client, publication.version
    # As the router knows them now: news of who has joined since may still be on their way.
    fleet = await client.ref(ROUTER).ask_for(FleetStatus, Status(), deadline_s=publication.left_s)
    there = [each.name for each in fleet.workers if each.policy == policy.name]
    if not there:
        message = f"no worker of policy {policy.name!r} is there to load it; start one first"
        raise Refused(Problem("not_ready", message, "not_started"))
    body = LoadLora(name, version, bulk=await publication.bulk())

    async def load(at: str) -> BusError | None:
        try:
            result = await client.ref(worker(at)).ask_for(
                FleetResult, body, deadline_s=publication.left_s
            )
            result.only(Adapters)
        except BusError as error:
            return error
        return None

    errors = await asyncio.gather(*map(load, there))
    problems = {at: error for at, error in zip(there, errors, strict=True) if error is not None}
    if problems and len(problems) == len(there):
        raise problems[there[0]]
    loaded = tuple(at for at in there if at not in problems)
    return PublishedLora(name, version, loaded, problems)
