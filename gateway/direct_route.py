"""A route that FastAPI only finds: nothing is read, checked or injected for its endpoint."""

from collections.abc import Awaitable, Callable

from fastapi import Request, Response
from starlette.routing import Match, Route
from starlette.types import Scope

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoute(Route):
    """A fixed path of an endpoint that reads its request itself.

    What FastAPI does for an endpoint's arguments costs more than a short answer of ours does, and
    endpoints that sample have no such arguments.
    """

    def __init__(self, path: str, endpoint: Endpoint, *methods: str) -> None:
        """`path` has no parameters."""
        super().__init__(path, endpoint, methods=methods)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As `Route` does; `scope["route"]` is set too, which FastAPI does for its own only."""
        match, found = super().matches(scope)
        if match is not Match.NONE:
            found["route"] = self
        return match, found
