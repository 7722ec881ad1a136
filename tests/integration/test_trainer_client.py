"""What trainers ask of a client, on real engines: chosen workers, and each row's own ending."""

import pytest

from rolloutbus import Rollout, RolloutClient, SamplingParams
from rolloutbus.errors import Refused
from tests.integration.conftest import REAL_ENGINES
from tests.integration.live_fleet import DEADLINE_S

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

FLEET = REAL_ENGINES
FEW = SamplingParams(max_new_tokens=3, ignore_eos=True)


async def test_requests_run_at_the_worker_that_they_name(client: RolloutClient) -> None:
    prompts = [[1, 2, 3]] * 6
    for worker in ("w0", "w1"):
        groups = await client.generate_batch(prompts, FEW, worker=worker, deadline_s=DEADLINE_S)
        assert {rollout.worker for (rollout,) in groups} == {worker}


async def test_a_worker_that_nobody_knows_is_refused_by_its_name(client: RolloutClient) -> None:
    with pytest.raises(Refused, match="'w7' of policy 'default' is here or expected; there are w0"):
        await client.generate([1, 2], FEW, worker="w7", deadline_s=DEADLINE_S)


async def test_rows_of_a_batch_end_each_by_itself(client: RolloutClient) -> None:
    samplings = [FEW, SamplingParams(max_new_tokens=3, temperature=-1.0), FEW]
    good, bad, last = await client.generate_batch(
        [[1, 2], [1, 2], [3]], samplings, n=2, on_error="return", deadline_s=DEADLINE_S
    )
    for row in (*good, *last):
        assert isinstance(row, Rollout)
        assert len(row.tokens) == 3
    assert [row.field for row in bad if isinstance(row, Refused)] == 2 * ["sampling.temperature"]
