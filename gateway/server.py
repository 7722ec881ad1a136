"""A running gateway: a client of the bus, and an HTTP server that answers through it."""

import asyncio
import logging
import math
import os
import socket
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, cast

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rolloutbus.bus.actor.json_log import json_log_of
from rolloutbus.bus.actor.tracing import tracer_of
from rolloutbus.bus.wire.errors import ActorStopped, SettingsError
from rolloutbus.gateway.app import error_response, gateway_app
from rolloutbus.gateway.exchange import run_at_once
from rolloutbus.gateway.keys.http_keys import HttpKey, read_http_keys
from rolloutbus.gateway.keys.keyed_app import Holder, KeyedApp
from rolloutbus.gateway.keys.keyless_app import KeylessApp
from rolloutbus.gateway.live.open_page import OpenPages
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.gateway.sglang.labels import WeightLabels
from rolloutbus.gateway.traffic import CountTraffic, Traffic
from rolloutbus.gateway.trainer_groups import TrainerGroups
from rolloutbus.trainer_adapter.client.client import RolloutClient, settings_for
from rolloutbus.trainer_adapter.openai.formats import UNREAD, answer_format
from rolloutbus.trainer_adapter.openai.sglang_reader import SglangParsers, sglang_parsers

if TYPE_CHECKING:
    from rolloutbus.trainer_adapter.openai.prompts import ChatTokenizer

_log = logging.getLogger(__name__)

ABORT_S = 2
"""How long they may take to answer what they have once they are aborted; then they are cut off."""
BACKLOG = 2048


def listening_socket(
    host: str, port: int, *, asks_for_keys: bool = False, stall_s: float = 120.0
) -> socket.socket:
    """A TCP socket, on a loopback address unless the gateway asks for keys; port 0: a free one.

    The kernel ends a connection whose reader takes nothing for `stall_s` seconds, as if a
    client had left. Nothing above sees such a reader: its answer only waits to be sent.

    Raises:
        SettingsError: the address is no loopback address, or cannot be had.
    """
    place = "127.0.0.1" if host == "localhost" else host
    try:
        is_loopback = ip_address(place).is_loopback
    except ValueError:
        is_loopback = False
    if not (is_loopback or asks_for_keys):
        raise SettingsError(
            f"--host {host[:64]}: this gateway asks nobody for a key, so it serves loopback "
            "addresses only; give it --http-keys FILE, or put a proxy that checks who asks in "
            "front of 127.0.0.1"
        )
    family = socket.AF_INET6 if ":" in place else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1e3 * stall_s))
        bound.bind((place, port))
        bound.listen(BACKLOG)
        bound.settimeout(0.0)
    except OSError as error:
        bound.close()
        raise SettingsError(f"cannot listen at {host}:{port}: {error.strerror}") from error
    return bound


def address_of(bound: socket.socket) -> str:
    """Where HTTP clients connect."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def chat_tokenizer(directory: Path) -> "ChatTokenizer":
    """The tokenizer of transformers in a model's directory.

    Raises:
        SettingsError: it is not there, is no tokenizer, or transformers is not installed.
    """
    if not directory.is_dir():
        raise SettingsError(f"tokenizer: {directory} is no directory of a model")
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - an optional dependency
    except ModuleNotFoundError:
        raise SettingsError(
            "a tokenizer needs transformers: pip install rolloutbus[gateway,transformers]"
        ) from None
    try:
        load = cast("Callable[..., ChatTokenizer]", AutoTokenizer.from_pretrained)  # pyright: ignore[reportUnknownMemberType]
        return load(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        raise SettingsError(f"tokenizer: {directory}: {first_line}") from error


def _answer_parsers(settings: GatewaySettings, tokenizer: "ChatTokenizer") -> SglangParsers | None:
    """SGLang's parsers, if they are here; logs what nothing will read.

    Raises:
        SettingsError: a format is not known.
    """
    parsers = None
    if {settings.tool_format, settings.reasoning_format} != {UNREAD}:
        parsers = sglang_parsers()
    found = answer_format(settings.tool_format, settings.reasoning_format, tokenizer, parsers)
    if found.unrecognised:
        _log.warning("%s", found.unrecognised)
    return parsers


class _Fronts:
    """What answers HTTP: an application for each key of the bus, with a client of its own."""

    def __init__(self, settings: GatewaySettings, keys: Sequence[HttpKey]) -> None:
        """Read the tokenizer.

        Raises:
            SettingsError: it cannot be had, or a format is not known.
        """
        self._settings = settings
        self._keys = keys
        path = settings.model_path
        self._tokenizer = chat_tokenizer(Path(path)) if path else None
        self._parsers = (
            _answer_parsers(settings, self._tokenizer) if self._tokenizer is not None else None
        )
        self.traffic = Traffic()
        self.pages = OpenPages()
        self._labels = WeightLabels()
        self._clients: list[RolloutClient] = []

    async def connected(self, stack: AsyncExitStack) -> ASGIApp:
        """The application that finds the right one for each API key; the stack ends its clients.

        Raises:
            PeerLost: no router answered in time.
        """
        if not self._keys:
            holder = await self._connected("gateway", self._settings.key_file, stack)
            return KeylessApp(holder.app)
        return KeyedApp(
            {
                each.sha256: await self._connected(f"gateway-{each.name}", each.key_file, stack)
                for each in self._keys
            }
        )

    async def abort(self) -> None:
        """Have all requests under way answer what they have."""
        for client in self._clients:
            await client.abort()

    async def _connected(self, name: str, key_file: str, stack: AsyncExitStack) -> Holder:
        unique = "" if key_file else f"{name}-{os.getpid()}"
        client = RolloutClient(settings_for(self._settings.router, unique, key_file))
        self._clients.append(await stack.enter_async_context(client))
        groups = TrainerGroups(client, joins_any_address=bool(self._keys))
        stack.push_async_callback(groups.close)
        app = gateway_app(
            client,
            self._settings,
            self._tokenizer,
            self.traffic,
            self._parsers,
            pages=self.pages,
            labels=self._labels,
            groups=groups,
        )
        return Holder(client, app)


async def run_gateway(settings: GatewaySettings, on_ready: Callable[[str], None]) -> None:
    """Run a gateway until cancelled; then requests under way get `drain_s` seconds.

    Args:
        settings: see there.
        on_ready: called with the address for HTTP clients once it answers.

    Raises:
        SettingsError: the address or the tokenizer cannot be had, or traces.
        PeerLost: no router answered in time.
    """
    # FastAPI tells of each HTTP request by itself, where its process has a tracer, and goes on the
    # caller's trace; and the client goes on FastAPI's.
    name = f"gateway-{os.getpid()}"
    tracer_of("gateway", name)
    log = json_log_of({"role": "gateway", "actor": name})
    keys = read_http_keys(Path(settings.http_keys)) if settings.http_keys else []
    if keys and settings.key_file:
        raise SettingsError("each API key names a key of the bus; leave --key out")
    fronts = _Fronts(settings, keys)
    bound = listening_socket(
        settings.host, settings.port, asks_for_keys=bool(keys), stall_s=settings.stall_s
    )
    async with AsyncExitStack() as stack:
        stack.enter_context(closing(bound))
        await serve(
            CountTraffic(_answered_at_the_end(await fronts.connected(stack)), fronts.traffic, log),
            bound,
            lambda: on_ready(address_of(bound)),
            fronts.pages.ending.set,
            fronts.abort,
            drain_s=settings.drain_s,
        )


async def serve(
    app: ASGIApp,
    bound: socket.socket,
    on_ready: Callable[[], None],
    on_end: Callable[[], None],
    abort: Callable[[], Awaitable[object]],
    *,
    drain_s: float,
) -> None:
    """Serve until cancelled; then requests under way get `drain_s` seconds.

    Args:
        app: what answers.
        bound: from `listening_socket`.
        on_ready: called once requests are answered.
        on_end: called when no more are taken: what would go on for ever is to end.
        abort: called when requests under way had their time; has them answer what they have.
        drain_s: how long requests under way may take then.
    """
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # nothing here asks for a client's address
        timeout_graceful_shutdown=math.ceil(drain_s) + ABORT_S,
    )
    server = _Server(config, on_ready)
    serving = asyncio.ensure_future(server.serve([bound]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        on_end()
        await asyncio.wait({serving}, timeout=drain_s)
        if not serving.done():
            await abort()
        await serving


def _answered_at_the_end(app: ASGIApp) -> ASGIApp:
    """Returns `app`; a request that is cut off at the end of the server is told so, if it can be.

    Its reader is too slow, or the fleet does not answer any more.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await app(scope, receive, note)
        except asyncio.CancelledError:  # the server alone cancels
            if not has_begun:
                ended = error_response(ActorStopped("the gateway ended", outcome="unknown"))
                run_at_once(ended(scope, receive, send))

    return answer


class _Server(uvicorn.Server):
    """Leaves signals to the command, and tells when it is ready."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()
