"""What requests ask of the transformers engine's sampler, in batches where others ask nothing."""

import numpy as np
import pytest

from rolloutbus.bus.wire.codec import numpy_of
from rolloutbus.bus.wire.messages.generation import Processor, Want
from rolloutbus.engine_worker.engine import Work
from tests.step_log import StepLog, key
from tests.tiny_models import TOLERANCE, VOCAB, Build, fresh, make_model, work

MASK = Processor("action_mask", {"allowed": [5, 6, 7]})


def ruled(name: str, *processors: Processor, want: Want | None = None, n: int = 12) -> Work:
    plain = work(name, n, temperature=0.0)
    asked = Want() if want is None else want
    return Work(plain.key, plain.prompt, plain.sampling, processors=processors, want=asked)


def test_processors_of_one_request_leave_the_others_alone(build: Build, log: StepLog) -> None:
    engine = build()
    engine.generate([work("alone", temperature=0.0)])
    log.wait_finished("alone")
    plain = Work(key("plain"), work("alone").prompt, work("alone", temperature=0.0).sampling)
    engine.generate([plain, ruled("masked", MASK)])
    log.wait_finished("plain", "masked")
    assert log["plain"].tokens == log["alone"].tokens
    assert {*log["masked"].tokens} <= {5, 6, 7}


def test_a_request_that_leaves_no_token_ends_alone(build: Build, log: StepLog) -> None:
    engine = build()
    dead = ruled("dead", MASK, Processor("disallowed_tokens", {"blocked": [5, 6, 7]}))
    engine.generate([ruled("plain"), dead])
    log.wait_finished("plain")
    ((attempt, problem),) = [
        (step.keys[row], problem) for step in log.steps for row, problem in step.problems
    ]
    assert (attempt, problem.code, problem.field) == (key("dead"), "bad_request", "processors")
    assert log["dead"].tokens == []
    assert len(log["plain"].tokens) == 12
    assert engine.stats().n_running == engine.stats().n_waiting == 0


def test_parameters_that_do_not_fit_end_their_request_alone(build: Build, log: StepLog) -> None:
    bad = ruled("bad", Processor("action_mask", {"allowed": [VOCAB]}))
    build().generate([bad, ruled("plain")])
    log.wait_finished("plain")
    problems = [problem for step in log.steps for _, problem in step.problems]
    assert [(problem.code, problem.field) for problem in problems] == [
        ("bad_request", "processors")
    ]


def test_the_key_of_a_request_that_failed_can_be_used_again(build: Build, log: StepLog) -> None:
    engine = build()
    nothing = Processor("disallowed_tokens", {"blocked": [5, 6, 7]})
    engine.generate([ruled("again", MASK, nothing), ruled("other")])
    log.wait_finished("other")
    engine.generate([ruled("again")])
    log.wait_finished("again")
    assert len(log["again"].tokens) == 12


@pytest.mark.shows("logprobs: N", "token_ids_logprob")
@pytest.mark.parametrize("slots", [1, 4])
def test_what_is_wanted_comes_with_the_end_and_is_true(
    build: Build, log: StepLog, slots: int
) -> None:
    want = Want(top_logprobs=3, logprobs_of=[9], sampling_mask=True)
    jobs = [ruled("asks", want=want), ruled("asks not"), ruled("asks too", want=want, n=5)]
    build(slots=slots).generate(jobs)
    log.wait_finished(*(job.key[0] for job in jobs))
    found = {
        step.keys[row][0]: {name: numpy_of(array) for name, array in arrays.items()}
        for step in log.steps
        for row, arrays in step.arrays
    }
    assert found.keys() == {"asks", "asks too"}
    for job in (jobs[0], jobs[2]):
        arrays, emitted = found[job.key[0]], log[job.key[0]]
        assert arrays["top_token_ids"].shape == (len(emitted.tokens), 3)
        assert arrays["top_token_ids"][:, 0].tolist() == emitted.tokens, "it was greedy"
        np.testing.assert_allclose(arrays["top_logprobs"][:, 0], emitted.logprobs)
        assert arrays["sampling_mask"].tolist() == emitted.tokens
        assert arrays["sampling_mask_counts"].tolist() == [1] * len(emitted.tokens)
        for i in range(len(emitted.tokens)):
            known = [*job.prompt.tolist(), *emitted.tokens[:i], 9]
            truth = fresh(make_model("llama", 0), np.array(known), len(known) - 1)
            assert arrays["logprobs_of"][i, 0] == pytest.approx(truth[0], abs=TOLERANCE)
