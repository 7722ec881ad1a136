"""A process that holds more than before is found, whatever the others do."""

import os

from tests.drills.chaos.usage import Growth, Usage, growths, usages_of


def test_own_process_is_measured_and_a_missing_one_left_out() -> None:
    [(name, usage)] = usages_of({"me": os.getpid(), "away": 0}).items()
    assert name == "me"
    assert usage.n_fds > 2
    assert usage.rss_mib > 1.0


def test_worst_of_each_kind_is_shown() -> None:
    small, big = Usage(10, 50.0), Usage(40, 50.0)
    before = dict.fromkeys(["w0", "w1", "w0.host", "clients-0", "router"], small)
    after = {**before, "w1": big, "w9": big}
    del after["router"]
    found = growths(before, after)
    assert found["worker"] == Growth(small, big)
    assert set(found) == {"worker", "host", "clients"}
    assert [kind for kind, each in found.items() if each.problem] == ["worker"]


def test_more_memory_is_a_problem_of_its_own() -> None:
    assert "memory" in Growth(Usage(10, 50.0), Usage(10, 90.0)).problem
    assert Growth(Usage(10, 50.0), Usage(12, 60.0)).problem == ""
