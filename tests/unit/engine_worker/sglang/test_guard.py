"""What the guard lets through in which state, and what it refuses before SGLang sees it."""

from contextlib import nullcontext
from itertools import product
from typing import get_args

import pytest

from rolloutbus.bus.wire.errors import EngineFailed, LocalProtocolError
from rolloutbus.engine_worker.engine import EngineBusy, InFlight
from rolloutbus.engine_worker.engines.sglang.guard import (
    CUDA_GRAPH,
    GATE_LIFE,
    KV_CACHE,
    PAUSED,
    TAGS,
    WEIGHTS,
    Abilities,
    GateEvent,
    GateState,
    StateGuard,
)

STATES = get_args(GateState)
EVENTS = get_args(GateEvent)


ANY_SGLANG = Abilities()


def guard_in(state: GateState, can: Abilities = ANY_SGLANG) -> StateGuard:
    return StateGuard(can, state=state)


@pytest.mark.parametrize(("state", "event"), list(product(STATES, EVENTS)))
def test_a_gate_moves_as_the_table_says_and_by_nothing_else(
    state: GateState, event: GateEvent
) -> None:
    guard = guard_in(state)
    after = GATE_LIFE[state].get(event)

    if after is None:
        with pytest.raises(LocalProtocolError):
            guard.moved(event)
        assert guard.state == state
    else:
        guard.moved(event)
        assert guard.state == after


def test_no_state_is_a_trap() -> None:
    for state in STATES:
        assert state == "running" or GATE_LIFE[state]["go_on"] == "running"


def test_a_retracted_request_never_counts_as_held() -> None:
    assert GATE_LIFE["retracted"]["hold"] == "retracted"


FLUSHES: dict[tuple[GateState, bool, bool], bool] = {
    # (state, are there requests, flushes beside a queue) -> may flush
    ("running", False, False): True,
    ("running", False, True): True,
    ("running", True, False): False,
    ("running", True, True): False,
    ("held", False, False): True,
    ("held", False, True): True,
    ("held", True, False): False,
    ("held", True, True): False,
    ("retracted", False, False): True,
    ("retracted", False, True): True,
    ("retracted", True, False): False,
    ("retracted", True, True): True,
    ("settled", False, False): True,
    ("settled", False, True): True,
    ("settled", True, False): True,  # they wait before the gate
    ("settled", True, True): True,
}


@pytest.mark.parametrize(("state", "has_requests", "flushes_queued"), list(FLUSHES))
def test_the_cache_is_flushed_only_where_sglang_would(
    state: GateState, has_requests: bool, flushes_queued: bool
) -> None:
    guard = guard_in(state, Abilities(flushes_queued=flushes_queued))

    if FLUSHES[state, has_requests, flushes_queued]:
        guard.check_flush(int(has_requests))
    else:
        with pytest.raises(EngineBusy, match=r"pause|resume"):
            guard.check_flush(int(has_requests))


@pytest.mark.parametrize(("state", "n_live"), list(product(STATES, (0, 3))))
def test_memory_is_released_only_behind_the_last_request(state: GateState, n_live: int) -> None:
    guard = guard_in(state)

    if n_live and state != "settled":
        with pytest.raises(EngineBusy, match="3 requests"):
            guard.check_release([KV_CACHE], n_live)
    else:
        assert guard.check_release([KV_CACHE], n_live) == [KV_CACHE]


def test_what_is_released_is_not_released_again() -> None:
    guard = guard_in("settled")
    guard.released = {KV_CACHE}

    assert guard.check_release([WEIGHTS, KV_CACHE], 0) == [WEIGHTS]


def test_only_what_was_released_is_taken_back() -> None:
    guard = guard_in("settled")
    guard.released = {KV_CACHE, WEIGHTS}

    assert guard.check_take_back(TAGS) == [WEIGHTS, KV_CACHE]
    assert guard.check_take_back([CUDA_GRAPH]) == []


def test_an_unknown_tag_is_refused_by_name() -> None:
    guard = guard_in("settled")
    with pytest.raises(ValueError, match=r"'all'.*weights"):
        guard.check_take_back(["all"])
    with pytest.raises(ValueError, match=r"'all'.*weights"):
        guard.check_release(["all"], 0)


def test_weights_without_a_copy_come_back_torn_and_an_update_mends_them() -> None:
    guard = guard_in("settled")
    guard.released = {WEIGHTS}

    guard.took_back(WEIGHTS)

    assert guard.is_torn
    assert guard.must_stay_shut
    guard.begin_update("retract", 0)
    guard.end_update(is_torn=False)
    assert not guard.must_stay_shut


def test_weights_with_a_copy_come_back_whole() -> None:
    guard = guard_in("settled", Abilities(keeps_weights=True))
    guard.released = {WEIGHTS}

    guard.took_back(WEIGHTS)

    assert not guard.must_stay_shut


def test_a_cache_that_comes_back_tears_nothing() -> None:
    guard = guard_in("settled")
    guard.released = {KV_CACHE}

    guard.took_back(KV_CACHE)

    assert not guard.is_torn


@pytest.mark.parametrize("tag", TAGS)
def test_a_gate_stays_shut_while_anything_is_released(tag: str) -> None:
    guard = guard_in("settled")
    guard.reasons.add(PAUSED)
    guard.released = {tag}

    guard.reasons.discard(PAUSED)

    assert guard.must_stay_shut


@pytest.mark.parametrize("state", STATES)
def test_during_an_update_there_is_no_other_update_and_no_flush_release_or_save(
    state: GateState,
) -> None:
    guard = guard_in(state)
    guard.begin_update("retract", 0)

    for forbidden in (
        lambda: guard.begin_update("retract", 0),
        guard.check_whole,
        lambda: guard.check_flush(0),
        lambda: guard.check_release([KV_CACHE], 0),
    ):
        with pytest.raises(EngineBusy, match="update"):
            forbidden()


@pytest.mark.parametrize("event", EVENTS)
def test_a_pause_or_resume_may_come_during_an_update(event: GateEvent) -> None:
    state = next(state for state in STATES if event in GATE_LIFE[state])
    guard = guard_in(state)
    guard.begin_update("retract", 0)

    guard.moved(event)

    assert guard.state == GATE_LIFE[state][event]


def test_weights_that_sleep_are_neither_updated_nor_saved() -> None:
    guard = guard_in("settled")
    guard.released = {WEIGHTS}

    with pytest.raises(EngineBusy, match="wake them up"):
        guard.begin_update("retract", 0)
    with pytest.raises(EngineBusy, match="wake them up"):
        guard.check_whole()


def test_weights_can_be_updated_while_the_cache_sleeps() -> None:
    guard = guard_in("settled")
    guard.released = {KV_CACHE, CUDA_GRAPH}

    guard.begin_update("retract", 0)


def test_torn_weights_are_not_saved() -> None:
    guard = guard_in("settled")
    guard.is_torn = True

    with pytest.raises(EngineBusy, match="no version"):
        guard.check_whole()


def test_an_update_that_fails_before_it_touches_anything_leaves_torn_weights_torn() -> None:
    guard = guard_in("settled")
    guard.is_torn = True

    guard.begin_update("retract", 0)
    guard.end_update(is_torn=guard.is_torn)

    assert guard.must_stay_shut


def test_weights_of_a_shared_cache_are_neither_updated_nor_released() -> None:
    guard = guard_in("settled", Abilities(shares_weights=True))

    with pytest.raises(EngineFailed, match="weight_cache_mode"):
        guard.begin_update("retract", 0)
    with pytest.raises(EngineFailed, match="weight_cache_mode"):
        guard.check_release([WEIGHTS], 0)
    assert guard.check_release([KV_CACHE], 0) == [KV_CACHE]


@pytest.mark.parametrize(
    ("can", "why"),
    [
        (Abilities(shares_weights=True), "weight_cache_mode"),
        (Abilities(mixes_versions=True), "hicache_storage_backend"),
    ],
)
def test_weights_that_can_never_change_are_refused_before_they_are_staged(
    can: Abilities, why: str
) -> None:
    guard = StateGuard(can)
    for ask in (guard.check_takes_updates, lambda: guard.begin_update("retract", 0)):
        with pytest.raises(EngineFailed, match=why) as caught:
            ask()
        assert caught.value.code == "unsupported"
    assert not guard.is_updating


def test_pipeline_stages_can_be_emptied_but_not_held() -> None:
    guard = guard_in("running", Abilities(has_stages=True))

    with pytest.raises(EngineFailed, match="abort") as refusal:
        guard.check_stop("hold")
    assert refusal.value.problem.field == "mode"
    guard.check_stop("retract")
    guard.begin_update("keep", 3)


def test_replicas_that_wait_for_their_requests_are_not_held_apart() -> None:
    guard = guard_in("running", Abilities(has_replicas=True))
    guard.begin_update("finish_old", 3)

    with pytest.raises(EngineBusy, match="pause after its end"):
        guard.check_stop("hold")
    guard.check_stop("retract")
    guard.end_update(is_torn=False)
    guard.check_stop("hold")


@pytest.mark.parametrize(
    ("in_flight", "n_live", "has_replicas", "is_refused"),
    [
        ("finish_old", 3, True, True),
        ("finish_old", 0, True, False),
        ("finish_old", 3, False, False),
        ("retract", 3, True, False),
    ],
)
def test_held_requests_of_several_replicas_are_not_waited_for(
    in_flight: InFlight, n_live: int, *, has_replicas: bool, is_refused: bool
) -> None:
    guard = guard_in("held", Abilities(has_replicas=has_replicas))
    refused = pytest.raises(EngineBusy, match="send resume") if is_refused else nullcontext()
    with refused:
        guard.begin_update(in_flight, n_live)
    assert guard.is_updating != is_refused
