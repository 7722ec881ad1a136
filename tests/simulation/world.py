"""One simulated run: a fleet, a workload, faults for a while, then peace; and what must be true."""

from collections import Counter
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from bus.entry import Placement
from bus.memory_ports import MemoryNet
from bus.messages.generation import Generate, Sampling
from bus.messages.weights import Published, PublishVersion
from bus.testing import VirtualTime
from bus.versions import VersionRule, parse_versions
from engine_worker.engines.fake_tokens import fake_token
from tests.simulation.nodes import RouterNode, StoreNode, WorkerNode
from tests.simulation.sim_client import ClientNode
from tests.simulation.weather import SimWeather
from trainer_adapter.requests import Ask
from trainer_adapter.rollout import OnLoss, Rollout, RolloutCancelled

N_WORKERS, N_CLIENTS, N_REQUESTS = 4, 3, 60
WORK_S, FAULTS_S, TOTAL_S = 20.0, 30.0, 90.0
"""Requests arrive until, faults happen until, the run ends at (virtual seconds)."""
DEADLINE_S = 80.0


@dataclass
class Report:
    """What one run showed."""

    seed: int
    trace: str
    violations: list[str] = field(default_factory=list[str])
    sometimes: Counter[str] = field(default_factory=Counter[str])
    n_requests: int = 0
    n_executions: int = 0


class World:
    """Everything that runs under one seed."""

    def __init__(self, seed: int) -> None:
        self.time = VirtualTime(seed)
        self._chance = self.time.chance("world")
        self._weather = SimWeather(self.time.chance("weather"))
        self._net = MemoryNet(self._later, self._weather)
        self._n_boots = 0
        self.router = self._new_router()
        self.store = StoreNode(self._net, self.time)
        self.workers = {f"w{i}": self._new_worker(f"w{i}") for i in range(N_WORKERS)}
        self.clients = [ClientNode(f"c{i}", self._net, self.time) for i in range(N_CLIENTS)]
        self.dead: list[WorkerNode] = []
        self.routers: list[RouterNode] = [self.router]
        self.published = ""
        self._start = self.time.now

    def run(self) -> Report:
        """The whole run."""
        self._plan_work()
        self._plan_faults()
        self.time.run_until(self._start + TOTAL_S)
        return self._report()

    def _later(self, delay_s: float, action: object) -> None:
        self._weather.now = self.time.now
        self.time.later(delay_s, cast("type", action))

    def _new_router(self) -> RouterNode:
        self._n_boots += 1
        return RouterNode(self._net, self.time, f"router-{self._n_boots}")

    def _new_worker(self, name: str) -> WorkerNode:
        self._n_boots += 1
        step_s = self._chance.choice([0.02, 0.05, 0.2])
        return WorkerNode(name, self._net, self.time, self._n_boots, step_s)

    # -- what is asked ------------------------------------------------------------------------

    def _plan_work(self) -> None:
        for _ in range(N_REQUESTS):
            client = self._chance.choice(self.clients)
            self._at(self._chance.uniform(0, WORK_S), lambda c=client: self._ask(c))
        self._at(self._chance.uniform(5, WORK_S), self._publish)

    def _ask(self, client: ClientNode) -> None:
        chance = self._chance
        prompt = np.array([chance.randrange(1, 1000) for _ in range(6)], "<i4").tobytes()
        sampling = Sampling(max_new_tokens=chance.randrange(4, 300), seed=chance.randrange(1000))
        place = Placement(
            "default",
            chance.choice(["any", "any", "latest", "max-staleness:1", "min:1"]),
            session=chance.choice(["", "", "s1", "s2"]),
            group=chance.choice(["", "g1"]),
            cost=100,
        )
        body = Generate(prompt, sampling, stream=chance.random() < 0.5)
        on_loss: OnLoss = "retry" if chance.random() < 0.3 else "resume"
        rid = client.ask(Ask("generate", body, place=place, on_loss=on_loss), DEADLINE_S)
        if chance.random() < 0.05:
            self._at_in(chance.uniform(0, 3), lambda: client.abort(rid))

    def _publish(self) -> None:
        body = PublishVersion("default", 1)
        self.published = self.clients[0].ask(Ask("publish_version", body), 40.0)

    # -- what goes wrong ----------------------------------------------------------------------

    def _supervise(self) -> None:
        """Whatever died is started again."""
        for name, worker in self.workers.items():
            if not worker.is_alive and worker not in self.dead:
                self.dead.append(worker)
                self._at_in(1.0, lambda name=name: self._revive(name))

    def _plan_faults(self) -> None:
        self.time.every(0.5, self._supervise)
        for _ in range(self._chance.randrange(2, 9)):
            fault = self._chance.choice(
                [
                    self._kill_worker, self._freeze_worker, self._cut_worker, self._crash_host,
                    self._restart_router, self._cut_client, self._freeze_router,
                ]
            )  # fmt: skip
            self._at(self._chance.uniform(2, FAULTS_S), fault)

    def _kill_worker(self) -> None:
        name = self._chance.choice(sorted(self.workers))
        self._note(f"kill {name}")
        old = self.workers[name]
        old.kill()
        self.dead.append(old)
        self._at_in(self._chance.uniform(0.2, 4), lambda: self._revive(name))

    def _revive(self, name: str) -> None:
        if not self.workers[name].is_alive:
            self.workers[name] = self._new_worker(name)

    def _freeze_worker(self) -> None:
        name = self._chance.choice(sorted(self.workers))
        for_s = self._chance.choice([0.5, 1.5, 4.0, 8.0])
        self._note(f"freeze {name} {for_s}")
        self.workers[name].freeze(for_s)

    def _crash_host(self) -> None:
        name = self._chance.choice(sorted(self.workers))
        self._note(f"crash host {name}")
        self.workers[name].kill_host()

    def _cut_worker(self) -> None:
        self._cut(self._chance.choice(sorted(self.workers)), "router")

    def _cut_client(self) -> None:
        self._cut(self._chance.choice(self.clients).name, "router")

    def _cut(self, one: str, other: str) -> None:
        until = self.time.now + self._chance.choice([0.5, 2.0, 6.0])
        way = self._chance.choice(["both", "there", "back"])
        self._note(f"cut {one} {way} until {until:.3f}")
        if way != "back":
            self._weather.cut(one, other, until)
        if way != "there":
            self._weather.cut(other, one, until)

    def _restart_router(self) -> None:
        if not self.router.is_alive:
            return
        self._note("kill router")
        self.router.kill()
        self._at_in(self._chance.uniform(0.05, 3), self._revive_router)

    def _revive_router(self) -> None:
        self.router = self._new_router()
        self.routers.append(self.router)

    def _freeze_router(self) -> None:
        for_s = self._chance.choice([0.5, 2.0, 5.0])
        self._note(f"freeze router {for_s}")
        self.router.freeze(for_s)

    def _at(self, moment_s: float, action: object) -> None:
        self.time.later(moment_s, cast("type", action))

    _at_in = _at

    def _note(self, text: str) -> None:
        self.time.note(text)

    # -- what must be true --------------------------------------------------------------------

    def _report(self) -> Report:
        report = Report(self.time.seed, "")
        for client in self.clients:
            for rid, ask in client.asked.items():
                self._judge(report, client, rid, ask)
        self._count(report)
        self.time.note(f"{report.violations} {sorted(report.sometimes.items())}")
        report.trace = self.time.trace_hash
        return report

    def _judge(self, report: Report, client: ClientNode, rid: str, ask: Ask) -> None:
        outcomes = client.outcomes.get(rid, [])
        self.time.note(f"{rid} {[_brief(outcome) for outcome in outcomes]}")
        if len(outcomes) != 1:
            report.violations.append(f"{rid}: {len(outcomes)} outcomes")
            return
        outcome = outcomes[0]
        if rid == self.published:
            if not isinstance(outcome, Published):
                report.violations.append(f"{rid}: publish ended with {outcome}")
            return
        report.n_requests += 1
        body = cast("Generate", ask.body)
        if isinstance(outcome, RolloutCancelled):
            report.sometimes["cancelled"] += 1
            outcome = outcome.partial
        if not isinstance(outcome, Rollout):
            report.violations.append(f"{rid}: ended with {outcome!r}")
            return
        self._judge_rollout(report, rid, body, outcome)
        rule = parse_versions(ask.place.versions) if ask.place else None
        oldest = min((version for version, _ in outcome.versions), default=1)
        if isinstance(rule, VersionRule) and rule.kind == "min" and oldest < rule.value:
            report.violations.append(f"{rid}: {rule} got {outcome.versions}")
        self._judge_stream(report, rid, outcome, client)

    def _judge_rollout(self, report: Report, rid: str, body: Generate, rollout: Rollout) -> None:
        seed = body.sampling.seed or 0
        wanted = [
            fake_token(body.prompt, seed, index, int(version))
            for index, version in enumerate(rollout.token_versions)
        ]
        if rollout.tokens.tolist() != wanted or len(rollout.logprobs) != len(wanted):
            report.violations.append(f"{rid}: wrong tokens")
        is_whole = len(wanted) == body.sampling.max_new_tokens
        if rollout.finish_reason != "abort" and not is_whole:
            report.violations.append(f"{rid}: {len(wanted)} of {body.sampling.max_new_tokens}")
        report.sometimes["resumed"] += rollout.n_resumed > 0
        report.sometimes["mixed_versions"] += len(rollout.versions) > 1
        report.sometimes["several_attempts"] += rollout.n_attempts > 1

    def _judge_stream(self, report: Report, rid: str, rollout: Rollout, client: ClientNode) -> None:
        held: list[int] = []
        for delta in client.deltas.get(rid, []):
            if delta.start > len(held):
                report.violations.append(f"{rid}: gap in the stream at {len(held)}")
                return
            held = held[: delta.start] + delta.tokens.tolist()
        tokens = rollout.tokens.tolist()
        was_cut = rollout.finish_reason == "abort"  # its reader had gone before the last tokens
        if client.deltas.get(rid) and held != (tokens[: len(held)] if was_cut else tokens):
            report.violations.append(f"{rid}: the stream differs from the result")

    def _count(self, report: Report) -> None:
        nodes = [*self.workers.values(), *self.dead]
        report.n_executions = sum(len(node.executions) for node in nodes)
        for router in self.routers:
            for name, count in router.core.context.counters.items():
                report.sometimes[name] += count
        for client in self.clients:
            for name in ("repairs", "reconnects", "stale_endings"):
                report.sometimes[name] += getattr(client.core.counters, name)
        left = len(self.router.core.table)
        if left:
            report.violations.append(f"{left} requests left in the router's table")


def _brief(outcome: object) -> str:
    if isinstance(outcome, Rollout):
        return f"{outcome.worker} {outcome.n_attempts} {outcome.versions}"
    return type(outcome).__name__


def run_seed(seed: int) -> Report:
    """One whole run."""
    return World(seed).run()
