"""The SGLang engine: its real scheduler, cache and kernels behind the worker's protocols.

Requests go in through SGLang's tokenizer manager. Tokens come out through taps in its scheduler
processes, one message per step (see `engine_worker.engines.sglang.inside.scheduler`).
"""

import asyncio
import os
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from rolloutbus.bus.wire.entry import AttemptKey
from rolloutbus.engine_worker.engine import (
    EngineDied,
    EngineFacts,
    EngineStats,
    PauseMode,
    StepSink,
    Work,
)
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.facts import (
    OF_TEXT,
    Devices,
    abilities_of,
    facts_of,
    features_of,
    is_speculative,
    ranks_of,
)
from rolloutbus.engine_worker.engines.sglang.guard import StateGuard
from rolloutbus.engine_worker.engines.sglang.inside.scheduler import run_scheduler
from rolloutbus.engine_worker.engines.sglang.live import (
    LiveRequest,
    LiveRequests,
    cause_of,
    problem_of,
    status_of,
)
from rolloutbus.engine_worker.engines.sglang.lora import LoraAdapters, LoraLimits, full_name
from rolloutbus.engine_worker.engines.sglang.memory import Caches, SglangMemory, tiers_of
from rolloutbus.engine_worker.engines.sglang.operations import Profiling, Saving, SchedulerMeter
from rolloutbus.engine_worker.engines.sglang.pausing import Pausing
from rolloutbus.engine_worker.engines.sglang.prefixes import PrefixFeed
from rolloutbus.engine_worker.engines.sglang.reading import Reading
from rolloutbus.engine_worker.engines.sglang.rendezvous import RendezvousPort
from rolloutbus.engine_worker.engines.sglang.requests import (
    RequestTerms,
    Unfit,
    end_of_kept,
    generate_request,
)
from rolloutbus.engine_worker.engines.sglang.schedulers.connection import Schedulers, TapListener
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    COARSE_VARIABLE,
    PATH_VARIABLE,
    PORTS_VARIABLE,
    PREFIX_VARIABLE,
    Answered,
    CacheFlushed,
    LastWords,
    Looked,
    Message,
    Pulse,
    Ready,
    Rows,
    SchedulerRank,
    Swapped,
    VersionsChecked,
    VersionStaged,
)
from rolloutbus.engine_worker.engines.sglang.settings import SglangSettings, size_of
from rolloutbus.engine_worker.engines.sglang.upstream import hooks, presence
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.arguments import server_arguments
from rolloutbus.engine_worker.engines.sglang.upstream.hooks import Lack
from rolloutbus.engine_worker.engines.sglang.upstream.types import SglangHandle
from rolloutbus.engine_worker.engines.sglang.weights import SglangWeights
from rolloutbus.engine_worker.engines.shared.model_size import require_room
from rolloutbus.engine_worker.engines.shared.processors import Processors

LAST_ROW_S = 5.0
"""SGLang has ended a request: its last row of the tap comes within this time."""
READY_S = 30.0
"""SGLang has said that its schedulers are ready: each has said so itself within this time."""
LAST_WORDS_S = 5.0
"""A scheduler that was seen to end has said why within this time, if at all."""
NEVER = 1_000_000_000


UNIFIED_TREE_VARIABLE = "SGLANG_ENABLE_UNIFIED_RADIX_TREE"
"""Of 0.5.17, where only that cache knows sessions; later it is the usual one."""
PER_SLOT = 4
"""Marked sessions for each request that runs side by side: twice what the router gives places to
by default."""


class SessionLabels:
    """Sessions that SGLang's prefix cache knows, at most `most` at a time."""

    def __init__(self, thread: EngineThread, most: int) -> None:
        self._thread = thread
        self._most = most
        self._used: OrderedDict[str, None] = OrderedDict()
        """Least recently used first."""

    def use(self, session: str) -> None:
        """A request of this session is about to begin."""
        self._used[session] = None
        self._used.move_to_end(session)
        while len(self._used) > self._most:
            oldest, _ = self._used.popitem(last=False)
            self._thread.begin(lambda oldest=oldest: self._forget(oldest))

    async def _forget(self, session: str) -> None:
        asked = upstream.request("CloseSessionReqInput", session_id=session)
        await self._thread.manager.close_session(asked, None)


FIT_ALL_THE_SAME = ("quantization", "torchao_config", "cpu_offload_gb", "offload_group_size")
"""Arguments with which weights take less memory than their files tell."""


class Progress:
    """Steps of an engine; none is counted while one of its replicas stands still before work."""

    def __init__(self) -> None:
        self._counted: Mapping[SchedulerRank, int] = {}

    def steps(self, pulses: Mapping[SchedulerRank, Pulse]) -> int:
        """Counted so far; `pulses` are the last ones of each replica."""
        stands = [
            rank
            for rank, pulse in pulses.items()
            if pulse.n_running and pulse.n_forwards == self._counted.get(rank)
        ]
        if not stands:
            self._counted = {rank: pulse.n_forwards for rank, pulse in pulses.items()}
        return sum(self._counted.values())


class SglangEngine:
    """Implements `Engine`. EngineDied, from any call: SGLang is dead; only a new engine helps."""

    overwriter = None

    def __init__(self, settings: SglangSettings, sink: StepSink) -> None:
        """Start SGLang's processes and wait until the model is loaded.

        Raises:
            ValueError: a setting is of no use; names it.
            EngineDied: SGLang did not start; says why.
        """
        self._live = LiveRequests(sink)
        self._pulses: dict[SchedulerRank, Pulse] = {}
        self._progress = Progress()
        self._checked: dict[SchedulerRank, VersionsChecked] = {}
        self._last_words = ""
        self._gone = threading.Event()
        self._looked: SimpleQueue[Sequence[Lack]] = SimpleQueue()
        """What each scheduler lacks of what is declared in `hooks`."""
        self._ready: SimpleQueue[Ready] = SimpleQueue()
        self._thread: EngineThread | None = None
        processors = Processors(settings.processors)
        arguments = server_arguments(settings, upstream.server_argument_types())
        _require_room(settings, arguments)
        self._ports = _rendezvous_ports(arguments)
        self._taps = TapListener(self._hear, self._scheduler_gone)
        os.environ[PATH_VARIABLE] = self._taps.path
        self._feed = None
        if settings.report_prefixes:
            self._feed = PrefixFeed.among(arguments, Path(self._taps.path).parent)
            os.environ[PREFIX_VARIABLE] = "1"
        os.environ[COARSE_VARIABLE] = str(settings.coarse_tokens)
        # Tokens come through the taps: nothing but the end of a request need come the other way.
        os.environ["SGLANG_FORCE_STREAM_INTERVAL"] = str(NEVER)
        if arguments.get("enable_memory_saver"):
            # Without it the tag `cuda_graph` would free nothing.
            os.environ.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
        if arguments.get("enable_session_radix_cache"):
            os.environ.setdefault(UNIFIED_TREE_VARIABLE, "1")
        self._thread = thread = self._started(arguments, settings.control_timeout_s)
        resolved = upstream.resolved_arguments(thread.engine)
        ready = self._all_ready(ranks_of(resolved))
        lacks = [*presence.lacks_for("host"), *self._lacks_of_schedulers(len(ready))]
        _warn(hooks.untested(upstream.version()), *map(_loss, lacks))
        self._terms = _terms(thread.engine, settings, processors, lacks, ready)
        self._labels = SessionLabels(thread, PER_SLOT * self._terms.facts.slots)
        guard = StateGuard(abilities_of(resolved))
        self._pausing = pausing = Pausing(thread, self._live, guard)
        self._schedulers = Schedulers(thread, [each.rank for each in ready])
        is_whole = not {"load_format", "quantization"} & settings.arguments.keys()
        model = Path(settings.model)
        self.weights = SglangWeights(self._schedulers, pausing, model, is_whole=is_whole)
        self.shared = self.weights
        self.checkpointer = Saving(thread, guard, self.weights, Path(resolved["model_path"]))
        self.cache = Caches(thread, pausing, tiers_of(resolved), size_of("dp", resolved))
        self.prefixes = self._feed.cached if self._feed is not None else None
        if self._feed is None:
            self._taps.hide()
        else:  # whose feed may have to connect again, in the same directory
            self._feed.meet(self.cache.flush_all)
        devices, self.memory = Devices(resolved), None
        if resolved.get("enable_memory_saver"):
            self.memory = SglangMemory(thread, pausing, self.cache, devices)
        self.profiler = Profiling(thread, has_gpu=devices.are_there)
        self.meter = SchedulerMeter(thread, self._version_checks)
        limits = LoraLimits.of(resolved)
        self._adapters = LoraAdapters(thread, self.weights.specs(), limits)
        self.lora = self._adapters if limits.are_possible else None
        kind = upstream.model_kind(thread.engine)
        self._reading = reading = Reading(thread, self._live, kind)
        self.scorer = reading if kind in ("generates", "classifies") else None
        self.embedder = reading if kind == "embeds" else None
        self.reranker = reading if kind == "ranks" and settings.text else None

    @property
    def facts(self) -> EngineFacts:
        """See `Engine`."""
        return self._terms.facts

    def generate(self, work: Sequence[Work]) -> None:
        """See `Engine`. ValueError: a key is in use; it and what follows was not queued."""
        for each in work:
            live = self._live.add(each)
            end = end_of_kept(each, self.facts)
            if end is not None:
                self._live.end(live.rid, end)
                continue
            try:
                self._reading.check_writes()
                adapter = self._adapters.begin(live.rid, each.lora)
                if adapter:
                    self._live.began_with(live, full_name(adapter))
                request = generate_request(each, live.rid, upstream.request, self._terms, adapter)
            except Unfit as error:
                self._adapters.end(live.rid)
                self._live.end(live.rid, problem=error.problem)
                continue
            if each.session and self._terms.has_sessions:
                self._labels.use(each.session)
            self._alive().begin(lambda request=request, live=live: self._run(request, live))

    def abort(self, keys: Sequence[AttemptKey]) -> int:
        """See `Engine`."""
        found = self._live.find(keys)
        self._pausing.abort(found)
        return len(found)

    def pause(self, mode: PauseMode) -> None:
        """See `Engine`."""
        self._pausing.pause(mode)

    def resume(self) -> None:
        """See `Engine`."""
        self._pausing.resume()

    def stats(self) -> EngineStats:
        """See `Engine`."""
        self._alive().check()
        pulses_by_rank = dict(self._pulses)
        pulses = [*pulses_by_rank.values()]
        n_running = sum(each.n_running for each in pulses)
        return EngineStats(
            steps=self._progress.steps(pulses_by_rank),
            n_running=n_running,
            n_waiting=max(0, len(self._live) - n_running),
            n_kv_tokens=sum(each.n_kv_tokens for each in pulses),
            version=self.weights.version,
            n_calls=self._pausing.n_calls + self.weights.n_calls,
            is_torn=self._pausing.guard.is_torn,
        )

    def _version_checks(self) -> Mapping[str, float]:
        """How many requests had their versions checked, where they are."""
        if hooks.VERSION_CHECK not in self.facts.features:
            return {}
        checked = [*self._checked.values()]
        return {
            "versions_checked": float(sum(each.n_requests for each in checked)),
            "versions_contradicted": float(sum(each.n_contradicted for each in checked)),
        }

    def close(self) -> None:
        """See `Engine`."""
        thread = self._alive()
        thread.close(thread.engine.shutdown)
        if self._feed is not None:
            self._feed.close()
        self._taps.close()
        for port in self._ports:
            port.close()

    def _started(self, arguments: dict[str, object], timeout_s: float) -> EngineThread:
        try:
            return EngineThread(lambda: _built(arguments), timeout_s)
        except EngineDied:
            raise
        except RuntimeError as error:
            # It only knows that a scheduler has ended; the scheduler knew why.
            self._gone.wait(LAST_WORDS_S)
            raise EngineDied(cause_of(self._last_words or str(error))) from error

    def _all_ready(self, ranks: Collection[SchedulerRank]) -> list[Ready]:
        """What each scheduler of the engine told when it was built."""
        found: dict[SchedulerRank, Ready] = {}
        try:
            while len(found) < len(ranks):
                ready = self._ready.get(timeout=READY_S)
                found[ready.rank] = ready
        except Empty:
            missing = sorted(set(ranks) - found.keys())
            why = f"schedulers of SGLang's that are not hooked: {missing}"
            raise EngineDied(why) from None
        if found.keys() != set(ranks):
            strange = sorted(found.keys() - set(ranks))
            raise EngineDied(f"schedulers of SGLang's that nobody has asked for: {strange}")
        return [*found.values()]

    def _lacks_of_schedulers(self, n_schedulers: int) -> list[Lack]:
        """What any of them lacks; each has reported it before it was built."""
        found: dict[str, Lack] = {}
        for _ in range(n_schedulers):
            found |= {lack.what: lack for lack in self._looked.get(timeout=READY_S)}
        return [*found.values()]

    def _alive(self) -> EngineThread:
        assert self._thread is not None, "it is built"
        return self._thread

    async def _run(self, request: object, live: LiveRequest) -> None:
        try:
            if live.is_aborted:
                self._live.end(live.rid)
                return
            live.task = asyncio.current_task()
            await self._watch(request, live)
        finally:
            self._adapters.end(live.rid)

    async def _watch(self, request: object, live: LiveRequest) -> None:
        """Keep one request in SGLang until it ends there."""
        reason: Mapping[str, Any] = {}
        try:
            output = await self._alive().output_of(request)
            reason = output["meta_info"]["finish_reason"] or {} if output else {}
        except ValueError as error:
            if live.is_aborted:
                self._live.end(live.rid)
            else:
                status = status_of(error, 400, has_media=live.has_media)
                self._live.end(live.rid, problem=problem_of(str(error), status))
            return
        # Whatever SGLang raises, the request has ended there; media are read by many packages.
        except Exception as error:  # noqa: BLE001
            other = status_of(error, 500, has_media=live.has_media)
            status = upstream.http_status(error) or other
            why = f"{type(error).__name__}: {error}"
            self._live.end(live.rid, problem=problem_of(why, status))
            return
        if reason.get("type") == "abort" and not live.n_told:
            status = reason.get("status_code")
            why = str(reason.get("message", ""))
            self._live.end(live.rid, problem=problem_of(why, status) if status else None)
        elif self._live.has(live.rid):
            loop = self._alive().loop
            loop.call_later(LAST_ROW_S, self._live.end, live.rid)

    def _hear(self, message: Message, rank: SchedulerRank) -> None:
        match message:
            case Rows():
                given_up = self._live.tell(message)
                if given_up:
                    self._pausing.abort(given_up)
            case Pulse():
                self._pulses[rank] = message
            case VersionsChecked():
                self._checked[rank] = message
            case Looked(lacks):
                self._looked.put(lacks)
            case Ready():
                self._ready.put(message)
            case Answered() | VersionStaged() | Swapped():
                self._schedulers.on_report(message, rank)
            case CacheFlushed():
                self.cache.on_flushed(message)
            case LastWords(text):
                self._last_words = text
                # Its process may take its time to end, and SGLang's other signs say less.
                if self._thread is not None:
                    self._thread.die(cause_of(text))

    def _scheduler_gone(self) -> None:
        self._gone.set()
        if self._thread is not None:
            self._thread.die(cause_of(self._last_words))


def _require_room(settings: SglangSettings, arguments: Mapping[str, object]) -> None:
    """ValueError: the weights are larger than all of the memory that SGLang would load them to.

    Nothing is refused where it keeps them smaller than its files, or not all of them there.
    """
    if any(arguments.get(name) for name in FIT_ALL_THE_SAME):
        return
    # With `auto` float32 becomes a type of two bytes.
    item_bytes = 4 if settings.dtype == "float32" else 2
    n_gpus = 0 if settings.device == "cpu" else torch.cuda.device_count()
    gpus = [torch.device("cuda", number) for number in range(n_gpus)]
    require_room(Path(settings.model), item_bytes, gpus)


def _built(arguments: Mapping[str, object]) -> SglangHandle:
    """SGLang's engine; EngineDied: this SGLang has not what is needed of it."""
    problem = hooks.refusal(upstream.version(), presence.lacks_for("host"))
    if problem:
        raise EngineDied(problem)
    return upstream.build_engine(run_scheduler, arguments)


def _rendezvous_ports(arguments: dict[str, object]) -> list[RendezvousPort]:
    """Ports at which the schedulers of each replica meet; none if the operator has chosen."""
    if {"nccl_port", "dist_init_addr"} & arguments.keys():
        return []
    ports = [RendezvousPort() for _ in range(size_of("dp", arguments))]
    numbers = [port.number for port in ports]
    if len(numbers) == 1:
        arguments["nccl_port"] = numbers[0]
    else:  # SGLang knows one port and would give it to all of them
        os.environ[PORTS_VARIABLE] = " ".join(map(str, numbers))
    return ports


def _loss(lack: Lack) -> str:
    lost = ", ".join(lack.loses or ()) or "nothing that a request asks for"
    return f"{lack.what} (it carries: {lack.carries}); this worker does without: {lost}"


def _warn(*sentences: str) -> None:
    """For the worker's log."""
    for sentence in filter(None, sentences):
        sys.stderr.write(f"warning: {sentence}\n")


def _terms(
    engine: SglangHandle,
    settings: SglangSettings,
    processors: Processors,
    lacks: Sequence[Lack],
    ready: Sequence[Ready],
) -> RequestTerms:
    model = engine.tokenizer_manager.model_config
    arguments = engine.tokenizer_manager.server_args
    resolved = upstream.resolved_arguments(engine)
    able = hooks.remaining(features_of(settings, arguments, model, processors.names), lacks)
    lost = hooks.lost(upstream.version(), lacks)
    no_texts = next((each.no_texts for each in ready if each.no_texts), "")
    if no_texts:
        able -= OF_TEXT
        lost = {**dict.fromkeys(OF_TEXT, no_texts), **lost}
    facts = replace(facts_of(engine, settings, resolved, able, ready), lost=lost)
    return RequestTerms(
        facts=facts,
        processors=processors,
        chance=random.Random(),  # noqa: S311 - sampling, not secrets
        has_seeds="seed" in able,
        has_priorities="priority" in able,
        has_sessions=bool(getattr(arguments, "enable_session_radix_cache", None)),
        is_speculative=is_speculative(arguments),
        n_replicas=size_of("dp", resolved),
    )
