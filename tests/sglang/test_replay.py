"""What SGLang has sampled is recorded, and its weights say the same of it again."""

import json
from pathlib import Path

import pytest

import rolloutbus
from rolloutbus import Fleet, SamplingParams
from rolloutbus.cli.commands.journals.regenerate import Regeneration, regenerate
from tests.sglang.conftest import DEADLINE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLERANCE = 1e-3
N_TOKENS = 20


async def test_recorded_tokens_get_the_recorded_logprobs_from_the_same_weights(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = SamplingParams(max_new_tokens=N_TOKENS, ignore_eos=True)
    async with rolloutbus.connect(fleet.address, name="trainer") as client:
        async with rolloutbus.record(fleet.address, tmp_path / "j") as recorder:
            await recorder.caught_up(DEADLINE_S)
            for i in range(4):
                await client.generate([5, 6, 7 + i], plain, deadline_s=DEADLINE_S)
            warm = SamplingParams(max_new_tokens=N_TOKENS, temperature=0.5)
            changed = await client.generate([5, 6, 7], warm, deadline_s=DEADLINE_S)
            await recorder.caught_up(DEADLINE_S)
        wanted = Regeneration(
            tmp_path / "j",
            allow_gaps=False,
            rids=frozenset(),
            router=fleet.address,
            key_file="",
            version="any",
            deadline_s=DEADLINE_S,
            concurrency=4,
            tolerance=TOLERANCE,
            is_scored=True,
        )
        assert not await regenerate(wanted, as_json=True)
    told = json.loads(capsys.readouterr().out)
    print(told)
    assert (told["requests"], told["equal"], told["failed"]) == (5, 4, 1)
    assert told["max_logprob_delta"] < TOLERANCE
    (failed,) = [each for each in told["differences"] if each["problem"]]
    assert failed["rid"] == changed.rid
    assert failed["problem"] == "its logprobs are not the model's own: temperature"
