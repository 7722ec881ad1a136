"""The gateway for several principals: each API key has an application of its own."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from rolloutbus.gateway.exchange import as_json
from rolloutbus.gateway.keys.http_keys import bearer_of, holder_of
from rolloutbus.gateway.problems import error_body
from rolloutbus.trainer_adapter.client.client import RolloutClient

OPEN = frozenset({"/health", "/"})
"""Paths that need no key: load balancers ask for health, and browsers for the page."""
OPEN_BELOW = "/page/"
"""The files of the page, which are the same for everybody: it asks for a key itself."""

NO_KEY = "this gateway asks for an API key: Authorization: Bearer KEY"
NOT_KNOWN = "this API key is not known here"
REVOKED = (
    "the principal of this API key has no rights in the fleet any more; let it in with `rolloutbus "
    "keys allow`, then start this gateway again"
)


class Holder(NamedTuple):
    """The holder of one API key: its client of the bus, and the application that answers it."""

    client: RolloutClient
    """As whom the key acts."""
    app: ASGIApp
    """What answers it, through that client."""

    @property
    def is_shut_out(self) -> bool:
        """Whether the principal was revoked, or may be no client any more."""
        return self.client.connection.is_shut_out


class KeyedApp:
    """An ASGI application that hands each request to the one of its API key.

    What a principal may do, and its share, is the router's to say: each of the applications has a
    client with a key of its own.
    """

    def __init__(self, holders: Mapping[str, Holder]) -> None:
        """`holders`: by the sha256 of their API keys, at least one."""
        self._holders = holders

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; 401 without a key that is known and not revoked."""
        if scope["path"] in OPEN or scope["path"].startswith(OPEN_BELOW):
            everybody = list(self._holders.values())
            holder = next((each for each in everybody if not each.is_shut_out), everybody[0])
            await holder.app(scope, receive, send)
            return
        secret = bearer_of(scope["headers"])
        digest = holder_of(secret, self._holders)
        if digest is None:
            answer = _unauthorized(NOT_KNOWN if secret else NO_KEY)
        elif self._holders[digest].is_shut_out:
            answer = _unauthorized(REVOKED)
        else:
            answer = self._holders[digest].app
        await answer(scope, receive, send)


def _unauthorized(message: str) -> ASGIApp:
    status = HTTPStatus.UNAUTHORIZED
    body = error_body(status, message, code="invalid_api_key")
    return as_json(body, status, {"WWW-Authenticate": "Bearer"})
