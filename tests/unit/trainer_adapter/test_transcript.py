"""Which tokens of a trajectory were sampled, and what a trainer learns of them."""

import numpy as np
import pytest

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.trainer_adapter.client.core.results import Rollout
from rolloutbus.trainer_adapter.client.transcript import Transcript

EOS = 2


def rollout(tokens: list[int], versions: list[tuple[int, int]]) -> Rollout:
    ids = np.array(tokens, np.int32)
    return Rollout(
        rid="c/1",
        tokens=ids,
        logprobs=-ids.astype(np.float32),
        behaviour_logprobs=-ids.astype(np.float32) / np.float32(2),
        version_runs=versions,
        finish_reason="stop",
        worker="w0",
        n_prompt_tokens=1,
        n_attempts=1,
        n_resumed=0,
        queue_ms=0.0,
        run_ms=0.0,
    )


@pytest.fixture
def transcript() -> Transcript:
    made = Transcript()
    made.append([5, 6])
    made.add(rollout([7, 8, 9], [(3, 1), (4, 2)]))
    made.append(np.array([EOS]))
    made.add(rollout([10], [(4, 1)]))
    return made


def test_every_token_has_its_mask_logprob_and_version(transcript: Transcript) -> None:
    assert transcript.tokens.tolist() == [5, 6, 7, 8, 9, EOS, 10]
    assert transcript.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 1]
    assert transcript.token_versions.tolist() == [-1, -1, 3, 4, 4, -1, 4]
    assert transcript.logprobs.tolist() == [0, 0, -7, -8, -9, 0, -10]
    assert transcript.behaviour_logprobs.tolist() == [0, 0, -3.5, -4, -4.5, 0, -5]
    assert len(transcript) == 7
    columns = (transcript.tokens, transcript.loss_mask, transcript.logprobs)
    assert [column.dtype for column in columns] == [np.int32, np.int32, np.float32]


def test_an_empty_transcript_has_empty_columns() -> None:
    assert Transcript().tokens.tolist() == []
    assert Transcript().logprobs.dtype == np.float32


@pytest.mark.parametrize(("turn", "n_left"), [(0, 0), (1, 1), (4, 4), (-1, 3), (-4, 0)])
def test_rewinding_forgets_a_turn_and_all_after_it(
    transcript: Transcript, turn: int, n_left: int
) -> None:
    copy = transcript.before(turn)
    assert len(copy.turns) == n_left
    assert len(transcript.turns) == 4
    transcript.rewind(turn)
    assert transcript.turns == copy.turns


@pytest.mark.parametrize("turn", [5, -5])
def test_a_turn_that_is_not_there_is_refused(transcript: Transcript, turn: int) -> None:
    with pytest.raises(Refused) as caught:
        transcript.rewind(turn)
    assert caught.value.field == "turn"
    assert len(transcript.turns) == 4


def test_branches_grow_apart(transcript: Transcript) -> None:
    branch = transcript.before(2)
    branch.append([40])
    transcript.append([41])
    assert branch.tokens.tolist()[-1] == 40
    assert transcript.tokens.tolist()[-1] == 41


def test_what_is_no_token_is_refused() -> None:
    with pytest.raises(Refused):
        Transcript().append([])
