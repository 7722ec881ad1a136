"""A run that is recorded: rollouts under way when a worker is killed, and two weight updates."""

from dataclasses import dataclass
from pathlib import Path

import torch

from rolloutbus import Fleet, Rollout, RolloutClient, WeightPublisher
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.replay.journal.core import JournalSettings
from rolloutbus.replay.recorder import Recorder
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.live_fleet import (
    DEADLINE_S,
    START_S,
    STEADY_HOST,
    Streamed,
    fake_sampling,
)
from tests.integration.raw_subscriber import Frames, RawSubscriber
from tests.integration.recording_ports import (
    CLIENT,
    ONCE,
    RecordingPorts,
    sample_until_both_received,
)
from tests.integration.token_limit import TokenLimit

FLEET: UpOptions = {
    "workers": 2,
    "engine": "fake",
    "tap": True,
    "engine_options": {"slots": 16},
    "lease": ONCE,
    "host": STEADY_HOST,
}
VICTIM, SURVIVOR = "w0", "w1"
WEIGHTS = {"embed.weight": torch.ones(8, 4), "head.weight": torch.ones(4)}
N_STREAMS, N_AFTERWARDS = 12, 4
N_BEFORE, N_TOKENS = 30, 60


@dataclass(frozen=True)
class Recording:
    """What was recorded, and what came of it."""

    journal: Path
    rollouts: dict[str, Rollout]
    last: list[str]
    """Requests that ran after all that, under the last version."""
    version: int
    """The last one."""
    live: list[Frames]
    """All that the surviving worker sent, from before to after the recording."""


async def recorded_run(fleet: Fleet, token_limit: TokenLimit, directory: Path) -> Recording:
    """Record a run of a fleet of `FLEET`."""
    own, recorded = RecordingPorts(), RecordingPorts()
    settings, listens = (
        ClientSettings(
            name=name,
            router=fleet.address,
            lease=ONCE,
            overtime_s=DEADLINE_S,
            connect_timeout_s=DEADLINE_S,
        )
        for name in (CLIENT, "recorder")
    )
    recorder = Recorder(
        listens,
        directory,
        journal=JournalSettings(segment_bytes=50_000),
        ports=recorded.ports,
    )
    async with RolloutClient(settings, own.ports) as client:
        members = client.connection.members
        subscriber = RawSubscriber(next(each.stream for each in members if each.name == SURVIVOR))
        while not subscriber.messages:  # a subscription takes effect some time after it is made
            await client.generate([1], fake_sampling(1), deadline_s=DEADLINE_S)
        async with recorder:
            await sample_until_both_received(client, recorded, own)
            # What it missed at first is asked for while those live who have it.
            await recorder.caught_up(DEADLINE_S)
            with token_limit.at(N_BEFORE):
                streams = [
                    Streamed(client, [2, 3 + i], fake_sampling(N_TOKENS), deadline_s=2 * START_S)
                    for i in range(N_STREAMS)
                ]
                for each in streams:
                    await each.reached(N_BEFORE)
                rids = {each.rid for each in streams}
                await recorded.until(lambda: recorded.rows(rids) == own.rows(rids))
                await _publish(client)
                fleet.kill(VICTIM)
                await fleet.wait_ready(START_S)
                # What goes on goes on where both listen, the new worker included. Until they do
                # nothing is sampled there that they would miss.
                token_limit.move(0)
                held = Streamed(
                    client, [1], fake_sampling(1), worker=VICTIM, deadline_s=2 * START_S
                )
                for each in (recorded, own):
                    await each.until(lambda each=each: each.hears_of(held.rid, VICTIM))
                token_limit.move(N_BEFORE)
                await held.rollout()
                await sample_until_both_received(client, recorded, own)
            rollouts = [await each.rollout() for each in streams]
            version = await _publish(client)
            after = [await _afterwards(client, i) for i in range(N_AFTERWARDS)]
            await sample_until_both_received(client, recorded, own)
            await recorder.caught_up(DEADLINE_S)
        subscriber.close()
    by_rid = {each.rid: each for each in [*rollouts, *after]}
    return Recording(directory, by_rid, [each.rid for each in after], version, subscriber.messages)


async def _publish(client: RolloutClient) -> int:
    published = await WeightPublisher(client).publish(WEIGHTS, deadline_s=DEADLINE_S)
    return published.version


async def _afterwards(client: RolloutClient, number: int) -> Rollout:
    return await client.generate(
        [9, number], fake_sampling(N_TOKENS), versions="latest", deadline_s=DEADLINE_S
    )
