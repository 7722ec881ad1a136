"""One simulated run: a fleet, a workload, faults for a while, then peace, and a verdict."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from tests.drills.simulation.ambush import Ambushes
from tests.drills.simulation.detached import known_before
from tests.drills.simulation.faults import FAULTS, KINDS, PAIR_KINDS
from tests.drills.simulation.fleet_oracles import FleetOracles
from tests.drills.simulation.health import Health
from tests.drills.simulation.memory_ports import MemoryNet
from tests.drills.simulation.oracles import Oracles
from tests.drills.simulation.pair_oracles import PairOracles
from tests.drills.simulation.pauses import Pauses
from tests.drills.simulation.process import Process
from tests.drills.simulation.routers import SPLIT_AFTERMATH_S, RouterPair, Routers
from tests.drills.simulation.scenario import SWARM, Scenario
from tests.drills.simulation.sim_client import Case, ClientNode
from tests.drills.simulation.sim_pair import PairNode
from tests.drills.simulation.sim_router import Reign, RouterNode
from tests.drills.simulation.sim_store import Record, StoreNode
from tests.drills.simulation.sim_worker import Site, WorkerNode
from tests.drills.simulation.story import Story
from tests.drills.simulation.two_fleets import TwoFleets
from tests.drills.simulation.virtual_time import VirtualTime
from tests.drills.simulation.watch import Watch
from tests.drills.simulation.weather import Climate, SimWeather
from tests.drills.simulation.workload import Workload

SUPERVISE_S = 1.0
AMBUSH_SHARE = 0.5
"""Of the runs: a weight update is cut at a certain point, besides all other faults."""

P = TypeVar("P", bound=Process)

Tamper = Callable[[Process], None]
"""Changes a process before it does anything: how protections are switched off."""


class World:
    """Everything that runs under one seed."""

    def __init__(
        self,
        seed: int,
        scenario: Scenario = SWARM,
        tamper: Tamper | None = None,
        story: Story | None = None,
    ) -> None:
        self.time = VirtualTime(seed)
        self.scenario = scenario
        self.story = story
        self._start = self.time.now
        self._tamper = tamper
        self._chance = self.time.chance("world")
        climate = Climate.drawn(self._chance) if scenario.is_swarm else Climate()
        if scenario.echoes is not None:
            climate.echoes = scenario.echoes
        has_pair = self.time.chance("pair").random() < scenario.pair_share
        if has_pair:
            climate.echoes = (
                0.0  # TCP has none, and an old "I stand by" would be taken for a new one
            )
        self.is_unreliable = climate.loss > 0 or climate.echoes > 0
        """Whether frames are dropped or come twice on links that stay, until the faults stop."""
        self.drops_frames = climate.loss > 0
        self.weather = SimWeather(self.time, climate)
        tap = partial(story.carried, self.time) if story is not None else None
        self.net = MemoryNet(self.time, self.weather, tap)
        self.oracles = Oracles(self)
        self.fleet_oracles = FleetOracles(self, self.oracles)
        self.pair_oracles = PairOracles(self)
        self._watch = Watch(self.oracles, self.fleet_oracles)
        self.health = Health(self.time, self.weather)
        self.ambushes = Ambushes(self, self.time.chance("ambushes"))
        if scenario.ambush is not None:
            self.ambushes.lay_at(*scenario.ambush)
        self.record = Record()
        self.frozen_s: Counter[str] = Counter()
        """rid -> seconds for which an engine that had it stood still."""
        self._n_boots = 0
        self.is_calm = False
        self._slots = self._chance.choice([2, 4, 8]) if scenario.is_swarm else 4
        self.routers: Routers | RouterPair = (
            RouterPair(self.time, self._new_process_of_pair)
            if has_pair
            else Routers(self.time, self._new_router)
        )
        self.store = self._new_store()
        self.workers = {name: self._new_worker(name) for name in self._names("w")}
        self.clients = {name: self._new_client(name) for name in self._names("c")}
        self.dead: list[Process] = []
        self.workload = Workload(self, self._chance)
        self.pauses = Pauses(self, self.time.chance("pauses"))
        self.two_fleets = TwoFleets(self, self.time.chance("two fleets"))

    @property
    def elapsed_s(self) -> float:
        """Since the run began."""
        return self.time.now - self._start

    def run(self) -> None:
        """The whole run."""
        self.start()
        self.time.run_until(self._start + self.scenario.total_s)

    def start(self) -> None:
        """Plan everything; it happens when time passes."""
        self.workload.plan()
        if self.scenario.pause_s is not None:
            self.pauses.plan(self.scenario.pause_s)
        if self.scenario.second_fleet_s is not None:
            self.two_fleets.plan(self.scenario.second_fleet_s)
        self._plan_faults()

    def later(self, delay_s: float, action: Callable[[], object]) -> None:
        """Do something in a while."""
        self.time.later(delay_s, action)

    def note(self, text: str) -> None:
        """Something that a reader of the trace and of the story must know."""
        self.time.record(text.encode())
        if self.story is not None:
            self.story.note(self.time, text)

    @property
    def router(self) -> RouterNode:
        """Where new connections come to; of a pair, the one that became active last."""
        return self.routers.current

    def stands_still(self, name: str, for_s: float) -> None:
        """The engine of a worker is frozen for so long; what it has then or will get is delayed."""

        def note() -> set[str]:
            deliveries = self.workers[name].core.member.deliveries
            return {rid for rid, _, _ in deliveries.running_list()}

        before = note()
        self.frozen_s.update(dict.fromkeys(before, for_s))
        self.later(for_s, lambda: self.frozen_s.update(dict.fromkeys(note() - before, for_s)))

    def case(self, rid: str) -> Case | None:
        """The request with this rid, of a client that lives."""
        client = self.clients.get(rid.partition("/")[0])
        return client.cases.get(rid) if client is not None else None

    # -- who runs -----------------------------------------------------------------------------

    def revive_worker(self, name: str) -> None:
        """A worker process in the place of one that died."""
        if not self.workers[name].is_alive:
            self.dead.append(self.workers[name])
            self.health.touch(name, 4.0)
            self.workers[name] = self._new_worker(name)

    def revive_client(self, name: str) -> None:
        """A client process in the place of one that died; it knows nothing of the old one."""
        if not self.clients[name].is_alive:
            self.dead.append(self.clients[name])
            self.clients[name] = self._new_client(name)
            self.workload.reattach(name, known_before(self, name))

    def revive_store(self) -> None:
        """A store in the place of one that died."""
        if not self.store.is_alive:
            self.store = self._new_store()

    def forget_weights(self) -> None:
        """Nothing was ever published in the fleet that comes now."""
        self.record = Record()
        self.fleet_oracles.recorded_at = None
        self.workload.publish_again()

    def _names(self, kind: str) -> list[str]:
        count = self.scenario.n_workers if kind == "w" else self.scenario.n_clients
        return [f"{kind}{i}" for i in range(count)]

    def _boot(self) -> int:
        self._n_boots += 1
        return self._n_boots

    def _new_router(self, reign: Reign | None = None) -> RouterNode:
        instance = f"{self._boot():08d}-router"
        return self._tampered(RouterNode(self.net, self._watch, instance, reign))

    def _new_process_of_pair(self, name: str) -> PairNode:
        def begin(reign: Reign) -> RouterNode:
            assert isinstance(self.routers, RouterPair)
            return self.routers.began(self._new_router(reign))

        pair_watch = self.pair_oracles
        return self._tampered(PairNode(name, self.net, pair_watch, self._boot(), begin))

    def _new_store(self) -> StoreNode:
        return self._tampered(
            StoreNode(
                self.net,
                self._watch,
                self._boot(),
                self.record,
                self.scenario.store_answer_s,
                self.routers.back,
            )
        )

    def _new_worker(self, name: str) -> WorkerNode:
        step_s = self._chance.choice([0.4, 1.0, 2.0]) if self.scenario.is_swarm else 0.25
        site = Site(step_s, self._slots, self._can_pull, self.routers.back)
        return self._tampered(WorkerNode(name, self.net, self._watch, self._boot(), site))

    def _new_client(self, name: str) -> ClientNode:
        front = self.routers.front
        return self._tampered(ClientNode(name, self.net, self.oracles, self._boot(), front))

    def _tampered(self, process: P) -> P:
        if self._tamper is not None:
            self._tamper(process)
        return process

    def _can_pull(self, name: str) -> bool:
        """Whether this worker reaches the store now."""
        return self.store.is_alive and not self.weather.is_cut("store", name)

    # -- what goes wrong ----------------------------------------------------------------------

    def _plan_faults(self) -> None:
        self._supervise()
        scenario = self.scenario
        self.later(scenario.faults_s, self.calm_down)
        chance = self.time.chance("faults")
        if scenario.fault is not None:
            kind, moment_s = scenario.fault
            self.later(moment_s, partial(FAULTS[kind], self, chance))
        if not scenario.is_swarm:
            return
        known = PAIR_KINDS if isinstance(self.routers, RouterPair) else KINDS
        drawn = chance.sample(known, chance.randrange(3, len(known) + 1))
        kinds = scenario.kinds or drawn
        if self._chance.random() < AMBUSH_SHARE:
            self.ambushes.lay(self._chance)
        for _ in range(chance.randint(*scenario.n_faults)):
            fault = FAULTS[chance.choice(kinds)]
            self.later(chance.uniform(2, scenario.faults_s), partial(fault, self, chance))

    def calm_down(self) -> None:
        """The faults are over."""
        self.is_calm = True
        if isinstance(self.routers, Routers):
            self.routers.unite(keeps_first=False)
        self.weather.calm_down()

    def _supervise(self) -> None:
        """Whatever left by itself is started again."""
        self.later(SUPERVISE_S, self._supervise)
        self.fleet_oracles.passed(SUPERVISE_S)
        if self.routers.is_split:
            self.health.touch("router", SPLIT_AFTERMATH_S)
        self.pair_oracles.passed(SUPERVISE_S)
        for name, worker in self.workers.items():
            if not worker.is_alive:
                self.later(4.0, partial(self.revive_worker, name))
        if not self.store.is_alive:
            self.later(4.0, self.revive_store)
        for name, client in self.clients.items():
            if client.was_dismissed:
                self.oracles.seen["clients_dismissed"] += 1
                client.was_dismissed = False
                self.later(0.5, partial(self.revive_client, name))
