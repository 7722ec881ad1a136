"""Faults that only many seeds of the simulator had shown, each in a few steps."""

from rolloutbus.bus.wire.messages.endings import Queued
from tests.unit.trainer_adapter.bench import Bench


def test_an_old_word_that_a_request_waits_does_not_hide_that_its_worker_is_lost(
    bench: Bench,
) -> None:
    rid = bench.generate()
    bench.accept(rid, (1, 1))
    bench.take("generate")

    bench.say("queued", Queued([rid]))
    bench.pass_time(6.0)

    assert [entry.rid for entry in bench.take("generate")] == [rid]


def test_an_execution_lost_again_takes_what_was_sent_since_with_it(bench: Bench) -> None:
    rid = bench.generate()
    bench.accept(rid, (1, 1))
    bench.lose(rid, (1, 1))
    bench.say("queued", Queued([rid]))
    bench.take("generate")

    bench.lose(rid, (1, 1))  # its router had found it running, and adopted it
    bench.pass_time(1.5)

    assert [entry.rid for entry in bench.take("generate")] == [rid]


def test_a_request_that_only_its_stream_tells_of_is_sent_again_when_that_falls_silent(
    bench: Bench,
) -> None:
    rid = bench.generate()
    bench.say("queued", Queued([rid]))
    bench.take("generate")
    bench.idle(rid, (1, 1), 0)

    bench.pass_time(6.0)

    assert [entry.rid for entry in bench.take("generate")] == [rid]


def test_a_request_is_not_sent_again_after_its_deadline(bench: Bench) -> None:
    rid = bench.generate(deadline_s=0.5)
    bench.take("generate")

    bench.pass_time(4.0)

    assert bench.take("generate") == []
    assert rid in bench.outcomes
