"""A recording holds exactly what a client said and heard, byte for byte."""

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest

import rolloutbus
from rolloutbus import Fleet, RolloutClient
from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import encode_batch, topic_of
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import LocalProtocolError
from rolloutbus.launcher.plan import environment
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.replay.choice import Filter, rids_in
from rolloutbus.replay.journal.core import JournalSettings
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.journal.records import LostRecord, Record, Stream, Tap
from rolloutbus.replay.recorder import Recorder
from rolloutbus.replay.trajectories import Trajectories
from rolloutbus.replay.trajectory_files import read
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.key_directory import KeyDirectory
from tests.integration.live_fleet import (
    DEADLINE_S,
    START_S,
    STEADY_HOST,
    assert_fake_rollout,
    fake_sampling,
)
from tests.integration.recording_ports import (
    CLIENT,
    ONCE,
    RecordingPorts,
    sample_until_both_received,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(3 * START_S),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {
    "workers": 2,
    "engine": "fake",
    "tap": True,
    "lease": ONCE,
    "host": STEADY_HOST,
}
N_ROLLOUTS = 20
N_TOKENS = 40


def settings_of(
    name: str,
    fleet: Fleet,
    lease: LeaseSettings = ONCE,
    security: SecuritySettings | None = None,
) -> ClientSettings:
    return ClientSettings(
        name=name,
        router=fleet.address,
        lease=lease,
        security=security,
        overtime_s=DEADLINE_S,
        connect_timeout_s=DEADLINE_S,
    )


def routed(
    records: Sequence[Record], event: str, rids: AbstractSet[str], name: str = CLIENT
) -> list[Entry]:
    """What of these requests came from, or went to, an actor."""
    taps = [each for each in records if isinstance(each, Tap)]
    return [
        entry
        for each in taps
        if each.event == event and each.name == name
        for entry in each.entries
        if entry.rid in rids
    ]


def published(records: Sequence[Record], worker: str, rids: AbstractSet[str]) -> list[Entry]:
    """What a worker published to the client about these requests."""
    return [
        entry
        for each in records
        if isinstance(each, Stream) and each.topic == topic_of(CLIENT)
        for entry in each.entries
        if entry.kind == "deltas" and entry.route == worker and rids & rids_in(entry)
    ]


async def test_a_recording_is_as_good_as_having_been_there(fleet: Fleet, tmp_path: Path) -> None:
    own, recorded = RecordingPorts(), RecordingPorts()
    recorder = Recorder(
        settings_of("recorder", fleet),
        tmp_path / "j",
        journal=JournalSettings(segment_bytes=30_000),
        ports=recorded.ports,
    )
    async with RolloutClient(settings_of(CLIENT, fleet), own.ports) as client, recorder:
        await sample_until_both_received(client, recorded, own)
        rollouts = await asyncio.gather(
            *(
                client.generate([2, 3 + i], fake_sampling(N_TOKENS), deadline_s=DEADLINE_S)
                for i in range(N_ROLLOUTS)
            )
        )
        await sample_until_both_received(client, recorded, own)
    rids = {each.rid for each in rollouts}

    journal = Journal(tmp_path / "j")
    records = list(journal)

    assert journal.is_closed
    assert [each.seq for each in records] == list(range(len(records)))
    # Of the first samples, which were to find out who listens, rows may be missing.
    losses = [each for each in records if isinstance(each, LostRecord)]
    assert [each for each in losses if each.source != "stream" or each.name in rids] == []
    asked = [entry for entry in own.sent if entry.rid in rids]
    assert {entry.rid for entry in asked} == rids
    assert encode_batch(routed(records, "received", rids)) == encode_batch(asked)
    ended = [entry for entry in own.received if entry.rid in rids]
    assert {entry.kind for entry in ended} == {"finished"}
    assert encode_batch(routed(records, "sent", rids)) == encode_batch(ended)
    rows = own.rows(rids)
    assert rows
    for worker, expected in rows.items():
        assert encode_batch(published(records, worker, rids)) == encode_batch(expected)
    entries = (entry for each in records for entry in getattr(each, "entries", []))
    of_one = {entry.kind for entry in entries if rollouts[0].rid in rids_in(entry)}
    assert of_one >= {"generate", "accepted", "deltas", "finished"}


async def test_every_finished_rollout_of_a_recording_can_be_exported(
    fleet: Fleet, tmp_path: Path
) -> None:
    own, recorded = RecordingPorts(), RecordingPorts()
    recorder = Recorder(settings_of("recorder", fleet), tmp_path / "j", ports=recorded.ports)
    async with RolloutClient(settings_of(CLIENT, fleet), own.ports) as client, recorder:
        await sample_until_both_received(client, recorded, own)
        rollouts = {
            each.rid: each
            for each in await asyncio.gather(
                *(
                    client.generate([2, 3 + i], fake_sampling(N_TOKENS), deadline_s=DEADLINE_S)
                    for i in range(N_ROLLOUTS)
                )
            )
        }
        await sample_until_both_received(client, recorded, own)
    command = [
        sys.executable,
        "-m",
        "rolloutbus.cli.main",
        "export",
        str(tmp_path / "j"),
        "--json",
    ]
    for file in (tmp_path / "rows.jsonl", tmp_path / "rows.parquet"):
        process = await asyncio.create_subprocess_exec(
            *command, "--output", str(file), stdout=asyncio.subprocess.PIPE, env=environment()
        )
        async with asyncio.timeout(START_S):
            told, _ = await process.communicate()
        rows = list(read(file))
        assert json.loads(told)["rows"] == len(rows)
        found = {row.rid: row for row in rows if row.rid in rollouts}
        assert found.keys() == rollouts.keys()
        for rid, rollout in rollouts.items():
            row = found[rid]
            assert row.output_ids.tolist() == rollout.tokens.tolist()
            assert row.logprobs.tolist() == rollout.logprobs.tolist()
            runs = list(zip(row.run_versions, row.run_lengths, strict=True))
            assert runs == list(rollout.version_runs)
            assert row.worker == rollout.worker


async def test_a_recording_that_has_caught_up_has_each_rollout_from_the_first_to_the_last(
    fleet: Fleet, client: RolloutClient, tmp_path: Path
) -> None:
    async with rolloutbus.record(fleet.address, tmp_path / "j") as recorder:
        await recorder.caught_up(DEADLINE_S)
        rollouts = await asyncio.gather(
            *(
                client.generate([4, i], fake_sampling(N_TOKENS), deadline_s=DEADLINE_S)
                for i in range(N_ROLLOUTS)
            )
        )
        await recorder.caught_up(DEADLINE_S)
    rows = {row.rid: row.output_ids.tolist() for row in Trajectories(Journal(tmp_path / "j"))}
    assert rows == {each.rid: each.tokens.tolist() for each in rollouts}


async def test_it_opens_and_closes_without_a_block(fleet: Fleet, tmp_path: Path) -> None:
    recorder = rolloutbus.record(fleet.address, tmp_path / "journal")
    await recorder.close()  # it has not begun
    await recorder.open()
    with pytest.raises(LocalProtocolError, match="begun already"):
        await recorder.open()
    await recorder.close()
    await recorder.close()
    assert recorder.progress.problem == ""


async def test_only_what_a_filter_names_is_kept(fleet: Fleet, tmp_path: Path) -> None:
    own, recorded = RecordingPorts(), RecordingPorts()
    recorder = Recorder(
        settings_of("recorder", fleet),
        tmp_path / "j",
        Filter(session=["wanted"]),
        ports=recorded.ports,
    )
    async with RolloutClient(settings_of(CLIENT, fleet), own.ports) as client, recorder:
        await sample_until_both_received(client, recorded, own)
        rollouts = [
            await client.generate(
                [5, i], fake_sampling(N_TOKENS), session=session, deadline_s=DEADLINE_S
            )
            for i, session in enumerate(("wanted", "other", "wanted", ""))
        ]
        await sample_until_both_received(client, recorded, own)
    wanted, others = {each.rid for each in rollouts[::2]}, {each.rid for each in rollouts[1::2]}
    records = list(Journal(tmp_path / "j"))
    asked = [entry.kind for entry in routed(records, "received", wanted)]
    assert asked.count("generate") >= len(wanted)
    assert routed(records, "received", others) == routed(records, "sent", others) == []
    named = [
        rid
        for each in records
        if isinstance(each, Stream)
        for entry in each.entries
        for rid in rids_in(entry)
    ]
    assert set(named) >= wanted
    assert not others & set(named)


async def test_a_recording_goes_on_with_the_router_that_comes_after_a_killed_one(
    tmp_path: Path,
) -> None:
    own, recorded = RecordingPorts(), RecordingPorts()
    # Here a silent router must be left, and what it did not answer sent again.
    lease = LeaseSettings()
    async with rolloutbus.up(**{**FLEET, "store": False, "lease": lease}) as fleet:
        recorder = Recorder(
            settings_of("recorder", fleet, lease), tmp_path / "j", ports=recorded.ports
        )
        settings = settings_of(CLIENT, fleet, lease)
        async with RolloutClient(settings, own.ports) as client, recorder:
            await sample_until_both_received(client, recorded, own)
            before = await client.generate([7], fake_sampling(N_TOKENS), deadline_s=DEADLINE_S)
            n_welcomes = recorded.kinds().count("welcome")
            fleet.kill_router()
            await recorded.until(lambda: recorded.kinds().count("welcome") > n_welcomes, START_S)
            recorded.reset_subscriptions()
            await sample_until_both_received(client, recorded, own)
            after = await client.generate([8], fake_sampling(N_TOKENS), deadline_s=DEADLINE_S)
            await sample_until_both_received(client, recorded, own)
    journal = Journal(tmp_path / "j")
    rows = {row.rid: row for row in Trajectories(journal)}
    assert {before.rid, after.rid} <= rows.keys()
    assert_fake_rollout([8], after, N_TOKENS)
    assert rows[after.rid].output_ids.tolist() == after.tokens.tolist()
    assert journal.is_closed


async def test_a_recorder_whose_name_another_takes_says_that_it_has_ended(
    fleet: Fleet, tmp_path: Path
) -> None:
    recorder = Recorder(settings_of("archive", fleet), tmp_path / "a")
    async with recorder:
        await asyncio.gather(recorder.caught_up(DEADLINE_S), recorder.caught_up(DEADLINE_S))
        assert not recorder.progress.problem
        async with Recorder(settings_of("archive", fleet), tmp_path / "b"):
            async with asyncio.timeout(DEADLINE_S):
                why = await recorder.stopped()
            assert "the router will not have it" in why
            assert recorder.progress.problem == why


async def test_waiting_for_the_end_of_a_recorder_ends_when_it_is_closed(
    fleet: Fleet, tmp_path: Path
) -> None:
    async with Recorder(settings_of("archive", fleet), tmp_path / "a") as recorder:
        waiting = asyncio.create_task(recorder.stopped())
        await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE_S):
        assert await waiting == ""


async def test_a_subscriber_records_a_fleet_with_keys(tmp_path: Path) -> None:
    async with rolloutbus.up(**{**FLEET, "store": False, "secure": tmp_path / "keys"}) as fleet:
        keys = KeyDirectory(tmp_path / "keys")
        keys.add("archive", "subscriber")
        keys.add(CLIENT, "client")
        own, recorded = (
            RecordingPorts(keys.client_settings(CLIENT)),
            RecordingPorts(keys.client_settings("archive")),
        )
        settings, listens = (
            settings_of(name, fleet, security=keys.client_settings(name))
            for name in (CLIENT, "archive")
        )
        recorder = Recorder(listens, tmp_path / "j", ports=recorded.ports)
        async with RolloutClient(settings, own.ports) as client, recorder:
            await sample_until_both_received(client, recorded, own)
            rollout = await client.generate([7], fake_sampling(N_TOKENS), deadline_s=DEADLINE_S)
            await sample_until_both_received(client, recorded, own)
    records = list(Journal(tmp_path / "j"))
    assert [entry.kind for entry in routed(records, "sent", {rollout.rid})] == ["finished"]
    rows = own.rows({rollout.rid})[rollout.worker]
    assert encode_batch(published(records, rollout.worker, {rollout.rid})) == encode_batch(rows)


async def test_the_command_records_until_it_is_interrupted(
    fleet: Fleet, client: RolloutClient, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "rolloutbus.cli.main",
        "record",
        str(tmp_path / "j"),
        "--json",
    ]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--address",
        fleet.address,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(START_S):
        assert (await process.stderr.readline()).startswith(b"recording to ")
        rollout = await client.generate([9], fake_sampling(N_TOKENS), deadline_s=DEADLINE_S)
        process.send_signal(signal.SIGINT)
        told, errors = await process.communicate()
    assert process.returncode == 0, errors
    summary = json.loads(told)
    assert summary["problem"] == ""
    journal = Journal(tmp_path / "j")
    assert [each.seq for each in journal][-1] == summary["durable"]
    assert journal.is_closed
    assert_fake_rollout([9], rollout, N_TOKENS)
