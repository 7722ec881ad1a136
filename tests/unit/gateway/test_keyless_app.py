"""A gateway without keys answers programs and its own page, and no other page of a browser."""

from http import HTTPStatus

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from rolloutbus.gateway.keys.keyless_app import KeylessApp


async def _answer(request: Request) -> Response:
    del request
    return PlainTextResponse("done")


ROUTES = [Route(path, _answer, methods=["GET", "POST"]) for path in ("/", "/live", "/pause")]
OWN = "127.0.0.1:8000"


def status(method: str, path: str, **headers: str) -> int:
    said = {"host": OWN, **{name.replace("_", "-"): value for name, value in headers.items()}}
    client = TestClient(KeylessApp(Starlette(routes=ROUTES)))
    return client.request(method, path, headers=said).status_code


@pytest.mark.parametrize(
    "host", [OWN, "127.0.0.1", "localhost:8000", "LOCALHOST", "fleet.localhost", "[::1]:8000"]
)
def test_programs_are_answered_at_every_address_of_this_machine(host: str) -> None:
    assert status("POST", "/pause", host=host) == HTTPStatus.OK


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "[::1", "a b"]
)
def test_names_that_a_page_could_have_pointed_here_are_refused(host: str) -> None:
    assert status("GET", "/live", host=host) == HTTPStatus.FORBIDDEN


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:3000", ""])
def test_forms_of_other_pages_are_refused(origin: str) -> None:
    assert status("POST", "/pause", origin=origin) == HTTPStatus.FORBIDDEN


def test_its_own_page_is_answered() -> None:
    own = status("POST", "/live", origin=f"http://{OWN}", sec_fetch_site="same-origin")
    assert own == HTTPStatus.OK
    assert status("GET", "/live", sec_fetch_site="none") == HTTPStatus.OK


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pictures_in_other_pages_ask_for_nothing_but_links_lead_to_its_page(site: str) -> None:
    assert status("GET", "/pause", sec_fetch_site=site) == HTTPStatus.FORBIDDEN
    assert status("GET", "/", sec_fetch_site=site) == HTTPStatus.OK


def test_a_refusal_says_what_to_do() -> None:
    client = TestClient(KeylessApp(Starlette(routes=ROUTES)))
    told = client.get("/live", headers={"host": "fleet.lan"}).json()["error"]
    assert told["code"] == "forbidden"
    assert "'fleet.lan'" in told["message"]
    assert "--http-keys" in told["message"]
