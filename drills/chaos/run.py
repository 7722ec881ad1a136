"""One chaos run from its seed to its report."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np

from bus.clock import BootClock
from bus.messages.generation import Sampling
from drills.chaos.history import Oracle, Verdict, fake_oracle, judge, lives_of
from drills.chaos.records import read_history
from drills.chaos.recovery import NOTICED_S, Recovery, Struck, recoveries
from drills.chaos.rig import MAX_TOKENS, Rig
from drills.chaos.schedule import Salvo, draw_salvos
from drills.chaos.settings import ChaosSettings
from trainer_adapter.client import connect

WARM_UP_S = 3.0
WELL_TIMEOUT_S = 60.0
SETTLED_S = 3.0
"""After the last answer, until the router has forgotten who left."""
N_GREEDY_PROMPTS = 16
MAX_FDS_GROWN = 16
"""Sockets that may still be closing."""
MAX_RSS_GROWN_MIB = 32.0


class Usage(NamedTuple):
    """Of one process, now."""

    n_fds: int
    rss_mib: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a run showed; `problems` is empty if it showed what it must."""

    seed: int
    seconds: float
    workers: int
    clients: int
    open_requests: int
    faults: dict[str, int]
    requests: int
    ok: int
    moved: int
    """Ended well after more than one attempt."""
    unwanted: int
    """Ended by an abort or a loss that the caller had asked to hear of, or wrongly."""
    lost: int
    duplicated: int
    wrong_tokens: int
    poisoned: int
    failed: int
    recovery: dict[str, Recovery]
    router_restart_ms: list[float]
    """Median and maximum, from the kill to its ready line."""
    router_before: Usage
    """Under load, before the first fault."""
    router_after: Usage
    """The last router, after the drain."""
    problems: list[str]
    stories: list[str]


async def run_chaos(
    settings: ChaosSettings, on_progress: Callable[[str], None] = lambda _: None
) -> Report:
    """Break a fleet as the seed says, then judge what its clients saw.

    Args:
        settings: of the run.
        on_progress: is told in a few words where it stands.

    Raises:
        ProcessFailed: a process could not be kept running.
    """
    clock = BootClock()
    begun_at = clock.now()
    rng = Random(settings.seed)  # noqa: S311 - must be repeatable
    salvos = draw_salvos(rng, settings.faults, settings.faults_for_s)
    with _directory(settings) as path:
        rig = Rig(settings, path, _prompts(settings))
        on_progress("starting")
        async with rig:
            oracle = await _oracle(settings, rig)
            await rig.start_load()
            await asyncio.sleep(WARM_UP_S)
            before = usage_of(rig.fleet.pids["router"])
            await _strike_all(rig, salvos, on_progress)
            on_progress("healing")
            await rig.wait_well(WELL_TIMEOUT_S)
            on_progress("waiting for the last answers")
            await rig.drain()
            await asyncio.sleep(SETTLED_S)
            after = usage_of(rig.fleet.pids["router"])
        on_progress("judging")
        lives = lives_of(read_history(rig.histories))
        verdict = judge(lives, oracle)
        (path / "faults.json").write_bytes(msgspec.json.encode(rig.struck))
    found = _Found(verdict, recoveries(lives.values(), rig.struck), rig.struck, before, after)
    return _report(settings, clock.now() - begun_at, found)


@contextmanager
def _directory(settings: ChaosSettings) -> Generator[Path]:
    if settings.directory:
        path = Path(settings.directory).absolute()
        path.mkdir(parents=True, exist_ok=True)
        yield path
    else:
        with tempfile.TemporaryDirectory(prefix="chaos-") as name:
            yield Path(name)


async def _strike_all(rig: Rig, salvos: list[Salvo], on_progress: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    first_at = loop.time()
    not_before = first_at
    for salvo in salvos:
        strike_at = max(first_at + salvo.at_s, not_before)
        await asyncio.sleep(max(0.0, strike_at - loop.time()))
        await rig.strike(salvo.faults)
        not_before = loop.time() + NOTICED_S
        last = rig.struck[-1]
        on_progress(f"{len(rig.struck)} faults, last {last.kind} {last.victim}")


def usage_of(pid: int) -> Usage:
    """File descriptors and resident memory of a process of this user's."""
    n_fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    status = Path(f"/proc/{pid}/status").read_text()
    [kib] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
    return Usage(n_fds, round(kib / 1024, 1))


class _Found(NamedTuple):
    """All that a report is made of."""

    verdict: Verdict
    recovery: dict[str, Recovery]
    struck: list[Struck]
    before: Usage
    after: Usage


def _prompts(settings: ChaosSettings) -> list[list[int]]:
    """What a real model is asked: few prompts, whose answers can be known beforehand."""
    if settings.engine == "fake":
        return []
    return [[1 + number, *range(2, 2 + number % 7)] for number in range(N_GREEDY_PROMPTS)]


async def _oracle(settings: ChaosSettings, rig: Rig) -> Oracle:
    """The fake engine's function; of a real model, what it says while nothing is broken."""
    prompts = _prompts(settings)
    if not prompts:
        return fake_oracle
    sampling = Sampling(
        max_new_tokens=MAX_TOKENS[settings.engine], temperature=0.0, ignore_eos=True
    )
    async with connect(rig.fleet.address, name="reference") as client:
        groups = await client.generate_batch(prompts, sampling, deadline_s=settings.deadline_s)
    known = {
        np.array(prompt, "<i4").tobytes(): rollout.tokens.tolist()
        for prompt, [rollout] in zip(prompts, groups, strict=True)
    }
    return lambda request, versions: known[request.prompt][: len(versions)]


def _report(settings: ChaosSettings, seconds: float, found: _Found) -> Report:
    verdict, recovery, struck, before, after = found
    restarts = sorted(each.until - each.at for each in struck if each.kind == "kill_router")
    return Report(
        seed=settings.seed,
        seconds=round(seconds, 1),
        workers=settings.workers,
        clients=settings.clients,
        open_requests=settings.open_requests,
        faults=dict(sorted(Counter(each.kind for each in struck).items())),
        requests=verdict.n_requests,
        ok=verdict.n_ok,
        moved=verdict.n_moved,
        unwanted=verdict.n_unwanted,
        lost=len(verdict.lost),
        duplicated=len(verdict.duplicated),
        wrong_tokens=len(verdict.wrong_tokens),
        poisoned=len(verdict.poisoned),
        failed=len(verdict.failed),
        recovery=recovery,
        router_restart_ms=[
            round(s * 1e3, 1) for s in (*restarts[len(restarts) // 2 :][:1], *restarts[-1:])
        ],
        router_before=before,
        router_after=after,
        problems=_problems(verdict, recovery, before, after),
        stories=verdict.stories,
    )


def _problems(
    verdict: Verdict, recovery: dict[str, Recovery], before: Usage, after: Usage
) -> list[str]:
    problems = [f"{verdict.n_violations} requests ended wrongly"] if verdict.n_violations else []
    problems += [
        f"{name}: p99 recovery {each.p99_ms:.0f} ms, bound {each.bound_ms:.0f} ms"
        for name, each in recovery.items()
        if not each.is_within_bound
    ]
    if after.n_fds > before.n_fds + MAX_FDS_GROWN:
        problems.append(f"the router's fds grew from {before.n_fds} to {after.n_fds}")
    if after.rss_mib > before.rss_mib + MAX_RSS_GROWN_MIB:
        problems.append(f"the router grew from {before.rss_mib} to {after.rss_mib} MiB")
    return problems
