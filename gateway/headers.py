"""HTTP headers that choose how a request is sampled."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from fastapi import Request
from starlette.types import Scope

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import bad_request
from rolloutbus.gateway.exchange import Json

SESSION = b"x-session-id"
ROUTING_KEY = b"x-smg-routing-key"
"""SMG's name of it: requests with the same key go to the same worker."""
DEADLINE = b"x-deadline-ms"
VERSION_POLICY = b"x-smg-version-policy"
WEIGHT_VERSION = "x-smg-weight-version"
MIXED_VERSION = "x-smg-mixed-version"
POLICY_FORMS = "any, latest-only, min-version:V or max-staleness:K"


def versions_of_policy(policy: str) -> str:
    """Which weights will do, as the bus writes it.

    Args:
        policy: `any`, `latest-only`, `min-version:V` or `max-staleness:K`.

    Raises:
        Refused: it is none of these.
    """
    name, _, number = policy.strip().partition(":")
    if policy.strip() == "any":
        return "any"
    if policy.strip() == "latest-only":
        return "latest"
    if name in ("min-version", "max-staleness") and number.isascii() and number.isdigit():
        return f"{name.removesuffix('-version')}:{number}"
    message = f"{policy[:64]!r} is not {POLICY_FORMS}, with V and K whole numbers"
    raise Refused(bad_request(VERSION_POLICY.decode(), message))


def _deadline_s(value: str) -> float:
    if not (value.isascii() and value.isdigit() and int(value[:20])):
        message = f"{value[:64]!r} is not a whole number of milliseconds above 0"
        raise Refused(bad_request(DEADLINE.decode(), message))
    return int(value[:20]) / 1e3


def _session(value: str) -> str:
    return value


_READERS: Mapping[bytes, tuple[str, tuple[type, ...], Callable[[str], str | float]]] = {
    SESSION: ("session_id", (str,), _session),
    ROUTING_KEY: ("session_id", (str,), _session),
    DEADLINE: ("timeout", (int, float), _deadline_s),
    VERSION_POLICY: ("versions", (str,), versions_of_policy),
}
"""Header -> field of a body that says the same, its types, and how the value is read."""
CHOOSING = (SESSION, ROUTING_KEY, VERSION_POLICY)
"""Those that choose who samples an answer. Who asks again may have less time left: no deadline."""


def with_headers(request: Request, body: Json) -> Json:
    """The body, with the fields that headers say instead.

    What has a wrong type in the body stays as it is: whoever reads it says so.

    Raises:
        Refused: a header has a wrong value, or the body says otherwise.
    """
    sent = {name for name, _ in request.scope["headers"]}
    if sent.isdisjoint(_READERS):
        return body
    said: Json = {}
    sayer = dict.fromkeys(body, "the body")
    for header, value in request.scope["headers"]:
        if header not in _READERS:
            continue
        field, types, read = _READERS[header]
        before = said.get(field, body.get(field))
        found = read(value.decode("latin-1"))
        if before is not None and type(before) not in types:
            continue
        said[field] = found
        name = f"the header {header.decode()}"
        if before not in (None, said[field]):
            message = f"{name} and {sayer[field]} say different things; leave one out"
            raise Refused(bad_request(field, message))
        sayer[field] = name
    return {**body, **said}


def header_in(scope: Scope, name: bytes) -> str | None:
    """The first header of this name, which is in small letters; None: there is none.

    `Headers` of starlette does the same, and first copies all of them.
    """
    for each, value in scope["headers"]:
        if each == name:
            return value.decode("latin-1")
    return None


def version_headers(runs: Iterable[Sequence[int]]) -> dict[str, str]:
    """Headers that tell which weights sampled an answer: the newest, and whether there are others.

    Args:
        runs: (version, tokens) of all samples in it.
    """
    versions = {run[0] for run in runs}
    if not versions:
        return {}
    headers = {WEIGHT_VERSION: str(max(versions))}
    if len(versions) > 1:
        headers[MIXED_VERSION] = "true"
    return headers
