"""The client of the bus for async programs: rollouts, streams and control of the fleet."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Unpack

from bus.errors import RemoteProtocolError
from bus.messages.generation import Sampling
from trainer_adapter.control import FleetClient
from trainer_adapter.effects import Result
from trainer_adapter.rollout import Delta, Rollout
from trainer_adapter.rollouts import (
    DEFAULT_DEADLINE_S,
    GenerateOptions,
    Prompt,
    ask_of,
    group_asks,
)
from trainer_adapter.settings import ClientSettings


class RolloutClient(FleetClient):
    """Samples with whatever workers are there. An async context manager; see `connect`.

    A request survives the loss of its worker, of its router and of its connection, and ends
    exactly once. Cancelling a waiting call aborts its request.
    """

    async def generate(
        self, prompt: Prompt, sampling: Sampling, **options: Unpack[GenerateOptions]
    ) -> Rollout:
        """Sample one continuation of `prompt`.

        Args:
            prompt: token ids, int32 [n_prompt_tokens], at least one.
            sampling: how tokens are drawn.
            options: deadline, placement and loss policy; see GenerateOptions.

        Raises:
            Refused: nothing was sampled; safe to submit again. StaleVersion if no worker had
                the weights asked for.
            RolloutCancelled: aborted; `.partial` holds what was sampled.
            RequestExpired, DeadlineExceeded: the deadline passed.
            PeerLost: the worker was lost and `on_loss` is `fail`.
            EngineFailed: the engine failed, or crashed three times while this request ran.
        Spec: docs/protocol.md, "Generation".
        """
        ask = ask_of(prompt, sampling, options)
        deadline_s = options.get("deadline_s", DEFAULT_DEADLINE_S)
        return _rollout(await self.connection.ask(ask, deadline_s))

    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        n: int = 1,
        **options: Unpack[GenerateOptions],
    ) -> list[list[Rollout]]:
        """Sample `n` continuations of each prompt: one list per prompt, its group.

        A full router is waited for until the deadline. The first error ends the batch: it is
        raised, and what still runs is aborted.

        Raises:
            As `generate`.
        """
        asks = list(group_asks(prompts, sampling, n, options))
        deadline_s = options.get("deadline_s", DEFAULT_DEADLINE_S)
        rids: list[str] = []
        futures: list[asyncio.Future[Result]] = []
        try:
            for ask in asks:
                rid, future = self.connection.submit(ask, deadline_s)
                rids.append(rid)
                futures.append(future)
            rollouts = [_rollout(result) for result in await asyncio.gather(*futures)]
        finally:
            for rid in rids:
                self.connection.forget(rid)
        return [rollouts[start : start + n] for start in range(0, len(rollouts), n)]

    def stream(
        self, prompt: Prompt, sampling: Sampling, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Delta]:
        """Stream the tokens sampled for `prompt`, in order and without gaps.

        Stops after the delta with a `finish_reason`; any other ending raises. Leaving the
        iterator early aborts the request.

        Raises:
            As `generate`.
        Spec: docs/protocol.md, "Streams".
        """
        ask = ask_of(prompt, sampling, options, stream=True)
        deadline_s = options.get("deadline_s", DEFAULT_DEADLINE_S)
        return self.connection.stream(ask, deadline_s)

    async def abort(self, rids: Iterable[str] | None = None) -> int:
        """Stop requests by rid, or everything that this client samples. Returns how many.

        Each ends by itself, with RolloutCancelled and its partial rollout.
        """
        return self.connection.abort(rids)


def connect(address: str, *, name: str = "") -> RolloutClient:
    """Make a client for the router at `address`; use it with `async with`.

    Args:
        address: endpoint of the router's frontend, e.g. `tcp://127.0.0.1:7777`.
        name: unique among live clients; a random one if empty.
    """
    return RolloutClient(
        ClientSettings(name=name or f"client-{secrets.token_hex(4)}", router=address)
    )


def _rollout(result: Result) -> Rollout:
    if not isinstance(result, Rollout):
        raise RemoteProtocolError(f"generate ended with a {type(result).__name__}")
    return result
