"""`/metrics` of a real fleet moves with what happens there."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# The parser of OpenMetrics leaves its parameter untyped.

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from rolloutbus import Fleet, connect
from rolloutbus.bus.actor.supervisor import RestartRule
from rolloutbus.launcher.settings import FleetSettings
from tests.integration.gateway_process import Gateway, gateway
from tests.integration.live_fleet import DEADLINE_S, PACE_S, STEADY_HOST, UNHURRIED

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

NEVER_S = 600.0
"""Whatever is killed stays away."""
SAMPLING = {"max_new_tokens": 20, "ignore_eos": True}


class Scrape:
    """What Prometheus reads."""

    def __init__(self, text: str) -> None:
        self.families = {each.name: each for each in text_string_to_metric_families(text)}
        self._samples = [each for family in self.families.values() for each in family.samples]

    def __call__(self, name: str, **labels: str) -> float | None:
        """The sum of all samples with these labels; None: there is none."""
        found = [
            sample.value
            for sample in self._samples
            if sample.name == f"rolloutbus_{name}" and labels.items() <= sample.labels.items()
        ]
        return sum(found) if found else None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    settings = FleetSettings(
        workers=2, engine="fake", store=False, lease=UNHURRIED, host=STEADY_HOST
    )
    restarts = RestartRule(first_s=NEVER_S, max_s=NEVER_S)
    async with Fleet(settings, restarts=restarts) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(fleet: Fleet) -> AsyncIterator[Gateway]:
    async with gateway("--address", fleet.address) as running:
        yield running


async def scrape(served: Gateway) -> Scrape:
    reply = await served.ask("GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    return Scrape(reply.body.decode())


async def scrape_when(served: Gateway, is_so: Callable[[Scrape], object]) -> Scrape:
    """The first scrape of which `is_so` holds; a busy router may miss one or the other."""
    async with asyncio.timeout(DEADLINE_S):
        found = await scrape(served)
        while not is_so(found):
            await asyncio.sleep(PACE_S)  # a scrape is an answer, not an event
            found = await scrape(served)
    return found


def router_answers(found: Scrape) -> bool:
    return found("router_up") == 1


async def generate(served: Gateway, **more: object) -> Any:  # noqa: ANN401 - as it answers
    body = {"input_ids": [5, 6], "sampling_params": SAMPLING, **more}
    reply = await served.ask("POST", "/generate", body)
    assert reply.status == 200, reply.body
    return reply


async def test_an_idle_fleet_has_measured_nothing(served: Gateway) -> None:
    before = await scrape_when(
        served,
        lambda found: found("worker_slots", worker="w0") and found("worker_slots", worker="w1"),
    )

    assert before("router_up") == 1
    assert before("worker_state", worker="w0", state="ready") == 1
    assert before("worker_tokens_total") == 0
    assert before("worker_time_to_first_token_seconds_count") is None
    assert before("router_fenced_total") == 0
    assert before("committed_version") is None


async def test_figures_move_with_requests(served: Gateway) -> None:
    before = await scrape(served)
    await generate(served)
    await generate(served, stream=True)
    await served.ask("GET", "/no/such/thing")
    wrong = await served.ask("POST", "/generate", {"input_ids": [5], "what": 1})

    # An engine tells its steps by itself, later than the worker tells its tokens.
    after = await scrape_when(
        served,
        lambda found: (
            found("worker_tokens_total") == 40
            and found("worker_finished_requests_total") == 2
            and (found("worker_steps_total") or 0) >= 20
        ),
    )

    assert wrong.status == 400
    assert after("worker_time_to_first_token_seconds_count") == 2
    assert after("worker_inter_token_latency_seconds_count") == 38
    assert after("worker_finished_requests_total") == after("worker_requests_total") == 2
    assert after("worker_prompt_tokens_total") == 4
    assert after("gateway_requests_total", endpoint="/generate", code="200") == 2
    assert after("gateway_requests_total", endpoint="/generate", code="400") == 1
    assert after("gateway_requests_total", endpoint="unknown", code="404") == 1
    assert after("gateway_time_to_first_token_seconds_count", endpoint="/generate") == 1
    assert after("gateway_request_duration_seconds_count", endpoint="/generate") == 3
    assert after("gateway_open_requests") == 1, "this one"
    for name, growth in (("tokens", 40), ("prompt_tokens", 4)):
        counted = f"gateway_client_{name}_total"
        assert (after(counted) or 0) - (before(counted) or 0) == growth


async def test_openmetrics_is_for_who_asks(served: Gateway) -> None:
    await scrape_when(served, router_answers)
    host, _, port = served.url.removeprefix("http://").partition(":")
    accept = "Accept: application/openmetrics-text; version=1.0.0"
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET /metrics HTTP/1.0\r\nHost: {host}\r\n{accept}\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()

    families = list(openmetrics_families(body.decode()))

    assert b"application/openmetrics-text" in head
    assert "rolloutbus_worker_tokens" in {each.name for each in families}


async def test_a_fleet_without_a_gateway_has_a_command_for_its_metrics(fleet: Fleet) -> None:
    async with gateway("--address", fleet.address, command="metrics") as running:
        found = await scrape_when(running, router_answers)
        other = await running.ask("POST", "/generate", {"input_ids": [5]})
        assert await running.end() == 130

    assert found("router_up") == 1
    assert found("worker_slots", worker="w0")
    assert other.status == 404


async def test_no_label_names_a_request(served: Gateway) -> None:
    await generate(served, rid="a-name-of-mine", session_id="a-session")
    found = await scrape_when(served, router_answers)

    labels = {
        name
        for family in found.families.values()
        for each in family.samples
        for name in each.labels
    }

    assert labels == {"worker", "policy", "state", "endpoint", "code", "le"}


async def test_a_paused_worker_is_shown_as_blocked(served: Gateway, fleet: Fleet) -> None:
    async with connect(fleet.address) as client:
        await client.pause(target="w1")
        paused = await scrape_when(
            served, lambda found: found("worker_blocked", worker="w1", reason="paused") == 1
        )
        await client.resume(target="w1")

    assert paused("worker_blocked", worker="w0") is None
    await scrape_when(
        served,
        lambda found: (
            found("worker_blocked") is None
            and found("worker_state", worker="w1", state="ready") == 1
        ),
    )


async def test_a_killed_worker_is_shown_as_gone(served: Gateway, fleet: Fleet) -> None:
    before = (await scrape_when(served, router_answers))("router_expired_leases_total") or 0
    fleet.kill("w1")

    gone = await scrape_when(served, lambda found: found("worker_state", worker="w1", state="gone"))

    assert gone("worker_tokens_total", worker="w1") is None
    assert gone("worker_state", worker="w0", state="ready") == 1
    assert (gone("router_expired_leases_total") or 0) > before


async def test_a_silent_router_is_down_and_the_gateway_tells(served: Gateway, fleet: Fleet) -> None:
    router = fleet.pids["router"]
    os.kill(router, signal.SIGSTOP)
    try:
        silent = await scrape(served)
    finally:
        os.kill(router, signal.SIGCONT)

    assert silent("router_up") == 0
    assert silent("worker_state") is None
    assert silent("gateway_requests_total", endpoint="/generate", code="200")
    await scrape_when(served, router_answers)
