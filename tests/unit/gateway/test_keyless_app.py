"""A gateway without keys answers programs and its own page, and no other page of a browser."""

import asyncio
import json
from collections.abc import MutableMapping
from http import HTTPStatus
from typing import Any

import pytest

from rolloutbus.gateway.keys.keyless_app import KeylessApp

OWN = "127.0.0.1:8000"
Message = MutableMapping[str, Any]


async def _answer(_scope: Message, _receive: object, send: Any) -> None:  # noqa: ANN401
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def answer(path: str, **headers: str) -> tuple[int, Any]:
    """Status and body of a request that gets as far as the application, or not."""
    told: list[Message] = []

    async def send(message: Message) -> None:
        told.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    said = {"host": OWN, **{name.replace("_", "-"): value for name, value in headers.items()}}
    pairs = [(name.encode(), value.encode()) for name, value in said.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": pairs}
    asyncio.run(KeylessApp(_answer)(scope, receive, send))
    return told[0]["status"], json.loads(told[1]["body"])


def status(path: str, **headers: str) -> int:
    return answer(path, **headers)[0]


@pytest.mark.parametrize(
    "host", [OWN, "127.0.0.1", "localhost:8000", "LOCALHOST", "fleet.localhost", "[::1]:8000"]
)
def test_programs_are_answered_at_every_address_of_this_machine(host: str) -> None:
    assert status("/pause", host=host) == HTTPStatus.OK


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "[::1", "a b"]
)
def test_names_that_a_page_could_have_pointed_here_are_refused(host: str) -> None:
    assert status("/live", host=host) == HTTPStatus.FORBIDDEN


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:3000", ""])
def test_forms_of_other_pages_are_refused(origin: str) -> None:
    assert status("/pause", origin=origin) == HTTPStatus.FORBIDDEN


def test_its_own_page_is_answered() -> None:
    own = status("/live", origin=f"http://{OWN}", sec_fetch_site="same-origin")
    assert own == HTTPStatus.OK
    assert status("/live", sec_fetch_site="none") == HTTPStatus.OK


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pictures_in_other_pages_ask_for_nothing_but_links_lead_to_its_page(site: str) -> None:
    assert status("/pause", sec_fetch_site=site) == HTTPStatus.FORBIDDEN
    assert status("/", sec_fetch_site=site) == HTTPStatus.OK


def test_a_refusal_says_what_to_do() -> None:
    _, told = answer("/live", host="fleet.lan")
    assert told["error"]["code"] == "forbidden"
    assert "'fleet.lan'" in told["error"]["message"]
    assert "--http-keys" in told["error"]["message"]
