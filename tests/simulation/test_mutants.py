"""Each protection is needed: the simulator notices when it is switched off."""

from itertools import chain

import pytest

from tests.drills.simulation.campaign import detect
from tests.drills.simulation.mutants import MUTANTS, SCENARIOS
from tests.drills.simulation.runs import run_seed
from tests.drills.simulation.scenario import SWARM

FOUND_BY = {
    "fencing": 0,
    "retry": 4,
    "self_fence": 0,
    "outbox": 3,
    "client_resend": 19,
    "holding_back": 0,
    "client_dedup": 0,
    "recovery_window": 7,
    "own_pause_grace": 10,
    "lease_from_receipt": 2,
    "router_resend": 28,
    "expiry": 15,
    "short_window": 0,
    "epoch_per_boot": 3,
    "commit_record": 0,
    "decision": 3985,
    "doubt": 0,
    "quarantine": 0,
    "isolation": 4,
    "session_news": 0,
    "session_news_once": 0,
    "detached_requeue": 38,
    "detached_over": 0,
    "intent": 0,
    "intent_copies": 3,
    "pair_asking": 0,
    "pair_wish": 3,
    "pair_outranked": 0,
    "pair_waking": 134,
    "pair_link": 134,
    "pair_old_news": 321,
}
"""Mutant -> a seed that finds it."""
SEARCHED = 600


def test_every_mutant_has_a_seed_that_finds_it() -> None:
    assert FOUND_BY.keys() == MUTANTS.keys()


@pytest.mark.simulation
@pytest.mark.timeout(900)
@pytest.mark.sampled(6)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_missing_protection_is_noticed(mutant: str) -> None:
    scenario = SCENARIOS.get(mutant, SWARM)
    assert run_seed(FOUND_BY[mutant], scenario).violations == []

    # A change of the product changes the runs: then another seed finds it.
    assert detect(mutant, chain([FOUND_BY[mutant]], range(SEARCHED)), enough=1).found_in
