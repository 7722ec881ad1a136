"""The gateway for several principals: each API key has an application of its own."""

from collections.abc import Mapping
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from rolloutbus.gateway.exchange import as_json
from rolloutbus.gateway.keys.http_keys import bearer_of, holder_of
from rolloutbus.gateway.problems import error_body

OPEN = frozenset({"/health", "/"})
"""Paths that need no key: load balancers ask for health, and browsers for the page."""
OPEN_BELOW = "/page/"
"""The files of the page, which are the same for everybody: it asks for a key itself."""


class KeyedApp:
    """An ASGI application that hands each request to the one of its API key.

    What a principal may do, and its share, is the router's to say: each of the applications has a
    client with a key of its own.
    """

    def __init__(self, apps: Mapping[str, ASGIApp]) -> None:
        """`apps`: sha256 of an API key -> what answers it."""
        self._apps = apps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; 401 without a known key."""
        if scope["path"] in OPEN or scope["path"].startswith(OPEN_BELOW):
            app = next(iter(self._apps.values()))
        else:
            secret = bearer_of(scope["headers"])
            holder = holder_of(secret, self._apps)
            if holder is None:
                await _unknown(is_missing=not secret)(scope, receive, send)
                return
            app = self._apps[holder]
        await app(scope, receive, send)


def _unknown(*, is_missing: bool) -> ASGIApp:
    message = (
        "this gateway asks for an API key: Authorization: Bearer KEY"
        if is_missing
        else "this API key is not known here"
    )
    status = HTTPStatus.UNAUTHORIZED
    body = error_body(status, message, code="invalid_api_key")
    return as_json(body, status, {"WWW-Authenticate": "Bearer"})
