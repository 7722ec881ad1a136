"""What is asked of the fleet in the course of one run."""

from functools import partial
from random import Random
from typing import TYPE_CHECKING

from rolloutbus.bus.wire.messages.generation import CloseSession, OpenSession
from rolloutbus.bus.wire.messages.weights import VersionPublished
from rolloutbus.trainer_adapter.client.core.requests import Ask
from tests.drills.simulation.detached import left_behind
from tests.drills.simulation.scenario import (
    PROBE_DEADLINE_S,
    drawn_ask,
    drawn_deadline_s,
    drawn_publication,
    plain_ask,
    poison_ask,
    session_of,
)
from tests.drills.simulation.sim_client import Case, ClientNode

if TYPE_CHECKING:
    from tests.drills.simulation.world import World

SESSION_DEADLINE_S = 10.0
REOPEN_S = 6.0
"""A client opens its session again this often: to renew it, or because none had room."""
GRACE_S = 5.0
WHIM_SHARE = 0.2
"""Of publications: their trainer soon changes its mind."""
REATTACH_S = 6.0
"""A client looks this often for detached requests whose end nobody of its name has."""


class Workload:
    """Requests, aborts, one weight update, and a probe of each client at the end."""

    def __init__(self, world: "World", chance: Random) -> None:
        self.published_at: float | None = None
        self.poisoned = ""
        """The rid of the request that kills engines."""
        self._published_since = 0.0
        """Weights that were asked for earlier are another fleet's."""
        self._world = world
        self._chance = chance
        self._whims = world.time.chance("publication")
        drawn = drawn_publication(self._whims)
        self._publication = world.scenario.publication or drawn

    @property
    def has_waves(self) -> bool:
        """Whether old weights serve beside new ones while the update is committed."""
        return self._publication.floor > 0

    def ask_poison(self) -> None:
        """Submit a request that kills engines, once per run."""
        client = next((each for each in self._world.clients.values() if each.is_alive), None)
        if client is not None and not self.poisoned:
            self.poisoned = client.ask(poison_ask(self._chance), self._world.scenario.deadline_s)

    def reattach(self, name: str, left: dict[str, Case]) -> None:
        """A client takes these detached requests up, if there are any and the router names them."""
        client = self._world.clients[name]
        if left and client.is_alive and not client.is_frozen:
            client.reattach(left)

    def publish_again(self) -> None:
        """Another fleet comes, which has none of the weights."""
        self._published_since = self._world.time.now
        if self.published_at is not None:
            self.published_at = None
            self._world.later(1.0, self._publish)

    def plan(self) -> None:
        """Everything that will be asked."""
        world, chance = self._world, self._chance
        scenario = world.scenario
        for _ in range(scenario.n_requests):
            name = chance.choice(sorted(world.clients))
            world.later(chance.uniform(0, scenario.work_s), partial(self._ask, name))
        world.later(chance.uniform(*scenario.publish_s), self._publish)
        for name in world.clients:
            world.later(chance.uniform(0.5, REOPEN_S), partial(self._open_session, name))
            world.later(chance.uniform(0.0, REATTACH_S), partial(self._look_again, name))
            world.later(scenario.probe_s, partial(self._probe, name))

    def _ask(self, name: str) -> None:
        chance, client = self._chance, self._world.clients[name]
        scenario = self._world.scenario
        ask = drawn_ask(chance, name, scenario.detached_share)
        deadline_s = drawn_deadline_s(chance, scenario.deadline_s)
        if not client.is_alive or client.is_frozen:
            return
        rid = client.ask(ask, deadline_s)
        if chance.random() < 0.05:
            self._world.later(chance.uniform(0, 3), partial(client.abort, rid))

    def _open_session(self, name: str) -> None:
        """Open it again and again while there is work, then close it."""
        world, client = self._world, self._world.clients[name]
        is_over = world.elapsed_s > world.scenario.work_s
        if client.is_alive and not client.is_frozen:
            session = session_of(name)
            opening = Ask("open_session", OpenSession(session, grace_s=GRACE_S))
            closing = Ask("close_session", CloseSession(session))
            client.ask(closing if is_over else opening, SESSION_DEADLINE_S)
        if not is_over:
            world.later(REOPEN_S, partial(self._open_session, name))

    def _look_again(self, name: str) -> None:
        self.reattach(name, left_behind(self._world, name))
        if self._world.elapsed_s < self._world.scenario.probe_s:
            self._world.later(REATTACH_S, partial(self._look_again, name))

    def _probe(self, name: str) -> None:
        self._world.clients[name].ask(plain_ask(self._chance, 12), PROBE_DEADLINE_S)

    def _publish(self) -> None:
        """The trainer publishes until it succeeds."""
        client = self._world.clients["c0"]
        if client.is_alive and any(
            isinstance(outcome, VersionPublished)
            for case in client.cases.values()
            if case.asked_at >= self._published_since
            for outcome in case.outcomes
        ):
            self.published_at = self._world.time.now
            return
        if client.is_alive and not self._is_publishing(client):
            rid = client.ask(
                Ask("publish_version", self._publication), self._world.scenario.publish_deadline_s
            )
            if self._world.scenario.is_swarm and self._whims.random() < WHIM_SHARE:
                patience_s = self._whims.uniform(0, 3)
                self._world.later(patience_s, partial(client.abort, rid))
        self._world.later(1.0, self._publish)

    def _is_publishing(self, client: ClientNode) -> bool:
        cases = client.cases.values()
        return any(case.ask.kind == "publish_version" and not case.outcomes for case in cases)
