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
from collections.abc import Mapping, Sequence
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
    Devices,
    abilities_of,
    facts_of,
    features_of,
    is_speculative,
)
from rolloutbus.engine_worker.engines.sglang.guard import StateGuard
from rolloutbus.engine_worker.engines.sglang.inside.scheduler import run_scheduler
from rolloutbus.engine_worker.engines.sglang.live import (
    LiveRequest,
    LiveRequests,
    cause_of,
    problem_of,
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
    generate_request,
    n_kept,
)
from rolloutbus.engine_worker.engines.sglang.schedulers.connection import Schedulers, TapListener
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    COARSE_VARIABLE,
    PATH_VARIABLE,
    PREFIX_VARIABLE,
    CacheFlushed,
    LastWords,
    Looked,
    Message,
    Pulse,
    Rows,
    Swapped,
    VersionsChecked,
    VersionStaged,
)
from rolloutbus.engine_worker.engines.sglang.settings import SglangSettings
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
        self._pulse = Pulse(0, 0, 0, 0)
        self._checked = VersionsChecked(0, 0)
        self._last_words = ""
        self._gone = threading.Event()
        self._looked: SimpleQueue[Sequence[Lack]] = SimpleQueue()
        """What each scheduler lacks of what is declared in `hooks`."""
        self._thread: EngineThread | None = None
        processors = Processors(settings.processors)
        arguments = server_arguments(settings, upstream.server_argument_types())
        _require_room(settings, arguments)
        self._port = None
        if not {"nccl_port", "dist_init_addr"} & arguments.keys():
            self._port = RendezvousPort()
            arguments["nccl_port"] = self._port.number
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
        lacks = [*presence.lacks_for("host"), *self._lacks_of_schedulers()]
        _warn(hooks.untested(upstream.version()), *map(_loss, lacks))
        self._terms = _terms(thread.engine, settings, processors, lacks)
        self._labels = SessionLabels(thread, PER_SLOT * self._terms.facts.slots)
        resolved = upstream.resolved_arguments(thread.engine)
        guard = StateGuard(abilities_of(resolved))
        self._pausing = pausing = Pausing(thread, self._live, guard)
        self._schedulers = Schedulers(thread)
        is_whole = not {"load_format", "quantization"} & settings.arguments.keys()
        model = Path(settings.model)
        self.weights = SglangWeights(self._schedulers, pausing, model, is_whole=is_whole)
        self.shared = self.weights
        self.checkpointer = Saving(thread, guard, self.weights, Path(resolved["model_path"]))
        self.cache = Caches(thread, pausing, tiers_of(resolved))
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
            if n_kept(each) >= each.sampling.max_new_tokens:
                self._live.end(live.rid, "length")
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
        pulse = self._pulse
        return EngineStats(
            steps=pulse.n_forwards,
            n_running=pulse.n_running,
            n_waiting=max(0, len(self._live) - pulse.n_running),
            n_kv_tokens=pulse.n_kv_tokens,
            version=self.weights.version,
            n_calls=self._pausing.n_calls + self.weights.n_calls,
            is_torn=self._pausing.guard.is_torn,
        )

    def _version_checks(self) -> Mapping[str, float]:
        """How many requests had their versions checked, where they are."""
        if hooks.VERSION_CHECK not in self.facts.features:
            return {}
        checked = self._checked
        return {
            "versions_checked": float(checked.n_requests),
            "versions_contradicted": float(checked.n_contradicted),
        }

    def close(self) -> None:
        """See `Engine`."""
        thread = self._alive()
        thread.close(thread.engine.shutdown)
        if self._feed is not None:
            self._feed.close()
        self._taps.close()
        if self._port is not None:
            self._port.close()

    def _started(self, arguments: dict[str, object], timeout_s: float) -> EngineThread:
        try:
            return EngineThread(lambda: _built(arguments), timeout_s)
        except EngineDied:
            raise
        except RuntimeError as error:
            # It only knows that a scheduler has ended; the scheduler knew why.
            self._gone.wait(LAST_WORDS_S)
            raise EngineDied(cause_of(self._last_words or str(error))) from error

    def _lacks_of_schedulers(self) -> Sequence[Lack]:
        """What every scheduler lacks; reported before it is built."""
        try:
            return self._looked.get(timeout=LAST_WORDS_S)
        except Empty:
            why = "no scheduler of SGLang's has told whether it is hooked"
            raise EngineDied(why) from None

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
                self._live.end(live.rid, problem=problem_of(str(error), 400))
            return
        # Whatever SGLang raises, the request has ended there; media are read by many packages.
        except Exception as error:  # noqa: BLE001
            status = upstream.http_status(error) or (415 if live.has_media else 500)
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

    def _hear(self, message: Message) -> None:
        match message:
            case Rows():
                given_up = self._live.tell(message)
                if given_up:
                    self._pausing.abort(given_up)
            case Pulse():
                self._pulse = message
            case VersionsChecked():
                self._checked = message
            case Looked(lacks):
                self._looked.put(lacks)
            case VersionStaged() | Swapped():
                self._schedulers.on_report(message)
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
) -> RequestTerms:
    model = engine.tokenizer_manager.model_config
    arguments = engine.tokenizer_manager.server_args
    able = hooks.remaining(features_of(settings, arguments, model, processors.names), lacks)
    facts = replace(
        facts_of(engine, settings, upstream.resolved_arguments(engine), able),
        lost=hooks.lost(upstream.version(), lacks),
    )
    return RequestTerms(
        facts=facts,
        processors=processors,
        chance=random.Random(),  # noqa: S311 - sampling, not secrets
        has_seeds="seed" in able,
        has_priorities="priority" in able,
        has_sessions=bool(getattr(arguments, "enable_session_radix_cache", None)),
        is_speculative=is_speculative(arguments),
    )
