"""The work of `rolloutbus replay --regenerate`: recorded requests, asked of a live fleet again."""

import asyncio
import sys
from collections import Counter
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from rolloutbus.bus.wire.entry import Placement
from rolloutbus.bus.wire.errors import BusError, SettingsError
from rolloutbus.bus.wire.validation import check_placement, cost_of
from rolloutbus.cli.commands.journals.gaps import gaps_told, refuse_gaps, tell_gaps
from rolloutbus.cli.terminal import connected, print_json
from rolloutbus.replay.journal.format import JournalError
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.regenerating import (
    Again,
    Difference,
    difference,
    is_repeatable,
    summary,
    to_sample,
    to_score,
)
from rolloutbus.replay.trajectories import Answered, AnsweredRequests, ints
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.results import Rollout

MAX_LISTED = 50
"""Rows of the table; all of them are in the JSON."""


class Regeneration(NamedTuple):
    """What to ask again, and of which fleet."""

    journal: Path
    allow_gaps: bool
    rids: AbstractSet[str]
    router: str
    key_file: str
    version: str
    """Rule that the weights must satisfy, as in a request."""
    deadline_s: float
    concurrency: int
    """Requests under way at once."""
    tolerance: float
    """Of logprobs."""
    is_scored: bool
    """Nothing is sampled: what the weights say of the recorded tokens is compared."""


async def regenerate(wanted: Regeneration, *, as_json: bool) -> bool:
    """Ask, compare and tell; returns whether everything is equal.

    Raises:
        JournalDamaged: something is missing in the journal, and it is not to be skipped.
        SettingsError: there is no such version rule, or no request.
        Unreachable: no router answers.
    """
    problem = check_placement(Placement("default", wanted.version))
    if problem is not None:
        raise SettingsError(problem.message)
    source = Journal(wanted.journal, skip=wanted.allow_gaps)
    if not wanted.is_scored:
        _refuse_unseeded(AnsweredRequests(source, wanted.rids))
    requests = AnsweredRequests(source, wanted.rids)
    async with connected(wanted.router, wanted.key_file) as client:
        found = await _ask_all(client, requests, wanted)
    tell_gaps(source)
    if not found:
        raise SettingsError(f"{wanted.journal} holds no finished requests: they come from a tap")
    found.sort(key=lambda each: each.rid)
    if as_json:
        told = {
            **summary(found),
            "unfinished": requests.n_unfinished,
            **gaps_told(source),
            "differences": found,
        }
        print_json(told)
    else:
        _show(found, requests)
    if not all(each.is_equal for each in found):
        return False
    refuse_gaps(source, are_allowed=wanted.allow_gaps, harmless=["lost_stream"])
    return True


def _refuse_unseeded(recorded: AnsweredRequests) -> None:
    """Say before anything is asked that it could not be compared.

    Raises:
        SettingsError: none of the requests was seeded.
    """
    are_repeatable = [is_repeatable(each) for each in recorded]
    n_unseeded = are_repeatable.count(False)
    if n_unseeded and not any(are_repeatable):
        raise SettingsError(
            f"all {n_unseeded} requests were drawn without a seed, and would draw other tokens: "
            "--score compares what the weights say of the recorded ones"
        )
    if n_unseeded:
        sys.stderr.write(
            f"note: {n_unseeded} of {len(are_repeatable)} requests were drawn without a seed, and "
            "will draw other tokens: see --score\n"
        )


async def _ask_all(
    client: RolloutClient, requests: AnsweredRequests, wanted: Regeneration
) -> list[Difference]:
    found: list[Difference] = []
    room = asyncio.Semaphore(wanted.concurrency)

    async def compare(recorded: Answered) -> None:
        try:
            again = await _ask(client, recorded, wanted)
        finally:
            room.release()
        found.append(difference(recorded, again, wanted.tolerance))

    damaged: JournalError | None = None
    async with asyncio.TaskGroup() as tasks:
        try:
            for recorded in requests:
                await room.acquire()
                tasks.create_task(compare(recorded))
        except JournalError as error:
            damaged = error  # a group would wrap it; what is under way still ends
    if damaged is not None:
        raise damaged
    return found


async def _ask(client: RolloutClient, recorded: Answered, wanted: Regeneration) -> Again | str:
    body = (to_score if wanted.is_scored else to_sample)(recorded)
    if isinstance(body, str):
        return body
    place = Placement(recorded.place.policy, wanted.version, cost=cost_of(body))
    ask = Ask("generate", body, place=place, retries_busy=True)
    try:
        rollout = await client.connection.ask(ask, wanted.deadline_s)
    except BusError as error:
        return str(error)
    assert isinstance(rollout, Rollout)
    return _scored(recorded, rollout) if wanted.is_scored else _sampled(rollout)


def _sampled(rollout: Rollout) -> Again:
    return Again(rollout.tokens, rollout.logprobs, rollout.version_runs, rollout.finish_reason)


def _scored(recorded: Answered, rollout: Rollout) -> Again | str:
    tokens = ints(recorded.result.tokens)
    logprobs = np.asarray(rollout.arrays.get("prompt_logprobs", ()), "<f4")
    if logprobs.shape != tokens.shape:
        return f"the engine told logprobs of shape {logprobs.shape} for {len(tokens)} tokens"
    [(version, _), *_] = rollout.version_runs
    return Again(tokens, logprobs, [(version, len(tokens))], recorded.result.finish_reason)


def _show(found: list[Difference], requests: AnsweredRequests) -> None:
    console = Console(highlight=False, soft_wrap=True)
    others = [each for each in found if not each.is_equal and not each.problem]
    if others:
        table = Table("request", "tokens", "again", "first difference", "max |Δlogprob|", "why")
        for each in others[:MAX_LISTED]:
            table.add_row(
                each.rid,
                str(each.n_recorded),
                str(each.n_again),
                "-" if each.first is None else str(each.first),
                f"{each.max_logprob_delta:.2g}",
                _why(each),
            )
        console.print(table)
        if len(others) > MAX_LISTED:
            console.print(f"… and {len(others) - MAX_LISTED} more: see --json")
    for problem, n in Counter(each.problem for each in found if each.problem).most_common():
        console.print(f"{n} failed: {problem}", markup=False)
    told = summary(found)
    console.print(
        f"{told['requests']} requests: {told['equal']} equal, {told['different']} different, "
        f"{told['failed']} failed; max |Δlogprob| {told['max_logprob_delta']:.3g}; "
        f"{requests.n_unfinished} had not finished when they were recorded"
    )


def _why(each: Difference) -> str:
    if each.first is not None and not each.is_reproducible:
        return "drawn without a seed: see --score"
    versions = [version for version, _ in each.versions_recorded]
    again = [version for version, _ in each.versions_again]
    return "" if versions == again else f"version {versions} was, {again} is"
