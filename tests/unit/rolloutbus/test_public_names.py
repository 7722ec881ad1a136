"""What users may import, pinned: a name that appears or goes is a decision."""

import rolloutbus
import rolloutbus.errors

NAMES = [
    "Delta",
    "DetachedRequest",
    "Fleet",
    "FleetResult",
    "FleetStatus",
    "Grammar",
    "Media",
    "MemoryTag",
    "OfflineRollout",
    "OfflineRollouts",
    "OpenAIClient",
    "Processor",
    "Published",
    "PublishedLora",
    "Recorder",
    "Rollout",
    "RolloutClient",
    "SamplingParams",
    "Session",
    "ShardedSource",
    "Subscriber",
    "SyncOpenAIClient",
    "SyncRolloutClient",
    "SyncWeightPublisher",
    "TextClient",
    "Want",
    "WeightPublisher",
    "WeightTransferHandle",
    "WorkerStatus",
    "__version__",
    "connect",
    "connect_sync",
    "errors",
    "events",
    "record",
    "subscribe",
    "up",
]


def test_public_names_are_these_and_sorted() -> None:
    assert rolloutbus.__all__ == NAMES
    assert sorted(NAMES) == NAMES


def test_all_public_names_but_those_that_need_torch_are_there_at_once() -> None:
    assert set(NAMES) - set(vars(rolloutbus)) <= {
        "PublishedLora",
        "ShardedSource",
        "SyncWeightPublisher",
        "WeightPublisher",
    }


def test_every_error_descends_from_the_root() -> None:
    errors = [getattr(rolloutbus.errors, name) for name in rolloutbus.errors.__all__]
    assert all(issubclass(error, rolloutbus.errors.BusError) for error in errors)
    assert sorted(rolloutbus.errors.__all__) == rolloutbus.errors.__all__
