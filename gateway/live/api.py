"""`GET /` and what it loads: the page, its files, and the events that it draws."""

import secrets
from http import HTTPStatus
from importlib.resources import files

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from rolloutbus.bus.drawing.colours import VERSIONS, lanes_script
from rolloutbus.bus.wire.counters import ROUTER_COUNTERS
from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.gateway.live.open_page import OpenPage, OpenPages
from rolloutbus.gateway.live.view import MAX_STREAMS, Json, LiveView
from rolloutbus.replay.subscriber import Subscriber
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.fleet_events import FAULTS
from rolloutbus.trainer_adapter.openai.prompts import ChatTokenizer

MAX_PAGES = 32
"""Open at once; each is a client of the bus."""
MAX_MATCH = 256

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class LiveApi:
    """Answers a browser: with the page, and with all that happens while it is open."""

    def __init__(
        self, client: RolloutClient, tokenizer: ChatTokenizer | None, pages: OpenPages
    ) -> None:
        """Serve pages.

        Args:
            client: of the gateway; each open page is a further client with its keys.
            tokenizer: makes text of tokens; None: pages show token ids.
            pages: those of the whole gateway.
        """
        self._client = client
        self._tokenizer = tokenizer
        self._pages = pages
        self._files = _page_files()
        self.router = APIRouter()
        self.router.add_api_route("/", self.page, methods=["GET"])
        self.router.add_api_route("/page/{name}", self.file, methods=["GET"])
        self.router.add_api_route("/live", self.live, methods=["GET"])

    async def page(self) -> Response:
        """`GET /`: the page."""
        return self._file("index.html")

    async def file(self, name: str) -> Response:
        """`GET /page/NAME`: what the page loads."""
        return self._file(name)

    async def live(self, request: Request) -> Response:
        """`GET /live?match=`: server-sent events of the fleet and of what it samples."""
        for name in request.query_params:
            if name != "match":
                raise Refused(bad_request(name[:64], "there is no such parameter here; use match"))
        match = request.query_params.get("match", "")
        if len(match) > MAX_MATCH:
            raise Refused(bad_request("match", f"it is longer than {MAX_MATCH} characters"))
        if self._pages.n >= MAX_PAGES:
            message = f"{MAX_PAGES} pages are open at this gateway; close one"
            raise Refused(Problem("busy", message, "not_started"))
        view = LiveView(self._decode if self._tokenizer is not None else None, match)
        return OpenPage(self._pages, self._subscriber(), view, self._hello())

    def _subscriber(self) -> Subscriber:
        """One more client of the bus, with the gateway's keys."""
        ours = self._client.connection.settings
        name = f"{ours.name}-{secrets.token_hex(4)}"
        settings = msgspec.structs.replace(ours, name=name)
        return Subscriber(settings, also=[ours.name] if ours.security else [])

    def _hello(self) -> Json:
        return {
            "kind": "hello",
            "fleet": self._client.fleet,
            "has_text": self._tokenizer is not None,
            "max_streams": MAX_STREAMS,
            "faults": {name: ROUTER_COUNTERS[name] for name in FAULTS},
        }

    def _decode(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _file(self, name: str) -> Response:
        content = self._files.get(name)
        if content is None:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        kind = _TYPES[name.rpartition(".")[2]]
        return Response(content, headers=_HEADERS, media_type=f"{kind}; charset=utf-8")


def _page_files() -> dict[str, bytes]:
    """Name -> content; what pages draw with is the same as in a recorded timeline."""
    folder = files(__package__ or "gateway").joinpath("page")
    found = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
    colours = msgspec.json.encode({"versions": VERSIONS}).decode()
    return found | {"lanes.js": f"const colours = {colours};\n{lanes_script()}".encode()}
