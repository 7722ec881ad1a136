"""Structured logs of a fleet: a request is found in each process's log by its name and trace."""

import asyncio
import functools
import json
import sys
import urllib.request
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

import rolloutbus
from rolloutbus.bus.actor.process import read_notice
from rolloutbus.launcher.plan import environment
from tests.integration.live_fleet import DEADLINE_S, PATIENT, START_S

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLERS_SPAN = "00f067aa0ba902b7"

Line = dict[str, Any]


def lines_in(logs: Path, name: str) -> list[Line]:
    return [json.loads(line) for line in (logs / f"{name}.log").read_text().splitlines()]


def only(lines: list[Line], **wanted: object) -> Line:
    (found,) = [line for line in lines if wanted.items() <= line.items()]
    return found


async def test_lines_of_one_request_are_found_by_its_session_rid_and_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROLLOUTBUS_LOG", "json")
    headers = {
        "x-session-id": "talk",
        "x-request-id": "mine",
        "traceparent": f"00-{TRACE}-{CALLERS_SPAN}-01",
    }
    options = {"max_new_tokens": 5}
    async with rolloutbus.up(
        workers=1,
        engine="fake",
        http=0,
        store=False,
        run_dir=tmp_path / "run",
        keep_logs=True,
        lease=PATIENT,
    ) as fleet:
        body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": options}).encode()
        url = f"{fleet.http}/generate"
        asked = urllib.request.Request(url, body, headers)  # noqa: S310 - the gateway's own
        opened = functools.partial(urllib.request.urlopen, asked, timeout=DEADLINE_S)
        (await asyncio.to_thread(opened)).close()

    logs = tmp_path / "run" / "logs"
    gateway, router, worker = (lines_in(logs, name) for name in ("gateway", "router", "w0"))
    exchange = only(gateway, event="http request", request_id="mine")
    request = only(gateway, event="request generate")
    route = only(router, event="route generate")
    execution = only(worker, event="execute generate")
    assert (exchange["endpoint"], exchange["status"]) == ("/generate", 200)
    assert exchange["parent"] == CALLERS_SPAN
    assert request["parent"] == exchange["span"]
    assert route["parent"] == request["span"]
    every = (exchange, request, route, execution)
    assert {line["trace"] for line in every} == {TRACE}
    assert {line["session"] for line in every} == {"talk"}
    assert {line["rid"] for line in every[1:]} == {request["rid"]}
    assert {line["outcome"] for line in every[1:]} == {"finished"}
    assert {line["level"] for line in every} == {"info"}
    assert execution["actor"] == "w0"
    assert execution["weight_versions"] == [0]
    assert execution["sampled_tokens"] == 5
    assert all(line["duration_ms"] > 0 for line in every)


async def test_why_a_process_ends_is_a_line_of_json_and_still_told_to_its_parent() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolloutbus.router", "--settings-json", '{"no_such_thing": 1}'),
        env=environment() | {"ROLLOUTBUS_LOG": "json"},
        stdout=PIPE,
        stderr=PIPE,
    )
    async with asyncio.timeout(START_S):
        told, log = await process.communicate()
    (line,) = map(json.loads, log.splitlines())
    assert (line["level"], line["event"], line["pid"]) == ("error", "message", process.pid)
    assert "no_such_thing" in line["message"]
    assert read_notice(told) == f"error: {line['message']}"


async def test_a_failed_request_is_a_line_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of a client's own process, from a process of its own."""
    monkeypatch.setenv("ROLLOUTBUS_LOG", "json")
    script = (
        "import asyncio, sys, rolloutbus\n"
        "async def main():\n"
        "    async with rolloutbus.connect(sys.argv[1]) as client:\n"
        "        try:\n"
        "            await client.generate([1], {'max_new_tokens': 4}, policy='nobody', "
        "deadline_s=0.2)\n"
        "        except rolloutbus.errors.BusError:\n"
        "            pass\n"
        "asyncio.run(main())\n"
    )
    async with rolloutbus.up(workers=1, engine="fake", store=False) as fleet:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, fleet.address, stderr=PIPE
        )
        async with asyncio.timeout(START_S):
            _, told = await process.communicate()
    assert process.returncode == 0, told
    line = only(
        [json.loads(each) for each in told.splitlines() if each[:1] == b"{"],
        event="request generate",
    )
    assert line["level"] == "error"
    assert line["policy"] == "nobody"
    assert line["outcome"] != "finished"
    assert line["error"]
