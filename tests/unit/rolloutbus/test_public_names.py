"""What users may import, pinned: a name that appears or goes is a decision."""

import inspect

import pytest

import rolloutbus
import rolloutbus.errors

MOST_NAMES = 26
"""A user reads them all."""
NAMES = [
    "Fleet",
    "Grammar",
    "Media",
    "OfflineRollouts",
    "OpenAIClient",
    "Processor",
    "RayLauncher",
    "Rollout",
    "RolloutClient",
    "SamplingParams",
    "ShardedSource",
    "SyncOpenAIClient",
    "SyncRolloutClient",
    "SyncWeightPublisher",
    "TextClient",
    "Want",
    "WeightPublisher",
    "__version__",
    "connect",
    "connect_sync",
    "errors",
    "events",
    "record",
    "subscribe",
    "types",
    "up",
]


def test_public_names_are_these_and_sorted() -> None:
    assert rolloutbus.__all__ == NAMES
    assert sorted(NAMES) == NAMES
    assert len(NAMES) <= MOST_NAMES


def test_what_calls_return_can_be_imported_for_annotations() -> None:
    assert sorted(rolloutbus.types.__all__) == rolloutbus.types.__all__
    for name in rolloutbus.types.__all__:
        assert inspect.isclass(getattr(rolloutbus.types, name))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Sampling", "SamplingParams"),
        ("StreamSubscriber", "subscribe"),
        ("FleetResult", "rolloutbus.types"),
        ("Delta", "rolloutbus.types"),
    ],
)
def test_a_name_that_was_public_is_told_where_it_is(name: str, told: str) -> None:
    with pytest.raises(ImportError, match=told):
        getattr(rolloutbus, name)


def test_a_name_that_never_was_is_a_missing_attribute() -> None:
    assert not hasattr(rolloutbus, "Rolloutt")
    assert not hasattr(rolloutbus, "rollout")


def test_all_public_names_are_there() -> None:
    assert [name for name in NAMES if not hasattr(rolloutbus, name)] == []


def test_every_error_descends_from_the_root() -> None:
    errors = [getattr(rolloutbus.errors, name) for name in rolloutbus.errors.__all__]
    assert all(issubclass(error, rolloutbus.errors.BusError) for error in errors)
    assert sorted(rolloutbus.errors.__all__) == rolloutbus.errors.__all__
