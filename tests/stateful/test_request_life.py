"""Client, router and workers: any order of requests, aborts, faults and time."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.drills.simulation.faults import FAULTS
from tests.drills.simulation.scenario import SMALL, plain_ask
from tests.drills.simulation.verdict import judge
from tests.drills.simulation.world import World

PATIENCE_S = 300.0
PEACE_S = 60.0
KINDS = sorted(FAULTS.keys() - {"poison"})  # asked for by a rule of its own


class RequestLife(RuleBasedStateMachine):
    """A small fleet whose events are not planned but chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(1, replace(SMALL, n_requests=0, probe_s=1e6, faults_s=1e6))
        self.chance = self.world.time.chance("machine")
        self.world.start()
        self.rids: list[str] = []
        self.pass_time(3.0)

    @precondition(lambda self: self.world.clients["c0"].is_alive)
    @rule(n_tokens=st.integers(1, 60))
    def ask(self, n_tokens: int) -> None:
        client = self.world.clients["c0"]
        self.rids.append(client.ask(plain_ask(self.chance, n_tokens), PATIENCE_S))

    @precondition(lambda self: self.rids)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(self.rids))
        client = self.world.clients["c0"]
        if rid in client.cases:
            client.abort(rid)

    @rule(kind=st.sampled_from(KINDS))
    def something_fails(self, kind: str) -> None:
        FAULTS[kind](self.world, self.chance)

    @rule(seconds=st.floats(0.0, 4.0))
    def pass_time(self, seconds: float) -> None:
        self.world.time.run_until(self.world.time.now + seconds)

    @invariant()
    def nothing_is_violated(self) -> None:
        assert self.world.oracles.violations == []

    def teardown(self) -> None:
        self.world.calm_down()
        self.pass_time(PEACE_S)
        assert judge(self.world).violations == []


class TestRequestLife(RequestLife.TestCase):
    settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
