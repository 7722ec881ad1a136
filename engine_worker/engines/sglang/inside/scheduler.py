"""Runs inside SGLang's scheduler process and reports each step to the engine host.

SGLang sends tokens to its tokenizer manager through one asyncio generator per request, which costs
more than sampling them does for a small model. Here one message holds a whole step. It is also the
only place that knows which weights computed a token: with overlapped scheduling a step that was
launched before an update is booked after it.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rolloutbus.bus.actor.resources import keep_what_is_loaded
from rolloutbus.engine_worker.engines.sglang.facts import is_speculative
from rolloutbus.engine_worker.engines.sglang.inside.scheduler_sampling import SchedulerSampling
from rolloutbus.engine_worker.engines.sglang.inside.scheduler_weights import (
    SchedulerWeights,
    batches_of,
    is_staged,
    namespace_of,
)
from rolloutbus.engine_worker.engines.sglang.inside.tap_columns import TapColumns
from rolloutbus.engine_worker.engines.sglang.inside.text_stops import Texts
from rolloutbus.engine_worker.engines.sglang.inside.version_account import VersionAccount
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    COARSE_VARIABLE,
    PATH_VARIABLE,
    PORTS_VARIABLE,
    PREFIX_VARIABLE,
    CacheFlushed,
    LastWords,
    Looked,
    Message,
    Pulse,
    Ready,
    SchedulerRank,
    framed,
)
from rolloutbus.engine_worker.engines.sglang.upstream import hooks, presence
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.hooks import Call, Hook, Lack, When
from rolloutbus.engine_worker.engines.sglang.upstream.names import run_scheduler_process
from rolloutbus.engine_worker.engines.sglang.upstream.presence import lacks_for
from rolloutbus.engine_worker.engines.sglang.upstream.types import (
    OutputStreamer,
    Scheduler,
    SchedulerBatch,
    SchedulerRequest,
    SglangObject,
)

NAMESPACE_AT = {"block_stored": 8, "block_removed": 3}
"""Where the events of the tree in Rust have their namespace, by their first element."""
CLEARS = ("record_all_cleared", "_record_all_cleared_event")


class PrefixEvents:
    """Keeps out of SGLang's KV events what no new request would find.

    Its events do not tell namespaces apart, and those of older weights and of adapters hold the
    same tokens: without this, KV that nobody can use would be reported as cached, and its eviction
    as that of KV which is still there.
    """

    def __init__(self, no_event: Callable[[], object] = upstream.no_kv_event) -> None:
        """`no_event` makes an event that says nothing."""
        self._no_event = no_event
        self._namespace: str | None = None
        """That of new requests without adapter."""

    def calls(self) -> Iterator[tuple[Hook, Call]]:
        """What is wrapped, and what is called instead."""
        for hook in (
            *(hooks.RECORD_STORE, hooks.RECORD_REMOVE),
            *(hooks.RECORDER_STORE, hooks.RECORDER_REMOVE),
        ):
            yield hook, self._record
        if upstream.has_rust_tree():
            yield hooks.RUST_EVENT, self._read

    def use(self, version: int, scheduler: Scheduler) -> None:
        """New requests find nothing from before: all that was reported is void."""
        self._namespace = namespace_of(None, version)
        clear = _clearing(scheduler.tree_cache)
        if clear is not None:
            clear()

    def _record(
        self, call: Call, recorder: object, node: SglangObject, *args: object, **more: object
    ) -> None:
        if node.key.extra_key == self._namespace:
            call(recorder, node, *args, **more)

    def _read(self, call: Call, event: tuple[Any, ...], *args: object, **more: object) -> object:
        at = NAMESPACE_AT.get(event[0])
        if at is None or event[at] == self._namespace:
            return call(event, *args, **more)
        return self._no_event()


def _clearing(tree: object) -> Call | None:
    """The function that records that a cache is empty, wherever this version has it."""
    inner = getattr(tree, "inner", tree)
    for owner in (inner, getattr(inner, "tree_core", None)):
        for recorder in (getattr(owner, "kv_events", None), owner):
            for name in CLEARS:
                if (clear := getattr(recorder, name, None)) is not None:
                    return clear
    return None


PULSE_S = 0.2
UNBOOKED = 1
"""Steps, each of one token of a request, that a scheduler has launched and not booked while weights
change: none, or with overlapped scheduling one."""


def run_scheduler(*arguments: object, **options: object) -> None:
    """SGLang's own process function, with our hooks in place.

    Raises:
        SystemExit: this SGLang has not what they need; the host was told.
    """
    given = upstream.scheduler_arguments(arguments, options)
    rank = SchedulerRank(given["dp_rank"] or 0, given["pp_rank"], given["tp_rank"])
    place = rank, given["server_args"].pp_size
    tap = SchedulerTap(
        os.environ[PATH_VARIABLE], int(os.environ[COARSE_VARIABLE]), *place, keep_what_is_loaded
    )
    try:
        problem = tap.install()
        if problem:
            raise SystemExit(problem)
        if PORTS_VARIABLE in os.environ:
            given["port_args"].nccl_port = int(os.environ[PORTS_VARIABLE].split()[rank.dp])
        run_scheduler_process(*arguments, **options)
    finally:
        tap.close()


def patch(wanted: Iterable[tuple[Hook, Call]]) -> list[Lack]:
    """Wrap these functions of SGLang; returns what is not wrapped afterwards.

    Args:
        wanted: a target, and what is called in its place with the original and its arguments.
    """
    calls = dict(wanted)
    unfit = {hook: presence.why_unfit(hook) for hook in calls}
    originals = {hook: presence.found(hook.target) for hook, why in unfit.items() if not why}
    for hook in originals:
        upstream.hook_around(presence.dotted(hook.target), calls[hook])
    upstream.apply_hooks()
    for hook, original in originals.items():
        if not presence.is_wrapped(hook.target, original):
            unfit[hook] = f"{presence.dotted(hook.target)} was not patched"
    return presence.lacks_among(unfit)


class SchedulerTap:
    """The hooks of one scheduler process, and its connection to the engine host."""

    def __init__(
        self,
        path: str,
        coarse_tokens: int,
        rank: SchedulerRank,
        n_stages: int,
        on_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_loaded` is called once everything is loaded and captured, before the first step."""
        self._rank = rank
        self._on_loaded = on_loaded
        self._n_stages = n_stages
        # The last stage samples, and so knows most of a token.
        self._is_speaker = rank.tp == 0 and rank.pp == n_stages - 1
        """Whether this is the rank that tells of tokens."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._sending = threading.Lock()
        self._columns = TapColumns(coarse_tokens)
        self._version = 0
        """Of the weights that the next step is computed with."""
        self._weights = SchedulerWeights(rank, self._send, self._end, self._use_version)
        self._sampling = SchedulerSampling()
        self._prefixes = PrefixEvents() if PREFIX_VARIABLE in os.environ else None
        self._has_account = False
        """Whether this SGLang counts tokens by the version of the weights."""
        self._scheduler: Scheduler | None = None
        self._n_forwards = 0
        self._pulse_at = 0.0
        self._was_busy = False
        """When it last told of its counters."""

    def install(self) -> str:
        """Hook into SGLang's classes of this process, and tell the host what they lack.

        Returns why this process must not go on; empty: all that is required is there.
        """
        whens: list[When] = ["always"]
        if self._prefixes is not None:
            whens.append("prefixes")
        if self._n_stages > 1:
            whens.append("stages")
        lacks = [*patch(self.calls()), *lacks_for("scheduler", whens)]
        self._has_account = not any(hooks.VERSION_CHECK in (each.loses or ()) for each in lacks)
        problem = hooks.refusal(upstream.version(), lacks)
        self._send(LastWords(problem) if problem else Looked(lacks))
        return problem

    def close(self) -> None:
        """Send no further steps."""
        self._socket.close()

    def calls(self) -> Sequence[tuple[Hook, Call]]:
        """What is wrapped, and what is called instead."""
        weights = self._weights
        return (
            (hooks.CONSTRUCT, self._construct),
            (hooks.RUN_EVENT_LOOP, self._run),
            (hooks.RUN_BATCH, self._launch),
            (hooks.PROCESS_BATCH_RESULT, self._book),
            (hooks.STREAM_OUTPUT, self._stream),
            (hooks.ADD_REQUEST, self._enqueue),
            (hooks.FLUSH, self._flush),
            (hooks.TAKE_IN, self._take_in),
            (hooks.WEIGHT_BY_NAME, weights.answer),
            (hooks.NEXT_BATCH, weights.plan),
            (hooks.PAUSE, weights.pause),
            (hooks.CONTINUE, weights.go_on),
            *self._sampling.calls(),
            *(self._prefixes.calls() if self._prefixes is not None else ()),
        )

    def _construct(self, call: Call, scheduler: Scheduler, *args: object, **kwargs: object) -> None:
        self._take_over(scheduler)
        self._or_say_why(call, scheduler, *args, **kwargs)

    def _run(self, call: Call, scheduler: Scheduler, *args: object, **kwargs: object) -> None:
        self._take_over(scheduler)
        room = scheduler.max_total_num_tokens, scheduler.max_req_input_len
        self._sampling.texts = texts = Texts.of(scheduler)
        self._on_loaded()
        self._send(Ready(self._rank, *room, texts.why_none))
        is_counted = self._has_account and not is_speculative(scheduler.server_args)
        if is_counted and self._n_stages == 1:
            self._columns.account = VersionAccount(upstream.counted_runs, UNBOOKED, self._send)
            self._weights.keep_account()
        self._or_say_why(call, scheduler, *args, **kwargs)

    def _take_over(self, scheduler: Scheduler) -> None:
        if self._scheduler is not scheduler:
            self._scheduler = scheduler
            self._weights.take_over(scheduler)

    def _enqueue(
        self,
        call: Call,
        scheduler: object,
        request: SchedulerRequest,
        *args: object,
        **kwargs: object,
    ) -> object:
        self._weights.admit(request)
        self._sampling.admit(request)
        return call(scheduler, request, *args, **kwargs)

    def _or_say_why(self, call: Call, *args: object, **kwargs: object) -> None:
        try:
            call(*args, **kwargs)
        except BaseException as error:
            self._send(LastWords(f"{type(error).__name__}: {error}"[:4000]))
            raise

    def _launch(
        self,
        call: Call,
        scheduler: Scheduler,
        batch: SchedulerBatch,
        *args: object,
        **kwargs: object,
    ) -> object:
        result: SglangObject = call(scheduler, batch, *args, **kwargs)
        if is_staged(scheduler):
            # What is booked is another result, which the last stage sends around.
            output = getattr(result, "logits_output", None)
            batch.rolloutbus_version = self._version
            batch.rolloutbus_support = getattr(output, "rolloutbus_support", None)
        else:
            result.rolloutbus_version = self._version
        self._n_forwards += 1
        now = time.monotonic()
        if now >= self._pulse_at and self._is_speaker:
            self._pulse_at = now + PULSE_S
            self._send(self._pulse())
        return result

    def _book(
        self, call: Call, scheduler: Scheduler, batch: SchedulerBatch, result: object, *args: object
    ) -> object:
        # Only `run_batch` knows the weights: what comes another way is told as of no version.
        of_step = batch if is_staged(scheduler) else result
        self._tell_version(getattr(of_step, "rolloutbus_version", None), batch.reqs)
        self._sampling.before_booking(batch, result)
        return call(scheduler, batch, result, *args)

    def _stream(
        self,
        call: Call,
        streamer: OutputStreamer,
        reqs: Sequence[SchedulerRequest],
        *args: object,
        **kwargs: object,
    ) -> object:
        """Wraps `stream_output(reqs, return_logprob, skip_req=None)`."""
        if streamer.is_generation and self._is_speaker:
            skipped = kwargs.get("skip_req", args[1] if len(args) > 1 else None)
            shown = reqs if skipped is None else [req for req in reqs if req is not skipped]
            self._send(self._columns.step(shown))
        return call(streamer, reqs, *args, **kwargs)

    def _use_version(self, version: int) -> None:
        self._version = version
        if self._prefixes is not None and self._scheduler is not None:
            self._prefixes.use(version, self._scheduler)

    def _end(self, requests: Sequence[SchedulerRequest]) -> None:
        """These are about to be aborted."""
        if self._is_speaker:
            self._send(self._columns.end(requests))

    def _take_in(self, call: Call, scheduler: Scheduler, requests: Sequence[object]) -> object:
        taken = call(scheduler, requests)
        is_due = self._was_busy and time.monotonic() >= self._pulse_at
        if is_due and self._is_speaker and not self._running(scheduler):
            self._send(self._pulse())
        if upstream.is_halted(scheduler) and not requests and self._weights.is_at_rest:
            # It would spin: held, it passes over what makes an idle one wait for its sockets.
            scheduler.maybe_sleep_on_idle()
        return taken

    def _flush(self, call: Call, scheduler: Scheduler, *args: object, **kwargs: object) -> bool:
        n_tokens = scheduler.tree_cache.evictable_size()
        has_flushed: bool = call(scheduler, *args, **kwargs)
        if has_flushed and self._is_speaker:
            self._send(CacheFlushed(n_tokens))
        return has_flushed

    def _tell_version(self, version: int | None, booked: Sequence[SchedulerRequest]) -> None:
        if version != self._columns.version and self._is_speaker:
            self._send(self._columns.change_version(version, [*booked, *self._live()]))

    def _live(self) -> list[SchedulerRequest]:
        scheduler = self._scheduler
        assert scheduler is not None, "it has run a step"
        # Launched and not booked: with overlapped scheduling they are in no other place.
        # Some versions have the queue only with overlapped scheduling.
        launched = [batch for batch, _ in getattr(scheduler, "result_queue", ())]
        batches = [*batches_of(scheduler), *launched]
        running = [req for batch in batches for req in batch.reqs]
        if scheduler.chunked_req is not None:
            running.append(scheduler.chunked_req)
        return [*running, *scheduler.waiting_queue]

    def _running(self, scheduler: Scheduler) -> Sequence[SchedulerRequest]:
        return self._weights.running if is_staged(scheduler) else scheduler.running_batch.reqs

    def _pulse(self) -> Pulse:
        scheduler = self._scheduler
        assert scheduler is not None, "it has run a step"
        pool = scheduler.token_to_kv_pool_allocator
        n_running, n_waiting = len(self._running(scheduler)), len(scheduler.waiting_queue)
        self._was_busy = n_running > 0
        n_free = pool.available_size() + scheduler.tree_cache.evictable_size()
        n_used = scheduler.max_total_num_tokens - n_free
        return Pulse(self._n_forwards, n_running, n_waiting, max(0, n_used))

    def _send(self, message: Message | None) -> None:
        if message is not None:
            with self._sending:
                self._socket.sendall(framed(message))
