"""A batch of multi-turn agents: groups of 16 that share a task, all sharing a system prompt."""

import math
import statistics
from dataclasses import dataclass
from random import Random

from benchmarks.coordination.engines import SHAPES, Job, VirtualTime
from benchmarks.coordination.fleets import WAYS

SYSTEM_TOKENS = 1500
GROUP = 16


@dataclass(frozen=True)
class AgentLoad:
    """How many agents, and how they talk."""

    n_engines: int
    n_groups: int
    model: str = "7b"
    task_tokens: int = 1200
    """Median of the task that a group shares; lognormal."""
    turns: int = 8
    """Median number; lognormal, at most 40."""
    answer_tokens: int = 250
    """Median of a turn; lognormal with a long tail."""
    result_tokens: int = 500
    """Median of what a tool returns; lognormal."""
    tool_s: float = 3.0
    """Mean time that a tool takes; exponential."""


@dataclass
class _Agent:
    name: str
    group: str
    task: str
    n_task: int
    turns: list[tuple[int, int, float]]
    """Tokens of the answer, tokens of what the tool returns, seconds that it takes."""
    context: int = 0
    at_turn: int = 0
    asked_at: float = 0.0


def _lognormal(chance: Random, median: float, sigma: float, most: float) -> int:
    return max(1, round(min(most, median * math.exp(chance.gauss(0.0, sigma)))))


def _agents(load: AgentLoad, seed: int) -> list[_Agent]:
    chance = Random(seed)
    agents: list[_Agent] = []
    for group in range(load.n_groups):
        n_task = _lognormal(chance, load.task_tokens, 0.6, 6000)
        for n in range(GROUP):
            n_turns = _lognormal(chance, load.turns, 0.6, 40)
            turns = [
                (
                    _lognormal(chance, load.answer_tokens, 0.9, 8000),
                    _lognormal(chance, load.result_tokens, 0.8, 6000),
                    chance.expovariate(1 / load.tool_s),
                )
                for _ in range(n_turns)
            ]
            agents.append(_Agent(f"s{group}.{n}", f"g{group}", f"t{group}", n_task, turns))
    return agents


def run_agents(load: AgentLoad, way: str, seed: int) -> dict[str, float]:
    """From the start of all agents until the last one is done."""
    time = VirtualTime()
    fleet = WAYS[way](time, SHAPES[load.model], load.n_engines, seed)
    agents = _agents(load, seed)
    turn_s: list[float] = []
    left = len(agents)

    def turn(agent: _Agent) -> Job:
        task_end = SYSTEM_TOKENS + agent.n_task
        path = [("system", SYSTEM_TOKENS), (agent.task, task_end)]
        path.append((agent.name, max(agent.context, task_end + 1)))
        n_new = agent.turns[agent.at_turn][0]
        agent.asked_at = time.now
        return Job(
            tuple(path),
            n_new,
            lambda job: ended(agent, job),
            session=agent.name,
            group=agent.group,
            n_allowed=n_new,  # so that prompts are most of what the router knows of a request
            own=agent.name,
        )

    def ended(agent: _Agent, job: Job) -> None:
        nonlocal left
        turn_s.append(time.now - agent.asked_at)
        _, n_result, tool_s = agent.turns[agent.at_turn]
        agent.at_turn += 1
        agent.context = job.n_prompt + job.n_new + n_result
        if agent.at_turn == len(agent.turns):
            left -= 1
        else:
            time.at(time.now + tool_s, lambda: fleet.submit([turn(agent)]))

    fleet.submit([turn(agent) for agent in agents])
    time.run(lambda: not left)
    cached, prompt = (sum(getattr(e, n) for e in fleet.engines) for n in ("n_cached", "n_prompt"))
    return {
        "makespan_s": round(time.now, 1),
        "hit_rate": round(cached / prompt, 3),
        "p50_turn_s": round(statistics.median(turn_s), 2),
        "p99_turn_s": round(statistics.quantiles(turn_s, n=100)[98], 2),
        "tokens_per_s": round(sum(e.n_sampled for e in fleet.engines) / time.now),
    }
