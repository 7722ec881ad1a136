"""Workers whose weights are not what they say are told from the others."""

from rolloutbus.bus.wire.errors import PeerLost
from rolloutbus.bus.wire.messages.weights import CheckedWeights, TensorCheck
from rolloutbus.trainer_adapter.client.weight_queries import WeightsReport, WorkerWeights, compare


def holds(version: int, **digests: int) -> tuple[str, CheckedWeights]:
    tensors = [TensorCheck(name, digest, 0, is_zero=False) for name, digest in digests.items()]
    return "default", CheckedWeights(version, tensors)


def wrong(found: dict[str, WorkerWeights]) -> dict[str, list[str]]:
    return {name: each.different for name, each in found.items() if each.different}


def test_the_store_tells_who_is_wrong_even_if_all_agree() -> None:
    manifests = {("default", 3): {"a": 1, "b": 2}}
    found = compare({"w0": holds(3, a=1, b=9), "w1": holds(3, a=1, b=9)}, manifests, [])
    assert wrong(found) == {"w0": ["b"], "w1": ["b"]}
    assert all(each.is_in_store for each in found.values())


def test_without_the_store_the_majority_is_right() -> None:
    checked = {"w0": holds(3, a=1), "w1": holds(3, a=7), "w2": holds(3, a=1)}
    found = compare(checked, {}, [])
    assert wrong(found) == {"w1": ["a"]}
    assert not found["w0"].is_in_store


def test_where_there_is_no_majority_nobody_is_right() -> None:
    assert wrong(compare({"w0": holds(3, a=1), "w1": holds(3, a=2)}, {}, [])) == {
        "w0": ["a"],
        "w1": ["a"],
    }


def test_workers_of_different_versions_are_not_compared() -> None:
    assert wrong(compare({"w0": holds(3, a=1), "w1": holds(4, a=2)}, {}, [])) == {}


def test_missing_tensors_are_named_but_only_of_those_asked_for() -> None:
    manifests = {("default", 3): {"a": 1, "b": 2}}
    assert compare({"w0": holds(3, a=1)}, manifests, [])["w0"].missing == ["b"]
    assert compare({"w0": holds(3, a=1)}, manifests, ["a"])["w0"].is_ok


def test_numbers_that_are_not_finite_are_never_right() -> None:
    body = CheckedWeights(3, [TensorCheck("a", 1, 2, is_zero=False)])
    found = compare({"w0": ("default", body)}, {("default", 3): {"a": 1}}, [])
    assert found["w0"].not_finite == {"a": 2}
    assert not WeightsReport(found).is_ok


def test_who_did_not_answer_is_not_right() -> None:
    fine = compare({"w0": holds(3, a=1)}, {}, [])
    assert WeightsReport(fine).is_ok
    assert not WeightsReport(fine, silent=["w1"]).is_ok
    assert not WeightsReport(fine, {"w1": PeerLost("gone")}).is_ok
