"""What `rolloutbus top` shows: rates between heartbeats, of what this process heard."""

import msgspec
from rich.console import Console

from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.control import FleetStatus, Load, WorkerStatus
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import UpdateStatus
from rolloutbus.cli.commands.top import framed, view_of
from rolloutbus.trainer_adapter.client.core.results import FleetResult
from rolloutbus.trainer_adapter.client.engine_gauges import cache_used, loads_of
from rolloutbus.trainer_adapter.client.fleet_frames import TopFrame, TopHistory

QUIET = FleetStatus(1, "r", False, [], {"default": 7}, 0, 0, 1, {})  # noqa: FBT003


def worker(name: str = "w0", n_tokens: int = 0, **changes: object) -> WorkerStatus:
    row = WorkerStatus(name, "b0.1", "ready", "default", 7, "fake", 4, 2, n_tokens, 0, 0.0, 42)
    return msgspec.structs.replace(row, **changes)


def status(*workers: WorkerStatus, **changes: object) -> FleetStatus:
    return msgspec.structs.replace(QUIET, workers=list(workers), **changes)


def text_of(frame: TopFrame, *, width: int = 80, **options: object) -> str:
    console = Console(width=width, height=24, force_terminal=False)
    with console.capture() as captured:
        console.print(framed(view_of(frame, [1.0, 5.0], **options), hint="q: quit"))  # pyright: ignore[reportArgumentType]
    return captured.get()


def test_tokens_per_second_are_taken_between_heartbeats_and_not_between_questions() -> None:
    history = TopHistory()
    history.frame(status(worker(n_tokens=100, beat_age_ms=400)), {}, 10.0)
    frame = history.frame(status(worker(n_tokens=200, beat_age_ms=0)), {}, 10.1)
    # 100 tokens between the heartbeats at 9.6 and 10.1.
    assert round(frame.rows[0].tokens_per_s or 0) == 200
    assert frame.tokens_per_s == frame.rows[0].tokens_per_s


def test_the_rate_stays_until_the_next_heartbeat_and_is_0_when_none_comes() -> None:
    history = TopHistory()
    history.frame(status(worker(n_tokens=0)), {}, 10.0)
    history.frame(status(worker(n_tokens=500)), {}, 10.5)
    same = history.frame(status(worker(n_tokens=500, beat_age_ms=200)), {}, 10.7)
    assert same.rows[0].tokens_per_s == 1000.0
    silent = history.frame(status(worker(n_tokens=500, beat_age_ms=2500)), {}, 13.0)
    assert silent.rows[0].tokens_per_s == 0.0


def test_a_worker_whose_process_is_another_one_begins_anew() -> None:
    history = TopHistory()
    history.frame(status(worker(n_tokens=9000)), {}, 10.0)
    again = history.frame(status(worker(n_tokens=10, epoch="b1.1")), {}, 11.0)
    assert again.rows[0].tokens_per_s is None
    after = history.frame(status(worker(n_tokens=60, epoch="b1.1")), {}, 12.0)
    assert after.rows[0].tokens_per_s == 50.0


def test_a_renewed_lease_of_the_same_process_changes_no_rate() -> None:
    history = TopHistory()
    history.frame(status(worker(n_tokens=100)), {}, 10.0)
    frame = history.frame(status(worker(n_tokens=150, epoch="b0.2")), {}, 11.0)
    assert frame.rows[0].tokens_per_s == 50.0


def test_a_worker_behind_the_commit_shows_by_how_much() -> None:
    frame = TopHistory().frame(status(worker(version=5), worker("w1")), {}, 1.0)
    assert [row.n_behind for row in frame.rows] == [2, 0]
    assert "v5 (-2)" in text_of(frame)


def test_updates_of_a_worker_are_counted_while_it_is_watched() -> None:
    history = TopHistory()
    frames = [
        history.frame(status(worker(version=version)), {}, at)
        for at, version in enumerate((7, 7, 8, 9))
    ]
    assert [frame.rows[0].n_updates for frame in frames] == [0, 0, 1, 2]


def test_counters_show_what_was_counted_since_the_frame_before() -> None:
    history = TopHistory()
    assert history.frame(status(counters={"lost": 3}), {}, 1.0).counted == {}
    assert history.frame(status(counters={"lost": 5, "joins": 1}), {}, 2.0).counted == {
        "lost": 2,
        "joins": 1,
    }
    # Another router begins again.
    assert history.frame(status(counters={"joins": 9}, instance="s"), {}, 3.0).counted == {}


def test_workers_are_in_the_order_of_their_numbers() -> None:
    frame = TopHistory().frame(status(worker("w10"), worker("w9")), {}, 1.0)
    assert [row.name for row in frame.rows] == ["w9", "w10"]


def test_the_share_of_the_cache_is_read_from_the_gauges_of_each_engine() -> None:
    blocks = {"n_kv_blocks_used": 3.0, "n_kv_blocks_idle": 1.0, "n_kv_blocks_free": 4.0}
    assert cache_used(blocks) == 3 / 8
    assert cache_used({"token_usage": 0.25}) == 0.25
    assert cache_used({"n_steps": 7.0}) is None


def test_workers_that_have_no_gauges_do_not_hide_those_of_others() -> None:
    lacking = EngineFailed(Problem("unsupported", "this engine has none", "failed"))
    result = FleetResult({"w0": lacking, "w1": Load({"token_usage": 0.5})}, ["w2"])
    assert loads_of(result) == {"w1": {"token_usage": 0.5}}


def test_everything_fits_on_a_narrow_terminal() -> None:
    busy = worker(n_tokens=1_000_000, n_running=128, slots=256, stalled_ms=123.4, version=1234)
    history = TopHistory()
    history.frame(status(busy), {}, 0.0)
    later = msgspec.structs.replace(busy, n_tokens=1_123_456, state="updating")
    frame = history.frame(status(later, n_queued=1234), {"w0": {"token_usage": 0.99}}, 1.0)
    shown = text_of(frame)
    assert max(len(line) for line in shown.splitlines()) <= 80
    for part in ("updating", "v1234", "128/256", "123,456", "123.4", "99%", "queue 1234"):
        assert part in shown


def test_troubles_are_told_in_words() -> None:
    update = UpdateStatus("default", 8, "committing", 1500, 4, 3, 1)
    found = status(
        worker(problem="digest_mismatch: a tensor differs"),
        troubled={"w9": "engine_crashed"},
        absent={"w8": "it was lost (expired)", "w9": "it was lost (left)"},
        updates=[update],
    )
    shown = text_of(TopHistory().frame(found, {}, 1.0), width=120, stale="the deadline passed")
    assert "w0 gets no work: digest_mismatch: a tensor differs" in shown
    assert "w9 is gone: engine_crashed" in shown
    assert "w8 is not here: it was lost (expired)" in shown
    assert shown.count("w9") == 1
    assert "update default v8: committing for 1.5 s, 3 of 4 prepared, 1 active" in shown
    assert "no answer: the deadline passed" in shown


def test_workers_for_whom_there_is_no_room_are_counted() -> None:
    frame = TopHistory().frame(status(*(worker(f"w{n}") for n in range(50))), {}, 1.0)
    shown = text_of(frame, max_rows=5)
    assert "w4" in shown
    assert "w5" not in shown
    assert "45 more workers" in shown
