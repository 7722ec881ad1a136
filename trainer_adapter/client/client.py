"""The client of the bus for async programs: rollouts, streams and control of the fleet."""

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path

from rolloutbus.bus.actor.ref import FLEET
from rolloutbus.bus.security.key_files import router_key_beside
from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import Refused, RemoteProtocolError
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import (
    NOTHING_MORE,
    Attach,
    DetachedList,
    DetachedRequest,
    Grammar,
    ListDetached,
    Media,
    Processor,
    Want,
)
from rolloutbus.bus.wire.messages.session import DEFAULT_GRACE_S, DEFAULT_LEASE_S, OpenSession
from rolloutbus.bus.wire.validation import MAX_RID_BYTES
from rolloutbus.trainer_adapter.client.asks import (
    DEFAULT_DEADLINE_S,
    Prompt,
    SamplingLike,
    SessionName,
    VersionsRule,
    ask_of,
    group_asks,
)
from rolloutbus.trainer_adapter.client.core.effects import Result
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.results import MAX_NAMED, Delta, OnLoss, Rollout
from rolloutbus.trainer_adapter.client.core.session_book import HeldSession
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from rolloutbus.trainer_adapter.client.engine_surface import EngineClient
from rolloutbus.trainer_adapter.client.session import Session
from rolloutbus.trainer_adapter.client.weight_queries import (
    ActiveTensor,
    check_weights,
    get_weights,
)
from rolloutbus.trainer_adapter.client.weights_report import WeightsReport

WEIGHTS_DEADLINE_S = 120.0


@strict()
class RolloutClient(EngineClient):
    """Samples with whatever workers are there. An async context manager; see `connect`.

    A request survives the loss of its worker, of its router and of its connection, and ends
    exactly once. Cancelling a waiting call aborts its request, unless that is `detached`.
    """

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingLike,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        session: SessionName = "",
        group: str = "",
        versions: VersionsRule = "any",
        policy: str = "default",
        priority: int = 0,
        on_loss: OnLoss = "resume",
        detached: bool = False,
        lora: str = "",
        want: Want = NOTHING_MORE,
        grammar: Grammar | None = None,
        processors: Sequence[Processor] = (),
        action_mask: Sequence[int] | None = None,
        disallowed_tokens: Sequence[int] | None = None,
        media: Sequence[Media] = (),
    ) -> Rollout:
        """Sample one continuation of `prompt`.

        Args:
            prompt: token ids, int32 [n_prompt_tokens], at least one.
            sampling: how tokens are drawn, or a dict of its fields.
            deadline_s: seconds from now for the whole request, queueing included.
            session: requests of one session stay on one worker.
            group: requests of one group share a worker's prefix cache.
            versions: which weights will do: `any`, `latest`, `min:V`, `exact:V` or
                `max-staleness:K`.
            policy: name of the policy whose weights are asked for.
            priority: higher goes first; -100..100.
            on_loss: when the worker is lost: `resume` goes on after the tokens held, `retry` starts
                again, `fail` raises PeerLost.
            detached: it goes on when this process ends, and is not stopped when its caller stops
                waiting; see `reattach`. Its `group` tells it apart then.
            lora: adapter, `NAME` or `NAME@VERSION`; none if empty. See `load_lora`. `Rollout.lora`
                tells the version. Without one in here nothing is resumed: it starts again, so that
                one version samples all.
            want: what to tell besides tokens and logprobs: it comes in `Rollout.arrays`.
            grammar: the output must match it.
            processors: change logits before sampling, in this order; see
                `trainer_adapter.client.logit_processors`.
            action_mask: token ids: nothing else is sampled. Short for the processor of this name,
                put first.
            disallowed_tokens: token ids that are not sampled. Short for the processor of this name,
                put first.
            media: what the placeholder tokens in the prompt stand for, in their order.

        Raises:
            TypeError: a keyword does not exist.
            Refused: nothing was sampled; safe to submit again. `.field` names a wrong value.
                StaleVersion if no worker had the weights asked for.
            RolloutCancelled: aborted; `.partial` holds what was sampled.
            RequestExpired, DeadlineExceeded: the deadline passed.
            PeerLost: the worker was lost and `on_loss` is `fail`.
            OtherFleet: another fleet answers at the address, and the request names a version of the
                former one or has tokens of it; see `accept_fleet`.
            EngineFailed: the engine failed, or crashed three times while this request ran.
        Spec: docs/protocol.md, "Generation".
        """
        ask = ask_of(
            prompt,
            sampling,
            deadline_s=deadline_s,
            session=session,
            group=group,
            versions=versions,
            policy=policy,
            priority=priority,
            on_loss=on_loss,
            detached=detached,
            lora=lora,
            want=want,
            grammar=grammar,
            processors=processors,
            action_mask=action_mask,
            disallowed_tokens=disallowed_tokens,
            media=media,
        )
        return _rollout(await self.connection.ask(ask, deadline_s))

    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingLike,
        *,
        n: int = 1,
        deadline_s: float = DEFAULT_DEADLINE_S,
        session: SessionName = "",
        group: str = "",
        versions: VersionsRule = "any",
        policy: str = "default",
        priority: int = 0,
        on_loss: OnLoss = "resume",
        detached: bool = False,
        lora: str = "",
        want: Want = NOTHING_MORE,
        grammar: Grammar | None = None,
        processors: Sequence[Processor] = (),
        action_mask: Sequence[int] | None = None,
        disallowed_tokens: Sequence[int] | None = None,
        media: Sequence[Media] = (),
    ) -> list[list[Rollout]]:
        """Sample `n` continuations of each prompt: one list per prompt, its group.

        A full router is waited for until the deadline. The first error ends the batch: it is
        raised, and what still runs is aborted. Without a `group` each prompt is one.
        With a seed, row r of the batch (counted over all prompts and their samples) is drawn with
        `seed + r`: no two rows alike, and the same batch again gives the same.

        Raises:
            As `generate`.
        """
        asks = list(
            group_asks(
                prompts,
                sampling,
                n,
                deadline_s=deadline_s,
                session=session,
                group=group,
                versions=versions,
                policy=policy,
                priority=priority,
                on_loss=on_loss,
                detached=detached,
                lora=lora,
                want=want,
                grammar=grammar,
                processors=processors,
                action_mask=action_mask,
                disallowed_tokens=disallowed_tokens,
                media=media,
            )
        )
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
        self,
        prompt: Prompt,
        sampling: SamplingLike,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        session: SessionName = "",
        group: str = "",
        versions: VersionsRule = "any",
        policy: str = "default",
        priority: int = 0,
        on_loss: OnLoss = "resume",
        detached: bool = False,
        lora: str = "",
        want: Want = NOTHING_MORE,
        grammar: Grammar | None = None,
        processors: Sequence[Processor] = (),
        action_mask: Sequence[int] | None = None,
        disallowed_tokens: Sequence[int] | None = None,
        media: Sequence[Media] = (),
    ) -> AsyncGenerator[Delta]:
        """Stream the tokens sampled for `prompt`, in order and without gaps.

        Stops after the delta with a `finish_reason`; any other ending raises. Leaving the
        iterator early aborts the request.

        Raises:
            As `generate`.
        Spec: docs/protocol.md, "Streams".
        """
        ask = ask_of(
            prompt,
            sampling,
            stream=True,
            deadline_s=deadline_s,
            session=session,
            group=group,
            versions=versions,
            policy=policy,
            priority=priority,
            on_loss=on_loss,
            detached=detached,
            lora=lora,
            want=want,
            grammar=grammar,
            processors=processors,
            action_mask=action_mask,
            disallowed_tokens=disallowed_tokens,
            media=media,
        )
        return self.connection.stream(ask, deadline_s)

    def session(
        self,
        name: str,
        *,
        wait_s: float = 0.0,
        policy: str = "default",
        lease_s: float = DEFAULT_LEASE_S,
        grace_s: float = DEFAULT_GRACE_S,
    ) -> Session:
        """A session, open for the length of an `async with`: one trajectory, one worker.

        Between two turns it keeps its place at its worker, and the next turn goes before what
        waits. If the worker is lost it moves, with its name: see `Session.last_move`. Its turns can
        be appended, sampled, replaced and branched from; see `Session`.

        Args:
            name: unique in the fleet; what its requests carry as `session`.
            wait_s: how long to wait for a place, in seconds.
            policy: whose workers may have it.
            lease_s: its place is kept this many seconds without a request under way.
            grace_s: after a turn, the next one goes first for this many seconds.

        Raises:
            Refused: on entering: all places are taken (`busy`), no worker is live (`not_ready`),
                or the name is another client's (`session_taken`).
        Spec: docs/protocol.md, "Sessions".
        """
        return Session(self, OpenSession(name, policy, lease_s, grace_s), wait_s)

    @property
    def sessions(self) -> Mapping[str, HeldSession]:
        """The sessions that are open, by name: where each is, and how often it moved."""
        return self.connection.sessions

    async def reattach(self, *, deadline_s: float = 0.0) -> list[DetachedRequest]:
        """Name the detached requests of this client's name.

        Those asked for by an earlier process of this name, or given up by this one, may be taken up
        with `collect` or `follow`; what nobody collects is dropped after an hour.
        Those that are `in_doubt` were lost and will run again: collect them all the same.

        Args:
            deadline_s: seconds from now; 0 takes the settings' control deadline.
        Spec: docs/protocol.md, "Detached requests".
        """
        return (await self._to_router(DetachedList, ListDetached(), deadline_s)).requests

    async def collect(self, rid: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Rollout:
        """Wait for the result of a detached request; giving up leaves it where it is.

        Raises:
            As `generate`. Refused with code `unknown_request` if nobody holds it; PeerLost if
            its worker was lost and nobody else has the prompt.
        """
        return _rollout(await self.connection.ask(_attach(rid), deadline_s))

    def follow(self, rid: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> AsyncGenerator[Delta]:
        """Stream a detached request from its first token on; see `stream` and `collect`.

        One that was not asked for as a stream comes in larger portions.
        """
        return self.connection.stream(_attach(rid, is_followed=True), deadline_s)

    async def check_weights(
        self,
        names: Sequence[str] = (),
        *,
        target: str = FLEET,
        deadline_s: float = WEIGHTS_DEADLINE_S,
    ) -> WeightsReport:
        """Compare the active weights of workers by digest: with the store's, and with each other.

        Generation goes on; the engines' steps wait for copies of 8 MiB at a time.

        Args:
            names: tensors; all if empty.
            target: `fleet`, or the name of one worker.
            deadline_s: seconds from now.

        Spec: docs/protocol.md, "Weights".
        """
        return await check_weights(self, names, target, deadline_s)

    async def get_weights(
        self, name: str, worker: str, *, deadline_s: float = WEIGHTS_DEADLINE_S
    ) -> ActiveTensor:
        """The bytes of one tensor as a worker has it active, all of one version.

        Raises:
            RequestError: the worker has no such tensor, or cannot tell.
            PeerLost: the worker was lost.
            TimeoutError: versions changed faster than the tensor could be read.
        """
        return await get_weights(self, name, worker, deadline_s)

    async def abort(self, rids: str | Iterable[str] | None = None) -> int:
        """Stop requests by rid, or everything that this client samples. Returns how many.

        Each ends by itself, with RolloutCancelled and its partial rollout. Those that have ended
        lately count as none.

        Args:
            rids: of one request or of several; None: all that this client samples.

        Raises:
            Refused: code `unknown_request`: some are no requests of this client. The others are
                stopped all the same.
        """
        named = [rids] if isinstance(rids, str) else None if rids is None else list(rids)
        unknown = self.connection.unknown(named or ())
        n_aborted = self.connection.abort(named)
        if unknown:
            shown = ", ".join(repr(rid)[:MAX_RID_BYTES] for rid in unknown[:MAX_NAMED])
            message = (
                f"{len(unknown)} of {len(named or ())} are no requests of this client: {shown}; "
                f"{n_aborted} others are stopped. Take a detached request up first, to stop it"
            )
            raise Refused(Problem("unknown_request", message, "not_started", field="rids"))
        return n_aborted


@strict()
def connect(
    address: str, *, name: str = "", key_file: str | Path = "", fleet: str = ""
) -> RolloutClient:
    """Make a client for the router at `address`; use it with `async with`.

    Args:
        address: endpoint of the router's frontend, e.g. `tcp://127.0.0.1:7777`.
            A guarded router's carries its public key: `tcp://HOST:PORT#KEY`.
        name: unique among live clients; a random one if empty.
        key_file: this client's own key, where the router asks for one. If `router.pub` lies beside
            it, the router may change its key to the one in that file meanwhile.
        fleet: identity of the fleet that is expected there (`client.fleet`); another one ends the
            client with `OtherFleet`. Empty: any.

    Raises:
        SettingsError: the address is not allowed without keys, or the key file cannot be used.
    """
    return RolloutClient(settings_for(address, name, key_file, fleet))


def settings_for(address: str, name: str, key_file: str | Path, fleet: str = "") -> ClientSettings:
    """Settings of a client with a name of its own; with a key it is named after it.

    Raises:
        SettingsError: the address is not allowed without keys, or the key file cannot be used.
    """
    security = None
    if key_file:
        beside = router_key_beside(key_file)
        security = SecuritySettings(key_file=os.fspath(key_file), server_key_file=beside)
    dialer = dialer_of(security)
    unique = f"{dialer.name if dialer else 'client'}-{secrets.token_hex(4)}"
    return ClientSettings(name=name or unique, router=address, fleet=fleet, security=security)


def _attach(rid: str, *, is_followed: bool = False) -> Ask:
    # Without the prompt it cannot be sent again: when it is lost, that is its end.
    return Ask("attach", Attach(), on_loss="fail", rid=rid, is_followed=is_followed)


def _rollout(result: Result) -> Rollout:
    if not isinstance(result, Rollout):
        raise RemoteProtocolError(f"generate ended with a {type(result).__name__}")
    return result
