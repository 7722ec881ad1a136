"""Every finished rollout becomes one row, and what does not is counted."""

from collections.abc import Iterator
from itertools import count

import msgspec
import numpy as np
import pytest

from rolloutbus.bus.streams.tap import TapEvent
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.generation import Generate, Generated, SamplingParams
from rolloutbus.replay.journal.records import Head, Record, Tap
from rolloutbus.replay.trajectories import Trajectories

S = 1_000_000_000
WALL_NS = 1_700_000_000 * S
RID = "c/1"


def ints(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def floats(*numbers: float) -> bytes:
    return np.array(numbers, "<f4").tobytes()


class Tape:
    """Records, a second apart."""

    def __init__(self) -> None:
        self._n = count(1)
        self.records: list[Record] = [Head(0, S, "j", 1, 1, bytes(8), WALL_NS)]

    def add(self, event: TapEvent, *entries: Entry) -> None:
        n = next(self._n)
        self.records.append(Tap(n, (1 + n) * S, event, n, 0.0, 1, "x", list(entries)))

    def asked(self, rid: str = RID, session: str = "", group: str = "") -> None:
        body = Generate(
            ints(3, 1, 2), SamplingParams(max_new_tokens=9, temperature=0.5, sampling_seed=4)
        )
        body = msgspec.structs.replace(body, lora="judge")
        place = Placement("p", session=session, group=group)
        self.add("received", Entry("generate", rid, place=place, body=pack(body)))

    def placed(self, n: int, rid: str = RID) -> None:
        self.add("sent", Entry("generate", rid, (1, n), route="c"))

    def ended(self, kind: str = "finished", rid: str = RID) -> None:
        result = Generated(
            ints(7, 8),
            floats(-0.5, -1.5),
            [(2, 1), (3, 1)],
            "stop",
            0,
            3,
            n_resumed=1,
            run_ms=5.0,
            lora="judge@5",
        )
        entry = Entry(kind, rid, (1, 1), route="w0", body=pack(result))
        self.add("received", entry)
        self.add("sent", entry)

    def read(self) -> tuple[Trajectories, int]:
        found = Trajectories(iter(self.records))
        return found, len(list(found))

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)


@pytest.mark.parametrize("kind", ["cancelled", "refused"])
def test_a_rollout_that_was_stopped_and_went_on_is_one_row(kind: str) -> None:
    tape = Tape()
    tape.asked()
    tape.placed(1)
    tape.ended(kind)
    tape.ended(kind)  # it came again
    tape.add("sent", Entry("refused", RID))  # the router had no place for it
    tape.asked()
    tape.placed(2)
    tape.ended()
    (row,) = found = Trajectories(tape)
    assert (row.n_attempts, row.ended_at - row.asked_at) == (2, 10.0)
    assert (found.requests.n_unfinished, found.requests.n_open) == (0, 0)


def test_a_row_tells_what_was_asked_what_came_and_when() -> None:
    tape = Tape()
    tape.asked(session="s", group="g")
    tape.placed(1)
    tape.placed(1)  # sent again
    tape.placed(2)
    tape.ended()

    (row,) = Trajectories(tape)

    assert (row.rid, row.client, row.session, row.group, row.policy) == (RID, "c", "s", "g", "p")
    assert row.prompt_ids.tolist() == [3, 1, 2]
    assert row.output_ids.tolist() == [7, 8]
    assert row.lora == "judge@5"  # what sampled, not what was asked for
    assert row.logprobs.tolist() == row.behaviour_logprobs.tolist() == [-0.5, -1.5]
    assert (row.run_versions, row.run_lengths) == ([2, 3], [1, 1])
    assert (row.finish_reason, row.worker, row.n_attempts, row.n_resumed) == ("stop", "w0", 2, 1)
    assert (row.max_new_tokens, row.temperature, row.seed) == (9, 0.5, 4)
    assert row.asked_at == 1_700_000_001.0
    assert row.ended_at == 1_700_000_006.0


def test_an_ending_that_comes_again_makes_no_second_row() -> None:
    tape = Tape()
    tape.asked()
    tape.ended()
    tape.asked()  # it had not heard of its end
    tape.ended()
    found, n_rows = tape.read()
    assert (n_rows, found.requests.n_open, found.requests.n_headless) == (1, 0, 0)


def test_what_has_not_finished_is_counted() -> None:
    tape = Tape()
    tape.asked("c/1")
    tape.ended("failed", "c/1")
    tape.asked("c/2")
    tape.add("sent", Entry("expired", "c/2"))  # the router's own word
    tape.asked("c/3")
    tape.ended("finished", "c/4")  # asked for before the recording began
    found, n_rows = tape.read()
    assert n_rows == 0
    assert (found.requests.n_unfinished, found.requests.n_open, found.requests.n_headless) == (
        2,
        1,
        1,
    )


def test_a_result_that_is_none_is_counted_and_does_not_stop_the_others() -> None:
    tape = Tape()
    tape.asked("c/1")
    tape.add("sent", Entry("finished", "c/1", (1, 1), route="w0"))
    tape.asked("c/2")
    tape.ended(rid="c/2")
    found, n_rows = tape.read()
    assert (n_rows, found.requests.n_malformed) == (1, 1)


def test_what_could_not_be_delivered_is_not_taken_for_a_question() -> None:
    tape = Tape()
    body = Generate(ints(3), SamplingParams(max_new_tokens=9))
    returned = Entry("generate", RID, (1, 1), place=Placement("p"), body=pack(body))
    tape.add("undelivered", returned)  # asked before the recording began
    tape.ended()
    found, n_rows = tape.read()
    assert (n_rows, found.requests.n_headless, found.requests.n_open) == (0, 1, 0)
