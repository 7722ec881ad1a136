"""Requests and updates as a collector of OpenTelemetry sees them, from a whole fleet."""

import asyncio
import subprocess
from collections.abc import Iterator

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from rolloutbus import Fleet, RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.launcher.settings import UpOptions
from tests.integration.collector import Collector, Seen, collector
from tests.integration.live_fleet import DEADLINE_S, Streamed
from tests.integration.token_limit import TokenLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {
    "workers": 2,
    "engine": "fake",
    "engine_options": {"slots": 4, "step_s": 0.002},
    "http": 0,
}
CALLER = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLERS_SPAN = "00f067aa0ba902b7"
PHASES = {"transfer", "commit", "swap"}


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[Collector]:
    """Traces are on for all processes of this module, this one included."""
    with collector() as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLOUTBUS_TRACES", "otlp")
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield running
        provider = trace.get_tracer_provider()
        assert isinstance(provider, TracerProvider)
        provider.shutdown()


def named(seen: list[Seen], name: str) -> list[Seen]:
    return [each for each in seen if each.name == name]


def only(seen: list[Seen], name: str) -> Seen:
    (found,) = named(seen, name)
    return found


async def test_one_trace_follows_a_request_from_client_to_worker(
    client: RolloutClient, collected: Collector
) -> None:
    rollout = await client.generate(
        [1, 2, 3], SamplingParams(max_new_tokens=5), deadline_s=DEADLINE_S, session="talk"
    )

    names = ("request generate", "route generate", "wait", "attempt", "execute generate")
    seen = await asyncio.to_thread(collected.trace_with, rollout.rid, *names)

    request, route = only(seen, "request generate"), only(seen, "route generate")
    attempt, execution = only(seen, "attempt"), only(seen, "execute generate")
    assert [each.service for each in (request, route, attempt, execution)] == [
        *("client", "router", "router", "worker"),
    ]
    assert (route.parent, attempt.parent, execution.parent) == (
        *(request.span, route.span, attempt.span),
    )
    assert only(seen, "wait").parent == route.span
    assert {each.trace for each in seen} == {request.trace}
    assert request.about["session"] == "talk"
    assert attempt.about["member"] == rollout.worker == execution.about["actor"]
    assert (execution.about["prompt_tokens"], execution.about["sampled_tokens"]) == ("3", "5")
    assert execution.about["weight_versions"] == "0"
    assert {each.about["outcome"] for each in (request, route, attempt, execution)} == {"finished"}


async def test_a_killed_worker_shows_as_a_second_attempt_in_the_same_trace(
    fleet: Fleet, client: RolloutClient, collected: Collector, token_limit: TokenLimit
) -> None:
    with token_limit.at(3):
        streamed = Streamed(client, [4, 5, 6], SamplingParams(max_new_tokens=8, ignore_eos=True))
        await streamed.reached(3)
        first = streamed.worker
        fleet.kill(first)
    rollout = await streamed.rollout()

    names = ("request generate", "route generate", "attempt", "attempt", "execute generate")
    seen = await asyncio.to_thread(collected.trace_with, rollout.rid, *names)

    route = only(seen, "route generate")
    tries = sorted(named(seen, "attempt"), key=lambda each: each.about["try"])
    assert [each.about["outcome"] for each in tries] == ["lost", "finished"]
    assert [each.about["try"] for each in tries] == ["1", "2"]
    assert [each.about["member"] for each in tries] == [first, rollout.worker]
    assert {each.parent for each in tries} == {route.span}
    assert only(seen, "execute generate").parent == tries[1].span
    assert only(seen, "request generate").about["attempts"] == "2"


async def test_an_update_shows_its_phases_at_each_worker(
    client: RolloutClient, collected: Collector
) -> None:
    weights = {"embed.weight": torch.ones(8, 4), "head.weight": torch.ones(4)}
    published = await WeightPublisher(client).publish(weights, require="all", deadline_s=DEADLINE_S)

    def publication(seen: list[Seen]) -> list[Seen]:
        return [
            each
            for each in named(seen, "request publish_version")
            if each.about["version"] == str(published.version)
        ]

    seen = await asyncio.to_thread(collected.until, lambda seen: bool(publication(seen)))
    (request,) = publication(seen)
    steps = ["execute prepare_update", "execute commit_update"] * 2
    seen = await asyncio.to_thread(
        collected.trace_with, request.about["rid"], "route publish_version", *steps
    )

    route = only(seen, "route publish_version")
    assert route.parent == request.span
    assert route.events[0] == "announced"
    phases = [each for each in seen if "phase" in each.about]
    assert {each.about["phase"] for each in phases} == PHASES
    assert {each.parent for each in phases} == {route.span}
    assert {each.about["version"] for each in phases} == {str(published.version)}
    for kind in ("prepare_update", "commit_update"):
        assert {each.about["member"] for each in named(seen, kind)} == {"w0", "w1"}
        parents = {each.parent for each in named(seen, f"execute {kind}")}
        assert parents == {each.span for each in named(seen, kind)}
    assert all("attested" in each.events for each in named(seen, "commit_update"))


async def test_the_gateway_goes_on_the_trace_of_its_caller(
    fleet: Fleet, collected: Collector
) -> None:
    curl = await asyncio.create_subprocess_exec(
        *("curl", "-sS", "-H", f"traceparent: 00-{CALLER}-{CALLERS_SPAN}-01"),
        *("-H", "Content-Type: application/json", f"{fleet.http}/generate"),
        *("-d", '{"input_ids": [7, 8, 9], "sampling_params": {"max_new_tokens": 4}}'),
        stdout=subprocess.PIPE,
    )
    async with asyncio.timeout(DEADLINE_S):
        said, _ = await curl.communicate()
    assert b"meta_info" in said, said

    def has_come(seen: list[Seen]) -> bool:
        names = {each.name for each in seen if each.trace == CALLER}
        return names >= {"POST /generate", "request generate", "execute generate"}

    seen = await asyncio.to_thread(collected.until, has_come)
    ours = [each for each in seen if each.trace == CALLER]
    served = only(ours, "POST /generate")
    assert (served.service, served.parent) == ("gateway", CALLERS_SPAN)
    assert served.about["http.response.status_code"] == "200"
    assert only(ours, "request generate").parent == served.span
