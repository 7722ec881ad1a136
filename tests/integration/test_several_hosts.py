"""Several hosts, each a network namespace, with keys: what a user types, and what fails."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from rolloutbus.bus.actor.process import ActorExit
from tests.integration.hosts import CLI, START_S, Host, hosts

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(3 * START_S),
    pytest.mark.asyncio(loop_scope="module"),
]

N_TOKENS = 12
RELAY_PORT = 7781
STEP_S = "step_s=0.03"
ENGINE = ("--engine", "fake", "-e", STEP_S)
LIST = ("-l", "keys/allow.json")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def far(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator["TwoHosts"]:
    """A fleet on one host, a worker on another one, and a third host for its clients."""
    with hosts(3, tmp_path_factory.mktemp("hosts")) as (first, second, third):
        address = f"tcp://{first.address}:7777"
        up = ("up", "--secure", "keys", "--address", address, *ENGINE, "-n", "1")
        async with first.serving("Ctrl-C", *up):
            token = await first.bus("keys", "invite", "host-b", "--role", "worker", *LIST)
            await second.bus("keys", "join", token, "--dir", "keys")
            worker = ("worker", "--name", "host-b", "--key", "keys/host-b.key", *ENGINE)
            worker += ("--relay", f"tcp://{second.address}:{RELAY_PORT}")
            async with second.serving('"ready"', *worker):
                yield TwoHosts(first, second, third, token)


class TwoHosts:
    """The hosts, and the token that the second one has joined with."""

    def __init__(self, first: Host, second: Host, third: Host, token: str) -> None:
        self.first, self.second, self.third = first, second, third
        self.used_token = token


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def report(far: TwoHosts) -> dict[str, Any]:
    """What a trainer on the third host has seen, whose key came after the worker had started."""
    token = await far.first.bus("keys", "invite", "trainer", "--role", "trainer", *LIST)
    await far.third.bus("keys", "join", token, "--dir", "keys")
    relay = f"tcp://{far.second.address}:{RELAY_PORT}"
    return await far.third.reports(
        "tests.integration.far_trainer", "keys/trainer.key", "host-b", relay
    )


async def test_six_commands_make_a_fleet_of_two_hosts_and_a_trainer(
    far: TwoHosts, report: dict[str, Any]
) -> None:
    # up, invite, join, worker; and for the trainer invite and join.
    shown = await far.third.bus("status", "--key", "keys/trainer.key")
    assert "host-b" in shown
    assert report["workers"] == ["host-b", "w0"]


async def test_a_stream_arrives_from_another_host_before_its_result(report: dict[str, Any]) -> None:
    assert sum(map(len, report["deltas"])) == N_TOKENS
    # Without the stream there would be one delta, with the result. A busy reader finds several
    # tokens in one.
    assert len(report["deltas"]) > 1


async def test_weights_are_committed_on_every_host(report: dict[str, Any]) -> None:
    assert report["sampled_by"] == [[report["published"], N_TOKENS]]


async def test_a_token_is_good_for_one_key(far: TwoHosts) -> None:
    status, said = await far.third.run(*CLI, "keys", "join", far.used_token, "--dir", "stolen")
    assert status == 1
    assert "invite_used" in said
    assert not list((far.third.home / "stolen").glob("*.key"))


async def test_a_worker_that_others_cannot_reach_is_refused_and_told_why(far: TwoHosts) -> None:
    status, said = await far.second.run(
        *(*CLI, "worker", "--name", "host-b-2", "--key", "keys/host-b.key", *ENGINE),
        *("--stream", "tcp://127.0.0.1:0"),
    )
    assert status == ActorExit.SETTINGS
    assert "can be reached from its own host only" in said
    assert "--advertise" in said


async def test_a_revoked_key_is_kept_out_by_the_worker_of_another_host(
    far: TwoHosts, report: dict[str, Any]
) -> None:
    assert report["deltas"]  # it was let in before
    await far.first.bus("keys", "revoke", "trainer", *LIST)
    seen = await far.third.reports(
        "tests.integration.key_check", "keys/trainer.key", report["stream"]
    )
    assert "lets nobody in" in seen["kept_out"]
