"""What an open page is told, and what is left out when its browser is slow."""

from typing import Any

import msgspec
import numpy as np
import pytest

from rolloutbus.bus.wire.errors import PeerLost
from rolloutbus.bus.wire.messages.control import FleetStatus, WorkerStatus
from rolloutbus.gateway.live.view import (
    MAX_HAPPENED,
    MAX_STREAMS,
    MAX_UNTOLD,
    LiveView,
    TokenTexts,
)
from rolloutbus.replay.stream.events import Demoted, Finished, Tokens
from rolloutbus.trainer_adapter.client.fleet_events import FleetEvent
from rolloutbus.trainer_adapter.client.fleet_frames import TopHistory
from rolloutbus.trainer_adapter.client.fleet_observer import Look

W0 = WorkerStatus("w0", "b0.1", "ready", "default", 7, "fake", 4, 2, 0, 0, 0.0, 42)
STATUS = FleetStatus(1, "r", False, [W0], {"default": 7}, 0, 0, 1, {"lost": 2, "joins": 1})  # noqa: FBT003


def look(*events: FleetEvent) -> Look:
    return Look(STATUS, TopHistory().frame(STATUS, {}, 1.0), list(events))


def tokens(start: int, ids: list[int], rid: str = "c/1", version: int = 7) -> Tokens:
    logprobs = np.full(len(ids), -0.5, np.float32)
    return Tokens(rid, (1, 1), "w0", start, np.array(ids, np.int32), logprobs, logprobs, version)


def finished(rid: str = "c/1") -> Finished:
    none = np.zeros(0, np.float32)
    return Finished(rid, (1, 1), "w0", "stop", np.zeros(0, np.int32), none, none, [], 0)


def told(view: LiveView, kind: str) -> list[dict[str, Any]]:
    return [each for each in view.take() if each["kind"] == kind]


def streams(view: LiveView) -> list[dict[str, Any]]:
    return [stream for each in told(view, "tokens") for stream in each["streams"]]


def test_tokens_are_told_once_with_the_versions_that_sampled_them() -> None:
    view = LiveView()
    view.heard(tokens(0, [5, 6]))
    view.heard(tokens(2, [7], version=8))
    (stream,) = streams(view)
    assert (stream["start"], stream["ids"], stream["versions"]) == (0, [5, 6, 7], [7, 7, 8])
    assert (stream["logprobs"], stream["end"]) == ([-0.5] * 3, None)
    assert list(view.take()) == []
    view.heard(finished())
    (stream,) = streams(view)
    assert (stream["start"], stream["ids"], stream["end"]) == (3, [], "stop")


def test_work_that_is_done_anew_begins_where_the_rest_became_void() -> None:
    view = LiveView()
    view.heard(tokens(0, [1, 2, 3]))
    view.heard(tokens(1, [9]))
    assert streams(view)[0]["ids"] == [1, 9]
    view.heard(tokens(0, [4]))
    (stream,) = streams(view)
    assert (stream["start"], stream["ids"]) == (0, [4])


def test_a_slow_page_misses_the_oldest_tokens_and_is_told_how_many() -> None:
    view = LiveView()
    for n in range(MAX_UNTOLD + 40):
        view.heard(tokens(n, [n]))
    said = list(view.take())
    assert said[0] == {"kind": "skipped", "frames": 0, "events": 0, "tokens": 40}
    (stream,) = said[1]["streams"]
    assert (stream["start"], len(stream["ids"])) == (40, MAX_UNTOLD)
    assert told(view, "skipped") == []


def test_a_slow_page_gets_the_latest_frame_and_the_latest_events() -> None:
    view = LiveView()
    for n in range(MAX_HAPPENED + 1):
        view.looked(look(FleetEvent("change", "w0", str(n))))
    skipped, frame, happened = view.take()
    assert (skipped["frames"], skipped["events"]) == (MAX_HAPPENED, 1)
    assert frame["rows"][0]["name"] == "w0"
    assert frame["faults"] == {"lost": 2}
    assert [happened["events"][at]["what"] for at in (0, -1)] == ["1", str(MAX_HAPPENED)]


def test_so_many_streams_are_followed_and_the_next_when_one_has_ended() -> None:
    view = LiveView()
    for n in range(MAX_STREAMS + 1):
        view.heard(tokens(0, [n], rid=f"c/{n}"))
    assert [each["rid"] for each in streams(view)] == [f"c/{n}" for n in range(MAX_STREAMS)]
    view.heard(finished("c/0"))
    assert streams(view)[0]["end"] == "stop"
    view.heard(tokens(3, [1], rid="c/new"))
    assert streams(view)[0]["start"] == 3


@pytest.mark.parametrize(("match", "n_shown"), [("c/1", 1), ("w0", 1), ("w1", 0), ("", 1)])
def test_only_streams_that_match_are_followed(match: str, n_shown: int) -> None:
    view = LiveView(match=match)
    view.heard(tokens(0, [1]))
    assert len(streams(view)) == n_shown


def test_a_character_of_several_tokens_is_told_with_its_last_one() -> None:
    texts = TokenTexts(lambda ids: bytes(ids).decode(errors="replace"))
    content = list("aé!".encode())
    assert texts.of(0, content[:2]) == ["a", ""]
    assert texts.of(2, content[2:]) == ["é", "!"]
    assert texts.of(40, [104]) == ["h"], "after a jump it begins anew"


def test_a_logprob_that_is_no_number_is_null_in_json() -> None:
    view = LiveView()
    view.heard(tokens(0, [1]))
    (stream,) = streams(view)
    stream["logprobs"] = [float("-inf"), float("nan")]
    assert msgspec.json.decode(msgspec.json.encode(stream))["logprobs"] == [None, None]


def test_a_router_that_is_silent_and_a_subscription_that_lags_are_told() -> None:
    view = LiveView()
    view.silent("no answer")
    view.heard(Demoted("reader", 1))
    silent, happened = view.take()
    assert silent == {"kind": "silent", "why": "no answer"}
    assert happened["events"][0]["who"] == "page"
    view.error = PeerLost("away")
    assert list(view.take()) == []
