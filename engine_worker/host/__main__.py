"""The engine host: the child process of a worker actor that holds the engine.

A crash of the engine takes this process and nothing else; the actor keeps results, streams and
membership. `python -m rolloutbus.engine_worker.host` is started by
`engine_worker.worker.host_process` only.
"""

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import NoReturn, cast

import msgspec
import numpy as np
import uvloop
from msgspec import Raw

from rolloutbus.bus.actor.process import die_with_parent
from rolloutbus.bus.actor.resources import keep_freed_memory, keep_what_is_loaded
from rolloutbus.bus.security.principals import Principals, principals_in
from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.bus.weights.shm import host_id
from rolloutbus.bus.wire.codec import pack, unpack, unpack_as
from rolloutbus.bus.wire.commands import RESULTS
from rolloutbus.bus.wire.entry import Entry, RequestId
from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Abort, Generate
from rolloutbus.bus.wire.messages.host import (
    EngineFailure,
    EngineHeartbeat,
    EngineReady,
    EngineStarting,
)
from rolloutbus.bus.wire.messages.membership import HandedKeys
from rolloutbus.bus.wire.outgoing import sealed
from rolloutbus.engine_worker.engine import Engine, EngineDied, Work
from rolloutbus.engine_worker.engines.registry import build_engine
from rolloutbus.engine_worker.host.commands import HostCommands
from rolloutbus.engine_worker.host.files import OperatorPaths
from rolloutbus.engine_worker.host.link import HostLink
from rolloutbus.engine_worker.host.step_buffer import StepBuffer
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.engine_worker.weights.relay import Relay, open_relay


def work_of(entry: Entry, body: Generate) -> Work:
    """The engine's work for the execution that an entry asks for; `body` is the entry's."""
    place = entry.place
    return Work(
        key=(RequestId(entry.rid), entry.attempt),
        prompt=np.frombuffer(body.prompt, np.int32),
        sampling=body.sampling,
        prefix=body.prefix,
        stream=body.stream,
        lora=body.lora,
        want=body.want,
        grammar=body.grammar,
        processors=body.processors,
        media=body.media,
        priority=place.priority if place is not None else 0,
        session=place.session if place is not None else "",
    )


HEARTBEAT_S = 0.25
SWITCH_S = 0.0005
"""A thread that stages weights asks for the interpreter after each call to a device. With Python's
own 5 ms it would wait so long each time for an engine that computes, and tokens would for it."""
CLOSE_S = 5.0
"""An engine that does not close in this time is left to the end of the process."""


WORDS_S = 1.0
"""Waited after the signal: the engine may learn the cause by another way, and reports that."""


class QuitSignal:
    """Catches SIGQUIT of this process, which then no longer ends the process at once."""

    def __init__(self) -> None:
        """Needs the running loop of the main thread."""
        self._came = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, self._came.set)

    async def watch(self) -> NoReturn:
        """Wait for the signal.

        Raises:
            EngineDied: it came.
        """
        await self._came.wait()
        await asyncio.sleep(WORDS_S)
        raise EngineDied("one of the engine's processes has failed: it sent SIGQUIT")


class EngineHost:
    """Translates between entries of the link and calls of the engine."""

    def __init__(
        self,
        engine: Engine,
        commands: HostCommands,
        link: HostLink,
        steps: StepBuffer,
        on_keys: Callable[[Principals], None],
    ) -> None:
        """`on_keys` hears who may connect to what this process binds."""
        self._engine = engine
        self._commands = commands
        self._link = link
        self._steps = steps
        self._tasks: asyncio.TaskGroup | None = None
        self._early: list[Entry] = []
        self._on_keys = on_keys

    def receive(self, entries: list[Entry]) -> None:
        """Take entries from the actor; they are kept until the engine runs."""
        if self._tasks is None:
            self._early += entries
        else:
            # As a task, so that an engine that raises ends `run` and not just the link.
            self._tasks.create_task(self._take(entries, self._tasks))

    async def run(self, quit_signal: QuitSignal) -> None:
        """Serve until the link ends; raises what the engine raises."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(quit_signal.watch())
            heartbeats = tasks.create_task(self._heartbeat())
            self.receive(self._early)
            await self._link.closed()
            heartbeats.cancel()
            # What is still at work has no actor left to answer to; a thread cannot be stopped.
            raise _ActorGone

    async def _take(self, entries: list[Entry], tasks: asyncio.TaskGroup) -> None:
        work: list[Work] = []
        for entry in entries:
            if entry.kind == "generate":
                work.append(self._work(entry))
                continue
            self._begin(work)
            work = []
            if entry.kind == "abort":
                self._abort(entry)
            elif entry.kind == "allow_list":
                self._on_keys(principals_in(unpack_as(HandedKeys, entry)))
            else:
                tasks.create_task(self._command(entry))
        self._begin(work)

    def _work(self, entry: Entry) -> Work:
        body = unpack(entry)
        assert isinstance(body, Generate)
        work = work_of(entry, body)
        self._steps.begin(work.key, len(body.prefix.tokens) // 4 if body.prefix else 0)
        return work

    def _begin(self, work: Sequence[Work]) -> None:
        if work:
            self._engine.generate(work)

    def _abort(self, entry: Entry) -> None:
        body = unpack(entry)
        assert isinstance(body, Abort)
        keys = [key for rid in body.rids if (key := self._steps.open_key(rid))]
        if keys:
            self._engine.abort(keys)

    async def _command(self, entry: Entry) -> None:
        kind, answer = await self._commands.carry_out(entry)
        kind, body = _sound_answer(entry.kind, kind, answer)
        # The new version must be known no later than the end of the command that brought it.
        self._link.send(self._counters())
        self._link.send(Entry(kind, entry.rid, entry.attempt, body=body))

    async def _heartbeat(self) -> None:
        prefixes = self._engine.prefixes
        while True:
            self._link.send(self._counters())
            news = prefixes.take() if prefixes is not None else None
            if news is not None:
                self._link.send(Entry("prefixes", body=pack(news)))
            await asyncio.sleep(HEARTBEAT_S)

    def _counters(self) -> Entry:
        stats = self._engine.stats()
        heartbeat = EngineHeartbeat(
            steps=stats.steps,
            n_running=stats.n_running,
            n_waiting=stats.n_waiting,
            n_kv_tokens=stats.n_kv_tokens,
            version=stats.version,
            torn=stats.is_torn,
            n_held=stats.n_held,
        )
        return Entry("engine_beat", body=pack(heartbeat))


def _sound_answer(command: str, kind: str, answer: msgspec.Struct) -> tuple[str, Raw]:
    """Encode the ending of a command; `failed` if the engine's answer breaks its limits."""
    if kind != "finished":
        return kind, pack(answer)
    try:
        return kind, sealed(answer, RESULTS[command])[1]
    except Refused as error:
        message = f"the engine answered {command} with a wrong value: {error}"
        return "failed", pack(Problem("engine_failed", message, "failed", field=error.field))


class _ActorGone(Exception):
    """The link has ended."""


async def _serve(end: socket.socket, settings: WorkerSettings) -> int:
    early: list[Entry] = []
    link = await HostLink.open(end, early.extend)
    steps = StepBuffer(link.send)
    quit_signal = QuitSignal()
    engine: Engine | None = None
    try:
        loop = asyncio.get_running_loop()

        def told(doing: str) -> None:
            """Called by the thread that builds the engine."""
            starting = Entry("engine_starting", body=pack(EngineStarting(doing)))
            loop.call_soon_threadsafe(link.send, starting)

        engine = await asyncio.to_thread(
            build_engine, settings.engine, settings.engine_options, steps.sink, told
        )
        listening = open_relay(
            settings.relay_endpoint, settings.security, advertise=settings.advertise
        )
        async with listening as relay:
            dialer = dialer_of(settings.security)
            commands = HostCommands(
                *(engine, settings.host.pull_timeout_s, dialer, relay),
                *(OperatorPaths.of(settings), settings.policy),
            )
            host = EngineHost(engine, commands, link, steps, relay.hand_over)
            link.hand_over(host.receive)
            host.receive(early)
            keep_what_is_loaded()
            link.send(Entry("engine_ready", body=pack(_ready(engine, commands, relay))))
            await relay.while_safe(host.run(quit_signal))
    except* _ActorGone:
        pass
    # Whatever breaks in here becomes one message to the actor, which answers its callers.
    except* Exception as errors:
        why = _first_line(errors)
        sys.stderr.write(f"warning: the engine has failed: {why}\n")  # for the worker's log
        link.send(Entry("engine_failed", body=pack(EngineFailure(why))))
        link.close()
        raise
    finally:
        if engine is not None:
            # In a thread of its own: the loop's end waits for its usual ones, however long.
            closing = asyncio.get_running_loop().run_in_executor(
                ThreadPoolExecutor(1, "engine-close"), engine.close
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(closing, CLOSE_S)
    return 0


def _ready(engine: Engine, commands: HostCommands, relay: Relay) -> EngineReady:
    facts = engine.facts
    return EngineReady(
        engine=facts.kind,
        vocab_size=facts.vocab_size,
        max_context=facts.max_context,
        slots=facts.slots,
        eos_token_ids=list(facts.eos_token_ids),
        capabilities=commands.capabilities,
        host=host_id(),
        gpus=list(facts.gpus),
        bulk=relay.bulk,
        transports=commands.transports,
        features=sorted(facts.features),
        parallel=dict(facts.parallel),
        software=dict(facts.software),
        adapters=commands.adapters,
        lost=dict(facts.lost),
    )


def _first_line(errors: BaseExceptionGroup[BaseException]) -> str:
    first = errors.exceptions[0]
    if isinstance(first, BaseExceptionGroup):
        return _first_line(cast("BaseExceptionGroup[BaseException]", first))
    return f"{type(first).__name__}: {first}".split("\n", 1)[0][:500]


def _ignore_signal(_: int, __: FrameType | None) -> None:
    """Unlike SIG_IGN this is not inherited by the processes of an engine."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve one engine over the socket that the parent process passed on."""
    parser = argparse.ArgumentParser(prog="rolloutbus.engine_worker.host")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--settings-json", required=True)
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    keep_freed_memory()
    # What is loaded stays: to look for what does not took a tenth of the start.
    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    # Ctrl-C goes to the whole foreground group; when to stop is the actor's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # How processes of SGLang tell that they have failed; what to do about it is decided elsewhere.
    signal.signal(signal.SIGQUIT, _ignore_signal)
    settings = msgspec.json.decode(options.settings_json, type=WorkerSettings)
    end = socket.socket(fileno=options.fd)
    code = 1
    try:
        code = uvloop.run(_serve(end, settings))
    finally:
        sys.stderr.flush()
        # An engine thread that hangs must not keep the process alive.
        os._exit(code)


if __name__ == "__main__":
    main()
