"""Samples of several prompts at once, and whether engines can tell what is asked about them."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from rolloutbus.bus.wire.errors import BusError, RequestError
from rolloutbus.bus.wire.messages.control import ServerFacts
from rolloutbus.bus.wire.messages.generation import SamplingParams, Want
from rolloutbus.trainer_adapter.client.asks import GenerateOptions, ask_of, deadline_of, row_seed
from rolloutbus.trainer_adapter.client.client import RolloutClient, all_ended, row_in
from rolloutbus.trainer_adapter.client.core.results import Rollout

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
"""How long the first requests wait for engines to say what they can tell."""
ASK_AGAIN_S = 10.0
"""Engines come and go."""
T = TypeVar("T")


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
        await all_ended(futures, on_error="raise", on_abort="partial")
    finally:
        for rid in rids:
            connection.forget(rid)
    return [cast("Rollout", row_in(future, "partial")) for future in futures]


def _of_row(sampling: SamplingParams, row: int) -> SamplingParams:
    """As `RolloutClient.generate_batch` has it."""
    if sampling.sampling_seed is None:
        return sampling
    return msgspec.structs.replace(sampling, sampling_seed=row_seed(sampling.sampling_seed, row))


class CachedTokens:
    """Whether engines can tell how much of a prompt they had cached; asked of them now and then."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._can_be_told: bool | None = None
        """None: nobody has been asked."""
        self._asking: asyncio.Task[None] | None = None
        self._ask_at = 0.0
        """Of `time.monotonic`."""

    async def told(self, ask: Callable[[Want], Awaitable[T]]) -> T:
        """Returns what `ask` does, which is given what to want.

        It is asked once more, without, if an engine that came meanwhile refuses to tell them.
        """
        want = Want(cached_tokens=await self._may_be_wanted())
        try:
            return await ask(want)
        except RequestError as error:  # a worker that runs it has a say, too
            if not want.cached_tokens or error.field != "want.cached_tokens":
                raise
        self._can_be_told = False
        return await ask(Want())

    async def _may_be_wanted(self) -> bool:
        if self._asking is None and time.monotonic() >= self._ask_at:
            self._asking = asyncio.create_task(self._ask())
        if self._can_be_told is None and self._asking is not None:
            await asyncio.wait({self._asking})  # all who come before the first answer share it
        return bool(self._can_be_told)

    async def _ask(self) -> None:
        can = False
        try:
            result = await self._client.server_info(deadline_s=FACTS_DEADLINE_S, check=False)
            facts = [each for each in result.by_worker.values() if isinstance(each, ServerFacts)]
            can = bool(facts) and all("cached_tokens" in each.features for each in facts)
        except BusError as error:
            _log.info("engines do not say whether they tell cached tokens: %s", error)
        finally:
            self._can_be_told = can
            self._ask_at = time.monotonic() + ASK_AGAIN_S
            self._asking = None


_log = logging.getLogger(__name__)
