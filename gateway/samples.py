"""Samples of several prompts at once, and whether engines can tell what is asked about them."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from rolloutbus.bus.wire.messages.control import ServerFacts
from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.trainer_adapter.client.asks import GenerateOptions, ask_of, deadline_of, row_seed
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import Rollout, RolloutCancelled, rollout_in

OPTIONS: Mapping[str, str] = {
    "session_id": "session",
    "policy": "policy",
    "versions": "versions",
    "lora_path": "lora",
    "priority": "priority",
    "timeout": "deadline_s",
}
"""Field of a body -> option of `RolloutClient.generate`."""
FACTS_DEADLINE_S = 3.0
"""How long a request waits for engines to say what they can tell."""
ASK_AGAIN_S = 10.0
"""Where one did not say it: requests within this time do without."""


def options_in(body: msgspec.Struct) -> GenerateOptions:
    """The options that stand in a body; None is as if it were absent."""
    fields = [name for name in body.__struct_fields__ if name in OPTIONS]
    said = {OPTIONS[name]: getattr(body, name) for name in fields}
    present = {name: value for name, value in said.items() if value is not None}
    return cast("GenerateOptions", present)


async def sampled(
    client: RolloutClient,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    n: int,
    options: GenerateOptions,
    on_rids: Callable[[list[str]], None] | None = None,
) -> list[Rollout]:
    """Sample `n` continuations of each prompt, in order; no two draw alike from one seed.

    Args:
        client: connected.
        prompts: token ids, at least one each.
        sampling: how tokens are drawn.
        n: samples of each prompt.
        options: of `RolloutClient.generate`.
        on_rids: called with the bus's names of the requests once all are under way.

    Raises:
        As `RolloutClient.generate`, but for an aborted one; what still runs then is aborted.
    """
    connection = client.connection
    deadline_s = deadline_of(options)
    rids: list[str] = []
    futures: list[asyncio.Future[Any]] = []
    try:
        rows = [tokens for tokens in prompts for _ in range(n)]
        for row, tokens in enumerate(rows):
            ask = ask_of(tokens, _of_row(sampling, row), **options)
            rid, future = connection.submit(ask, deadline_s)
            rids.append(rid)
            futures.append(future)
        if on_rids is not None:
            on_rids(rids)
        waiting = set(futures)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            errors = [error for each in done if (error := _error_of(each)) is not None]
            if errors:
                raise errors[0]
    finally:
        for rid in rids:
            connection.forget(rid)
    return [_rollout_in(future) for future in futures]


def _of_row(sampling: SamplingParams, row: int) -> SamplingParams:
    """As `RolloutClient.generate_batch` has it."""
    if sampling.sampling_seed is None:
        return sampling
    return msgspec.structs.replace(sampling, sampling_seed=row_seed(sampling.sampling_seed, row))


def _error_of(ended: "asyncio.Future[Any]") -> BaseException | None:
    """What is to be raised."""
    error = ended.exception()
    return None if isinstance(error, RolloutCancelled) else error


def _rollout_in(ended: "asyncio.Future[Any]") -> Rollout:
    try:
        return rollout_in(ended.result())
    except RolloutCancelled as error:
        return error.partial


class EngineFeatures:
    """Features that all engines have, as `RolloutClient.server_info` tells them."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._asking = asyncio.Lock()
        self._common: set[str] = set()
        self._good_until = 0.0
        """Of `time.monotonic`; infinite once every engine has answered."""

    async def all_have(self, feature: str) -> bool:
        """Whether each engine that answers has it; False: there is none."""
        if time.monotonic() >= self._good_until:
            async with self._asking:  # whoever comes meanwhile shares the answer
                if time.monotonic() >= self._good_until:
                    await self._ask()
        return feature in self._common

    async def _ask(self) -> None:
        result = await self._client.server_info(deadline_s=FACTS_DEADLINE_S, check=False)
        facts = [each for each in result.by_worker.values() if isinstance(each, ServerFacts)]
        all_named = {name for each in facts for name in each.features}
        self._common = {name for name in all_named if all(name in each.features for each in facts)}
        if result.silent or result.errors:
            self._good_until = time.monotonic() + ASK_AGAIN_S
        elif facts:
            self._good_until = float("inf")
