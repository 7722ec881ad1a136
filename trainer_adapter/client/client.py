"""The client of the bus for async programs: rollouts, streams and control of the fleet."""

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, TypedDict, Unpack, overload

import numpy as np

from rolloutbus.bus.actor.loop import Clock
from rolloutbus.bus.actor.ref import FLEET, ROUTER
from rolloutbus.bus.security.key_files import for_other_process, router_key_beside
from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.security.zmq_curve import Dialer, dialer_of
from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import (
    BusError,
    MailboxFull,
    OtherFleet,
    Refused,
    cannot_be_pickled,
)
from rolloutbus.bus.wire.messages.control import (
    DEVICE,
    CacheTier,
    Embed,
    Embedded,
    FleetStatus,
    FlushCache,
    GetLoad,
    LoadLora,
    MemoryTag,
    Pause,
    PauseMode,
    Rerank,
    Reranked,
    Resume,
    Saved,
    SaveKind,
    SaveWeights,
    Score,
    Scored,
    ServerInfo,
    Shutdown,
    Sleep,
    StartProfile,
    StopProfile,
    UnloadLora,
    WakeUp,
)
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import (
    DEFAULT_GRACE_S,
    DEFAULT_LEASE_S,
    Aborted,
    AbortPolicy,
    Attach,
    DetachedList,
    DetachedRequest,
    ListDetached,
    OpenSession,
)
from rolloutbus.bus.wire.messages.weights import TensorForm
from rolloutbus.bus.wire.validation import MAX_RID_BYTES
from rolloutbus.trainer_adapter.client.asks import (
    DEFAULT_DEADLINE_S,
    BatchOptions,
    GenerateOptions,
    Prompt,
    SamplingLike,
    ask_of,
    batch_prompts,
    deadline_of,
    tokens_of,
)
from rolloutbus.trainer_adapter.client.commands import ALL_TAGS, Commands, FleetRef
from rolloutbus.trainer_adapter.client.connection import Connection, FleetListener, Ports
from rolloutbus.trainer_adapter.client.core.effects import FleetChanged, Result
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.results import (
    MAX_NAMED,
    Delta,
    Embeddings,
    FleetResult,
    Float32s,
    Rollout,
    RolloutCancelled,
    Scores,
    rollout_in,
    table_of,
    vector_of,
)
from rolloutbus.trainer_adapter.client.core.session_book import HeldSession
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from rolloutbus.trainer_adapter.client.fixed_facts import FactsBook, FixedFacts
from rolloutbus.trainer_adapter.client.session import Session
from rolloutbus.trainer_adapter.client.weight_queries import (
    ActiveTensor,
    WeightsReport,
    check_weights,
    get_weights,
    list_weights,
)

WEIGHTS_DEADLINE_S = 120.0
LONG_S = 300.0
"""Deadline of commands that move weights or files, unless the caller names one."""

BATCH_PART = 512
"""Requests of a batch that are made in one go."""

ANOTHER = "its `connect_options`, and there call connect(**options) or connect_sync(**options)"
"""What to pass to another process in the place of a client."""

OnError = Literal["raise", "return"]
OnAbort = Literal["raise", "partial"]
ProfileActivity = Literal["CPU", "GPU"]


class ConnectOptions(TypedDict):
    """Arguments of `connect` and `connect_sync`."""

    address: str
    key_file: str
    fleet: str


@strict(options=ask_of)
class RolloutClient:
    """Samples on the fleet's workers and sends them commands. An async context manager.

    A request survives the loss of its worker, of its router and of its connection, and ends
    exactly once. Cancelling a waiting call aborts its request, unless that is `detached`.

    Commands to workers have a `target`: `fleet` or the name of one worker. Deadlines are seconds
    from now for the whole command; 0 takes the settings' control deadline. A command that some
    target did not do raises FleetCommandFailed, which says who and why, and one that reached no
    worker at all Refused, code `not_ready`; with `check=False` it returns: errors then stand in the
    result under the workers' names. `pause` and `resume` are kept for workers that join later. A
    launched or lately lost worker that is away while the fleet gets another command that changes
    workers (`sleep`, `flush_cache`) stands in `silent`. A command to one worker that its engine
    cannot do raises EngineFailed, code `unsupported`.
    """

    def __init__(
        self, settings: ClientSettings, ports: Ports | None = None, clock: Clock | None = None
    ) -> None:
        self.connection = Connection(settings, ports, clock)
        self._commands = Commands(self.connection)
        self._facts = FactsBook(self._commands)

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(self, ANOTHER)

    @property
    def connect_options(self) -> ConnectOptions:
        """What another process needs for a client of the same fleet, with a name of its own.

        Plain texts, for a process pool of this machine: `connect(**options)` or
        `connect_sync(**options)` there. If another fleet is at the address then, it says so.
        On other machines there is no such key file: see `Fleet.ticket`.
        """
        settings = self.connection.settings
        key_file = settings.security.key_file if settings.security else ""
        return {
            "address": settings.router,
            "key_file": for_other_process(key_file) if key_file else "",
            "fleet": self.fleet or settings.fleet,
        }

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> Self:
        """Connects without `async with`; call `close` at the end.

        Raises:
            PeerLost: no router answered in time.
            LocalProtocolError: it is open, or was closed: a client opens once.
        """
        await self.connection.open()
        return self

    async def close(self) -> None:
        """Closes the client: stops open requests; their callers get ActorStopped. Idempotent."""
        self.connection.close()

    @property
    def fleet(self) -> str:
        """Identity of the fleet, e.g. for `connect(fleet=…)`; empty until the router reports it."""
        return self.connection.fleet

    @property
    def other_fleet(self) -> FleetChanged | None:
        """(former, fleet) while a fleet answers that is not accepted; see `accept_fleet`."""
        return self.connection.other_fleet

    def on_other_fleet(self, listener: FleetListener) -> None:
        """Call `listener` with (former, fleet) whenever another fleet answers at the address.

        It is called on the client's event loop; `other_fleet` says the same.
        """
        self.connection.fleet_listeners.append(listener)

    def accept_fleet(self) -> None:
        """Go on with the other fleet that answers: version numbers are its own from now on.

        Until then requests that name a version or a tag (`min:V`, `exact:V`, `min-tag:T`,
        `max-staleness:K`, and a publisher's `restore` and `outcome`) raise OtherFleet; others are
        served. No change: no effect.
        """
        self.connection.accept_fleet()

    @property
    def bulk(self) -> str:
        """Endpoint where the weight store serves bytes; empty while none is connected."""
        return self.connection.upstream.bulk

    @property
    def dialer(self) -> Dialer | None:
        """The keys it connects with, if any."""
        return self.connection.dialer

    def ref(self, address: str = ROUTER) -> FleetRef:
        """What to `tell`, `ask` and `stream` at this address.

        Args:
            address: `fleet`, `store`, `worker:NAME`; empty for the router itself. Commands to
                members are answered with a FleetResult, others with their typed result.
        """
        return self._commands.ref(address)

    async def generate(
        self, prompt: Prompt, sampling: SamplingLike, **options: Unpack[GenerateOptions]
    ) -> Rollout:
        """Sample one continuation of `prompt`.

        Args:
            prompt: token ids, int32 [n_prompt_tokens], at least one.
            sampling: how tokens are drawn, or a dict of its fields.
            deadline_s: seconds from now for the whole request, queueing included.
            session: requests of one session stay on one worker.
            group: requests of one group share a worker's prefix cache.
            versions: which weights will do: `any`, `latest`, `min:V`, `exact:V`,
                `max-staleness:K`, or `min-tag:T`: those that were published with `tag=T`, or newer
                ones.
            policy: name of the policy whose weights are asked for.
            worker: name of the only worker that may sample it; any if empty. The request waits for
                it until the deadline, as for a version that no worker has yet; also for one that
                was lost and is expected back. Any other one is refused, code `unknown_worker`. Not
                beside a `session`, which has a worker.
            max_prompt_tokens: a longer prompt is refused or cut, as `truncate` says; 0: only the
                engines' context is a limit.
            truncate: `refuse`; `left` drops the first tokens of a prompt that is too long, `right`
                the last ones: `Rollout.n_prompt_dropped` says how many. Not beside a `session`,
                `detached` or `media`.
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
        ask = ask_of(prompt, sampling, **options)
        return rollout_in(await self.connection.ask(ask, deadline_of(options)))

    @overload
    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingLike | Sequence[SamplingLike],
        *,
        n: int = 1,
        seed: int | Sequence[int] | None = None,
        on_error: Literal["raise"] = "raise",
        on_abort: OnAbort = "raise",
        **options: Unpack[BatchOptions],
    ) -> list[list[Rollout]]: ...
    @overload
    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingLike | Sequence[SamplingLike],
        *,
        n: int = 1,
        seed: int | Sequence[int] | None = None,
        on_error: Literal["return"],
        on_abort: OnAbort = "raise",
        **options: Unpack[BatchOptions],
    ) -> list[list[Rollout | BusError]]: ...
    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingLike | Sequence[SamplingLike],
        *,
        n: int = 1,
        seed: int | Sequence[int] | None = None,
        on_error: OnError = "raise",
        on_abort: OnAbort = "raise",
        **options: Unpack[BatchOptions],
    ) -> list[list[Rollout]] | list[list[Rollout | BusError]]:
        """Sample `n` continuations of each prompt: one list per prompt, its group.

        A full router is waited for until the deadline. Without a `group` each prompt is one.
        `sampling`, `seed`, `session` and `media` are one value for all, or a list with one per
        prompt: of `media`, a list of lists.

        Args:
            prompts: token ids, int32 [n_prompt_tokens] each.
            sampling: how tokens are drawn.
            n: samples of each prompt. All of them are in the session of their prompt.
            seed: row r of the batch, counted over all prompts and their samples, is drawn with
                `seed + r`: no two rows alike, and the same batch again gives the same. Of a list,
                sample i of a prompt is drawn with the prompt's own seed + i. A `sampling_seed` in
                `sampling` means the same.
            on_error: `raise`: the first error ends the batch: it is raised, and what still runs is
                aborted. `return`: each row is its Rollout, or its own error: no row suffers from
                another one. What concerns all of them (a list of a wrong length, a client that is
                closed) is raised all the same.
            on_abort: `raise`: an aborted row has an error, as any other. `partial`: it is the
                Rollout of what was sampled, its `finish_reason` being `abort`.
            **options: as of `generate`.

        Raises:
            BusError: as `generate`.
        """
        max_open = self.connection.settings.max_open
        if len(prompts) * n > max_open:  # before anything is made of them
            message = (
                f"{len(prompts)} x {n} samples are more than {max_open}; ask for fewer at once"
            )
            raise Refused(bad_request("n", message))
        asks: list[Ask | BusError] = []
        for each in batch_prompts(prompts, sampling, n, seed, **options):
            try:
                asks += each.asks(n)
            except Refused as error:
                if on_error == "raise":
                    raise
                asks += [error] * n
            if len(asks) % BATCH_PART < n:
                await asyncio.sleep(0)  # others want the loop, too
        rows = await self._rows(asks, deadline_of(options), on_error, on_abort)
        return [rows[start : start + n] for start in range(0, len(rows), n)]

    def stream(
        self, prompt: Prompt, sampling: SamplingLike, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Delta]:
        """Stream the tokens sampled for `prompt`, in order and without gaps.

        Stops after the delta with a `finish_reason`; any other ending raises. Leaving the
        iterator early aborts the request.

        Raises:
            BusError: as `generate`.
        Spec: docs/protocol.md, "Streams".
        """
        ask = ask_of(prompt, sampling, stream=True, **options)
        return self.connection.stream(ask, deadline_of(options))

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
        return Session(self.connection, OpenSession(name, policy, lease_s, grace_s), wait_s)

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
        return (await self._commands.to_router(DetachedList, ListDetached(), deadline_s)).requests

    async def collect(self, rid: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Rollout:
        """Wait for the result of a detached request; giving up leaves it where it is.

        Raises:
            Refused: nobody holds it; code `unknown_request`.
            PeerLost: its worker was lost and nobody else has the prompt.
            BusError: anything else, as `generate`.
        """
        return rollout_in(await self.connection.ask(_attach(rid), deadline_s))

    def follow(self, rid: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> AsyncGenerator[Delta]:
        """Streams a detached request from its first token on; see `stream` and `collect`.

        One that was not asked for as a stream comes in larger portions.
        """
        return self.connection.stream(_attach(rid, is_followed=True), deadline_s)

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

    async def abort_policy(self, policy: str = "default", *, deadline_s: float = 0.0) -> int:
        """Stop the requests of all clients for a policy. Returns how many the router knew.

        Each ends by itself, with RolloutCancelled and its partial rollout, as if its own client had
        aborted it; also what clients hold back to send it again. Sessions stay open. With keys it
        takes a trainer's or an admin's.

        Args:
            policy: whose requests.
            deadline_s: seconds from now; 0 takes the settings' control deadline.

        Raises:
            Refused: code `forbidden`: the key of this client may not; `unknown_policy`: no worker
                serves it, and no request is for it.
        Spec: docs/protocol.md, "Generation".
        """
        body = AbortPolicy(policy)
        return (await self._commands.to_router(Aborted, body, deadline_s)).n_aborted

    async def pause(
        self,
        mode: PauseMode = "in_place",
        *,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Stop sampling between two engine steps; requests wait until `resume`.

        `in_place` keeps the KV cache, `retract` drops and recomputes it, `drain` lets running
        requests finish first, `abort` stops them (this client's are resumed later by itself).
        """
        return await self._commands.to_workers(Pause(mode), target, deadline_s, check=check)

    async def resume(
        self, *, target: str = FLEET, deadline_s: float = 0.0, check: bool = True
    ) -> FleetResult:
        """Go on after a pause."""
        return await self._commands.to_workers(Resume(), target, deadline_s, check=check)

    async def sleep(
        self,
        tags: Sequence[MemoryTag] | None = None,
        *,
        abort_first: bool = False,
        drain: bool = False,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Release engine memory. Results are `Memory`, in bytes. A busy worker refuses: `busy`.

        Requests that come meanwhile wait for `wake_up`.

        Args:
            tags: `weights`, `kv_cache`, `cuda_graph`; None: all. See `rolloutbus.types.MemoryTag`.
            abort_first: stop what runs first. Clients have it go on after `wake_up`, with the
                tokens that it has, wherever the request was not aborted by its caller.
            drain: let what runs end first, which may take long. Where it has not ended by the
                deadline the worker stays awake, and its error says so.
            target: `fleet`, or the name of one worker.
            deadline_s: for all of it, seconds from now; 0 takes the settings' control deadline.
            check: False: errors stand in the result, see `RolloutClient`.

        Raises:
            Refused: `tags` is empty, or both `abort_first` and `drain` are set.
        """
        body = Sleep(_tags_of(tags))
        if abort_first and drain:
            message = "with abort_first nothing is left to drain: choose one of the two"
            raise Refused(bad_request("drain", message))
        if not (abort_first or drain):
            return await self._commands.to_workers(body, target, deadline_s, check=check)
        mode = "abort" if abort_first else "drain"
        return await self._commands.emptied(body, target, deadline_s, mode=mode, check=check)

    async def wake_up(
        self,
        tags: Sequence[MemoryTag] | None = None,
        *,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Take released memory back; None: all. Results are `Memory`, in bytes."""
        body = WakeUp(_tags_of(tags))
        return await self._commands.to_workers(body, target, deadline_s, check=check)

    async def flush_cache(
        self,
        tiers: Sequence[CacheTier] = (DEVICE,),
        *,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Forget cached prefixes that no request uses. Results are `Flushed`, in tokens.

        Tiers: `device`, and where an engine has them `host` and `storage`.
        """
        return await self._commands.to_workers(
            FlushCache(list(tiers)), target, deadline_s, check=check
        )

    async def reset_prefix_cache(
        self,
        *,
        reset_running_requests: bool = False,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Forget cached prefixes on the device. Results are `Flushed`, in tokens.

        With `reset_running_requests` those that run lose theirs, too: they are stopped, and their
        clients have them go on with the tokens that they had.
        """
        if reset_running_requests:
            return await self._commands.emptied(
                FlushCache([DEVICE]), target, deadline_s, mode="abort", check=check
            )
        return await self.flush_cache(target=target, deadline_s=deadline_s, check=check)

    async def server_info(
        self, *, target: str = FLEET, deadline_s: float = 0.0, check: bool = True
    ) -> FleetResult:
        """Facts and counters of engines. Results are `ServerFacts`."""
        return await self._commands.to_workers(ServerInfo(), target, deadline_s, check=check)

    async def facts(
        self, worker: str = "", *, policy: str = "default", deadline_s: float = 0.0
    ) -> FixedFacts:
        """What does not change about the engines: context length, parallelism, features.

        Each worker is asked once in its life; then the answer comes from memory.

        Args:
            worker: its name; empty: all workers of the policy, which must be alike.
            policy: whose workers, where none is named.
            deadline_s: seconds from now; 0 takes the settings' control deadline.

        Raises:
            Refused: code `unknown_worker`: no worker of that name is there; `not_ready`: none
                of the policy is.
            SettingsError: the workers of the policy differ; it says in what.
        """
        return await self._facts.of(worker, policy, deadline_s)

    async def shutdown_worker(
        self,
        worker: str,
        *,
        drain: bool = True,
        comes_back: bool = False,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Make one worker leave; one that is away is not expected back any more.

        Args:
            worker: its name.
            drain: it finishes what it runs first, which may take longer than the deadline: it
                drains all the same.
            comes_back: you start it again: what names it waits meanwhile, and is not refused.
            deadline_s: seconds from now; 0 takes the settings' control deadline.
            check: False: errors stand in the result, see `RolloutClient`.
        """
        body = Shutdown(drain, comes_back)
        return await self._commands.to_workers(body, worker, deadline_s, check=check)

    async def status(self, *, deadline_s: float = 0.0) -> FleetStatus:
        """The router's table: workers, versions, queue."""
        return await self._commands.status(deadline_s)

    async def get_load(
        self, *, target: str = FLEET, deadline_s: float = 0.0, check: bool = True
    ) -> FleetResult:
        """Gauges of engines, by the engines' own names. Results are `Load`."""
        return await self._commands.to_workers(GetLoad(), target, deadline_s, check=check)

    async def start_profile(
        self,
        *,
        n_steps: int = 0,
        activities: Sequence[ProfileActivity] = ("CPU", "GPU"),
        with_stack: bool = False,
        record_shapes: bool = False,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Have engines record what they do. Results are `Done`.

        Args:
            n_steps: stop by itself after so many engine steps; 0: at `stop_profile`.
            activities: what is recorded: `CPU`, `GPU` or both.
            with_stack: also where in the program.
            record_shapes: also the shapes of tensors.
            target: `fleet`, or the name of one worker.
            deadline_s: seconds from now; 0 takes the settings' control deadline.
            check: False: errors stand in the result, see `RolloutClient`.
        """
        body = StartProfile(n_steps, list(activities), with_stack, record_shapes)
        return await self._commands.to_workers(body, target, deadline_s, check=check)

    async def stop_profile(
        self, *, target: str = FLEET, deadline_s: float = LONG_S, check: bool = True
    ) -> FleetResult:
        """Have engines write the profile. Results are `Profiled`: files below `profile_dir`."""
        return await self._commands.to_workers(StopProfile(), target, deadline_s, check=check)

    async def score(
        self,
        query: Sequence[int],
        items: Sequence[Prompt],
        label_token_ids: Sequence[int] = (),
        *,
        apply_softmax: bool = True,
        item_first: bool = False,
        worker: str = "",
        policy: str = "default",
        deadline_s: float = 0.0,
    ) -> Scores:
        """How likely each label token follows the query and each item.

        Args:
            query: token ids, may be empty.
            items: token ids, int32 [m] each.
            label_token_ids: none for models that classify.
            apply_softmax: probabilities over the labels alone. Else logprobs over the whole
                vocabulary, or logits of a model's classes.
            item_first: the item stands before the query.
            worker: name of a worker; if empty, the ready workers of `policy` take turns.
            policy: whose weights read them.
            deadline_s: seconds from now; 0 takes the settings' control deadline.
        """
        body = Score(
            query=tokens_of(query).tobytes() if len(query) else b"",
            items=[tokens_of(each).tobytes() for each in items],
            label_token_ids=list(label_token_ids),
            apply_softmax=apply_softmax,
            item_first=item_first,
        )
        scored = await self._commands.to_one(Scored, body, worker, policy, deadline_s)
        return Scores(table_of(scored.scores), scored.n_prompt_tokens)

    async def embed(
        self,
        inputs: Sequence[Prompt],
        *,
        dimensions: int = 0,
        worker: str = "",
        policy: str = "default",
        deadline_s: float = 0.0,
    ) -> Embeddings:
        """One vector for each input, cut to `dimensions` unless that is 0.

        Args:
            inputs: token ids, int32 [m] each.
            dimensions: numbers of a vector that are told; 0: all.
            worker: name of a worker; if empty, the ready workers of `policy` take turns.
            policy: whose weights read them.
            deadline_s: seconds from now; 0 takes the settings' control deadline.
        """
        body = Embed([tokens_of(each).tobytes() for each in inputs], dimensions)
        embedded = await self._commands.to_one(Embedded, body, worker, policy, deadline_s)
        return Embeddings(table_of(embedded.embeddings), embedded.n_prompt_tokens)

    async def compute_similarity(
        self,
        first: Prompt,
        second: Prompt,
        *,
        dimensions: int = 0,
        worker: str = "",
        policy: str = "default",
        deadline_s: float = 0.0,
    ) -> float:
        """Cosine of the vectors of two inputs, -1 to 1; 0 if one of them is zero.

        Of their first `dimensions` numbers only, unless that is 0. The rest as of `embed`.
        """
        read = await self.embed(
            [first, second],
            dimensions=dimensions,
            worker=worker,
            policy=policy,
            deadline_s=deadline_s,
        )
        rows = read.rows.astype(np.float64)
        lengths = np.linalg.norm(rows, axis=1)
        return float(rows[0] @ rows[1] / lengths.prod()) if lengths.all() else 0.0

    async def rerank(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        worker: str = "",
        policy: str = "default",
        deadline_s: float = 0.0,
    ) -> Float32s:
        """How well the text of each (query, text) fits, float32 [pairs]; higher is better.

        `worker`, `policy` and `deadline_s` as of `embed`.
        """
        reranked = await self._commands.to_one(
            Reranked, Rerank(list(pairs)), worker, policy, deadline_s
        )
        return vector_of(reranked.scores)

    async def load_lora(
        self,
        name: str,
        version: int = 0,
        *,
        path: str = "",
        target: str = FLEET,
        deadline_s: float = LONG_S,
        check: bool = True,
    ) -> FleetResult:
        """Load an adapter, for requests with `lora=name`. Results are `Adapters`.

        Args:
            name: of the adapter.
            version: with a path, what it is to be called; else that of the policy
                `<policy>.<name>` in the weight store.
            path: directory of a PEFT adapter below the workers' `weights_root`, absolute or
                relative to it.
            target: `fleet`, or the name of one worker.
            deadline_s: seconds from now.
            check: raise if a target did not do it.
        """
        body = LoadLora(name, version, path, "" if path else self.bulk)
        return await self._commands.to_workers(body, target, deadline_s, check=check)

    async def unload_lora(
        self, name: str, *, target: str = FLEET, deadline_s: float = 0.0, check: bool = True
    ) -> FleetResult:
        """Forget an adapter. Results are `Adapters`."""
        return await self._commands.to_workers(UnloadLora(name), target, deadline_s, check=check)

    async def save_weights(
        self,
        place: str,
        name: str,
        *,
        worker: str,
        kind: SaveKind = "safetensors",
        deadline_s: float = LONG_S,
    ) -> Saved:
        """Have a worker write its active weights.

        Args:
            place: a name that its operator has given to a directory or an address.
            name: of a directory there, which must not hold anything yet.
            worker: whose weights.
            kind: `safetensors` whole tensors, `sharded` as they lie on the ranks, `remote` to an
                address.
            deadline_s: seconds from now.

        Raises:
            EngineFailed: nothing was written; or code `engine_died`: perhaps some of it was.
        """
        result = await self._commands.to_workers(
            SaveWeights(place, name, kind), worker, deadline_s, check=False
        )
        return result.only(Saved)

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
        return await check_weights(self._commands, names, target, deadline_s)

    async def get_weights(
        self,
        name: str,
        worker: str,
        *,
        max_rows: int = 0,
        deadline_s: float = WEIGHTS_DEADLINE_S,
    ) -> ActiveTensor:
        """The bytes of one tensor as a worker has it active, all of one version.

        Args:
            name: of the tensor.
            worker: its name.
            max_rows: fetch so many of its first rows, along its first dimension; 0: all of it.
            deadline_s: seconds from now.

        Raises:
            RequestError: the worker has no such tensor, or cannot tell.
            PeerLost: the worker was lost.
            TimeoutError: versions changed faster than the tensor could be read.
        """
        return await get_weights(self._commands, name, worker, deadline_s, max_rows)

    async def _rows(
        self,
        asks: Sequence[Ask | BusError],
        deadline_s: float,
        on_error: OnError,
        on_abort: OnAbort,
    ) -> list[Any]:
        """The rollout of each ask, or its error; see `generate_batch`."""
        connection = self.connection
        rids: list[str] = []
        rows: list[asyncio.Future[Result] | BusError] = []
        try:
            for ask in asks:
                if len(rows) % BATCH_PART == BATCH_PART - 1:
                    await asyncio.sleep(0)
                if isinstance(ask, BusError):
                    rows.append(ask)
                    continue
                try:
                    rid, future = connection.submit(ask, deadline_s)
                except (Refused, MailboxFull, OtherFleet) as error:
                    if on_error == "raise":
                        raise
                    rows.append(error)
                else:
                    rids.append(rid)
                    rows.append(future)
            futures = [each for each in rows if isinstance(each, asyncio.Future)]
            await all_ended(futures, on_error=on_error, on_abort=on_abort)
        finally:
            for rid in rids:
                connection.forget(rid)
        return [row_in(each, on_abort) for each in rows]

    async def list_weights(
        self, worker: str = "", *, policy: str = "default", deadline_s: float = 0.0
    ) -> list[TensorForm]:
        """The name, dtype and shape of each tensor that a version must hold, tied ones once.

        Args:
            worker: who is asked; empty: the policy's ready workers take turns.
            policy: whose workers, where none is named.
            deadline_s: seconds from now; 0: the control deadline.

        Raises:
            Refused: no worker is there, or its engine takes no weights.
            EngineFailed: its engine died meanwhile.
            PeerLost: the worker was lost.
        """
        return await list_weights(self._commands, worker, policy, deadline_s)


@strict()
def connect(
    address: str, *, name: str = "", key_file: str | Path = "", fleet: str = ""
) -> RolloutClient:
    """Make a client for the router at `address`; use it with `async with`.

    Args:
        address: endpoint of the router's frontend, e.g. `tcp://127.0.0.1:7777`.
            A guarded router's carries its public key: `tcp://HOST:PORT#KEY`. Several, separated by
            commas, are those of a router and its standby: when one does not answer, the next is
            tried.
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


def _tags_of(tags: Sequence[MemoryTag] | None) -> list[MemoryTag]:
    if tags is not None and not len(tags):
        raise Refused(bad_request("tags", "no tag is named; leave it out for all of them"))
    return list(ALL_TAGS if tags is None else tags)


async def all_ended(
    futures: Sequence[asyncio.Future[Result]], *, on_error: OnError, on_abort: OnAbort
) -> None:
    """Wait until all have ended; the first error that is to be raised ends that."""
    waiting = asyncio.get_running_loop().create_future()
    n_left = len(futures)

    def note(future: asyncio.Future[Result]) -> None:
        nonlocal n_left
        n_left -= 1
        error = None if future.cancelled() else future.exception()  # asked of all: it is seen then
        if waiting.done():
            return
        is_kept = on_abort == "partial" and isinstance(error, RolloutCancelled)
        if error is not None and on_error == "raise" and not is_kept:
            waiting.set_exception(error)
        elif not n_left:
            waiting.set_result(None)

    for future in futures:
        future.add_done_callback(note)
    if futures:
        await waiting


def row_in(row: asyncio.Future[Result] | BusError, on_abort: OnAbort) -> Rollout | BusError:
    """What a row has become that has ended."""
    if isinstance(row, BusError):
        return row
    error = row.exception()
    if error is None:
        return rollout_in(row.result())
    if on_abort == "partial" and isinstance(error, RolloutCancelled):
        return error.partial
    if not isinstance(error, BusError):
        raise error
    return error


def _attach(rid: str, *, is_followed: bool = False) -> Ask:
    # Without the prompt it cannot be sent again: when it is lost, that is its end.
    return Ask("attach", Attach(), on_loss="fail", rid=rid, is_followed=is_followed)
