"""Protects a gateway without keys: programs of this machine may use it, foreign pages may not.

A browser sends what any page says to any address, loopback too. So a page that somebody opens
could pause a fleet (a plain form needs no permission), and one whose name its owner points at
127.0.0.1 could read the answers as well. Other programs send none of what is looked at here.
"""

from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rolloutbus.gateway.exchange import as_json
from rolloutbus.gateway.keys.keyed_app import OPEN, OPEN_BELOW
from rolloutbus.gateway.problems import error_body

OWN_SITES = frozenset({"same-origin", "none"})
"""`Sec-Fetch-Site` of the gateway's own page, and of an address that somebody typed."""
FOREIGN_PAGE = (
    "a page of another origin may not use this gateway, which asks nobody for a key: send it from "
    "a program, or give the gateway --http-keys"
)


class KeylessApp:
    """An ASGI application that answers programs of this machine, and no pages of other sites."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; 403 if a foreign page sent it."""
        reason = _refusal(Headers(scope=scope), scope["path"])
        if reason:
            body = error_body(HTTPStatus.FORBIDDEN, reason, code="forbidden")
            await as_json(body, HTTPStatus.FORBIDDEN)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refusal(headers: Headers, path: str) -> str:
    """Why a request is refused; empty if it is not."""
    host = headers.get("host", "")  # HTTP/1.0 has none, and no browser speaks that
    if host and not _is_of_this_machine(host):
        return (
            f"this gateway asks nobody for a key, so it answers at no name, which a foreign page "
            f"could have: not at {host[:100]!r}. Send it to 127.0.0.1 or localhost, have the "
            "proxy before it say so in the header Host, or give it --http-keys"
        )
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        return FOREIGN_PAGE
    is_page = path in OPEN or path.startswith(OPEN_BELOW)
    if headers.get("sec-fetch-site", "none") not in OWN_SITES and not is_page:
        return FOREIGN_PAGE
    return ""


def _is_of_this_machine(host: str) -> bool:
    """Whether a `Host` is an IP address or localhost: names could be pointed here by anybody."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost" or name.endswith(".localhost"):
            return True
        ip_address(name)
    except ValueError:
        return False
    return True
