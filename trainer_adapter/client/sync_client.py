"""The client of the bus for plain scripts: the same names as `RolloutClient`, blocking."""

import contextlib
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import ActorStopped, LocalProtocolError, cannot_be_pickled
from rolloutbus.trainer_adapter.client.asks import ask_of
from rolloutbus.trainer_adapter.client.blocking import (
    LoopThread,
    Twin,
    at_once,
    blocking,
    blocking_overloads,
    submitted,
)
from rolloutbus.trainer_adapter.client.client import (
    ANOTHER,
    ConnectOptions,
    RolloutClient,
    settings_for,
)
from rolloutbus.trainer_adapter.client.core.effects import FleetChanged
from rolloutbus.trainer_adapter.client.core.session_book import HeldSession
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from rolloutbus.trainer_adapter.client.session import Session
from rolloutbus.trainer_adapter.client.transcript import Transcript

T = TypeVar("T")


@strict(options=ask_of)
class SyncSession(Twin[Session]):
    """Blocking turns of one session; see `Session`, which is behind it as `session`.

    A context manager that opens it and closes it.
    """

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(
            self, f"the router's address and the name {self.session.name!r}, and open it there"
        )

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> Self:
        """Takes a place without `with`; call `close` to give it back."""
        self.loop.wait(self.session.open())
        return self

    @property
    def session(self) -> Session:
        """Where it is, and how often it moved."""
        return self.original

    @property
    def transcript(self) -> Transcript:
        """Its turns so far."""
        return self.session.transcript

    close = at_once(Session.close)
    renew = blocking(Session.renew)
    generate = blocking(Session.generate)
    stream = blocking(Session.stream)
    append = at_once(Session.append)
    sample = blocking(Session.sample)
    sample_stream = blocking(Session.sample_stream)
    replace = blocking(Session.replace)
    rewind = at_once(Session.rewind)
    branch = at_once(
        Session.branch,
        lambda branch, loop: SyncSession(branch, loop),  # noqa: PLW0108 - the class is not there yet
    )


@strict(options=ask_of)
class SyncRolloutClient(Twin[RolloutClient]):
    """Blocking rollouts, and control of the fleet. A context manager; see `connect_sync`.

    The methods have the arguments and errors of those of `RolloutClient`, and wait for what these
    are awaited for. They may be called from several threads.
    """

    def __init__(self, settings: ClientSettings) -> None:
        super().__init__(RolloutClient(settings), LoopThread(f"rolloutbus-{settings.name}"))

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(self, ANOTHER)

    @property
    def connect_options(self) -> ConnectOptions:
        """What another process needs for a client here; see `RolloutClient.connect_options`."""
        return self.original.connect_options

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> Self:
        """Connects without `with`; call `close` at the end. See `RolloutClient.open`."""
        if self.loop.is_running:
            raise LocalProtocolError("the client is open already; a client opens once")
        self.loop.start()
        try:
            self.loop.wait(self.original.open())
        except BaseException:
            self.loop.stop()
            raise
        return self

    def close(self) -> None:
        """Closes the client: stops open requests. Idempotent.

        Raises:
            LocalProtocolError: a listener calls it, in the client's own thread; the client is open.
        """
        if self.loop.is_running:
            self.loop.check_thread()
            try:
                with contextlib.suppress(ActorStopped):  # another thread closes it
                    self.loop.wait(self.original.close())
            finally:
                self.loop.stop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run anything else that uses `async_client` on its loop, e.g. what its refs are asked.

        Raises:
            ActorStopped: the client is not open, or was opened before this process was forked.
        """
        return self.loop.wait(coroutine)

    @property
    def async_client(self) -> RolloutClient:
        """The client behind this one; only to be used on its own loop, through `run`."""
        return self.original

    @property
    def fleet(self) -> str:
        """Identity of the fleet, e.g. for `connect(fleet=…)`; empty until the router reports it."""
        return self.original.fleet

    @property
    def other_fleet(self) -> FleetChanged | None:
        """(former, fleet) while a fleet answers that is not accepted; see `accept_fleet`."""
        return self.original.other_fleet

    @property
    def sessions(self) -> Mapping[str, HeldSession]:
        """The sessions that are open, by name: where each is, and how often it moved."""
        return self.original.sessions

    on_other_fleet = at_once(RolloutClient.on_other_fleet)
    accept_fleet = at_once(RolloutClient.accept_fleet)

    generate = blocking(RolloutClient.generate)
    submit = submitted(RolloutClient.generate)
    """`generate` without waiting: returns a `concurrent.futures.Future` of the rollout."""
    generate_batch = blocking_overloads(RolloutClient.generate_batch)
    stream = blocking(RolloutClient.stream)
    session = at_once(RolloutClient.session, SyncSession)
    abort = blocking(RolloutClient.abort)
    abort_policy = blocking(RolloutClient.abort_policy)
    reattach = blocking(RolloutClient.reattach)
    collect = blocking(RolloutClient.collect)
    follow = blocking(RolloutClient.follow)

    status = blocking(RolloutClient.status)
    server_info = blocking(RolloutClient.server_info)
    facts = blocking(RolloutClient.facts)
    get_load = blocking(RolloutClient.get_load)
    pause = blocking(RolloutClient.pause)
    resume = blocking(RolloutClient.resume)
    sleep = blocking(RolloutClient.sleep)
    wake_up = blocking(RolloutClient.wake_up)
    flush_cache = blocking(RolloutClient.flush_cache)
    reset_prefix_cache = blocking(RolloutClient.reset_prefix_cache)
    shutdown_worker = blocking(RolloutClient.shutdown_worker)
    start_profile = blocking(RolloutClient.start_profile)
    stop_profile = blocking(RolloutClient.stop_profile)

    score = blocking(RolloutClient.score)
    embed = blocking(RolloutClient.embed)
    compute_similarity = blocking(RolloutClient.compute_similarity)
    rerank = blocking(RolloutClient.rerank)

    check_weights = blocking(RolloutClient.check_weights)
    get_weights = blocking(RolloutClient.get_weights)
    list_weights = blocking(RolloutClient.list_weights)
    save_weights = blocking(RolloutClient.save_weights)
    load_lora = blocking(RolloutClient.load_lora)
    unload_lora = blocking(RolloutClient.unload_lora)


@strict()
def connect_sync(
    address: str, *, name: str = "", key_file: str | Path = "", fleet: str = ""
) -> SyncRolloutClient:
    """Make a blocking client; use it with `with`. Arguments as of `connect`."""
    return SyncRolloutClient(settings_for(address, name, key_file, fleet))
