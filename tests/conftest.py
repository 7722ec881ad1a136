"""Fixtures that every test may use: a seed that is printed, and randomness drawn from it."""

import gc
import random
import resource
import secrets
import zlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any, cast

import pytest

if find_spec("hypothesis") is not None:  # SGLang's environment does without
    from hypothesis import HealthCheck, settings

    # An example takes as long as the machine lets it: only what it shows is judged.
    patience: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("patient", **patience)
    settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="run with the seed of an earlier run")
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run every case of the tests that are marked `sampled`, and long loops in full",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Thousands of tests and what they import stay until the end. To look through all of it again
    # and again took a sixth of the unit tests' time: it is frozen once it is there.
    gc.set_threshold(20_000, 20, 20)
    # Under xdist the workers use the seed that the controller chose and printed.
    from_controller: dict[str, Any] = getattr(config, "workerinput", {})
    if "seed" in from_controller:
        config.option.seed = from_controller["seed"]
    elif config.option.seed is None:
        config.option.seed = secrets.randbelow(2**32)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what is frozen at exit is told of as a leak by some libraries


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:  # noqa: ANN401 - xdist's class is not public
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> list[str]:
    cases = "all cases" if config.option.exhaustive else "a sample of cases, drawn from the seed"
    return [
        f"seed: {config.option.seed} (--seed {config.option.seed} repeats this run)",
        f"tests marked `sampled` run {cases}",
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of `sampled` tests that the seed did not draw."""
    if config.option.exhaustive:
        return
    cases: dict[tuple[str, int], list[str]] = {}
    for item in items:
        if marker := item.get_closest_marker("sampled"):
            test = item.nodeid.partition("[")[0]
            cases.setdefault((test, marker.args[0]), []).append(item.nodeid)
    left_out: set[str] = set()
    for (test, n), known in cases.items():
        drawn = random.Random(f"{config.option.seed}/{test}").sample(known, min(n, len(known)))
        left_out.update(set(known).difference(drawn))
    if left_out:
        config.hook.pytest_deselected(items=[each for each in items if each.nodeid in left_out])
        items[:] = [each for each in items if each.nodeid not in left_out]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Groups that xdist forgets would cost an engine for each process, and a crowded machine."""
    gc.freeze()
    if not getattr(session.config.option, "loadgroup", False):
        return
    for item in session.items:
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise RuntimeError(
                f"pytest {pytest.__version__} and pytest-xdist do not keep the tests of a group in "
                "one process: install the pytest that pyproject.toml asks for"
            )


@pytest.fixture
def is_exhaustive(request: pytest.FixtureRequest) -> bool:
    """Whether tests with a long loop run it in full (`make nightly`)."""
    return bool(request.config.option.exhaustive)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test's own, the same in each run with the same `--seed`; shown on failure."""
    run_seed: int = request.config.option.seed
    item: pytest.Item = cast("Any", request).node  # it has no type
    # Not its id, to which xdist appends the group.
    test_seed = zlib.crc32(f"{run_seed}/{item.path.stem}/{item.name}".encode())
    print(f"seed={test_seed} (run again with --seed {run_seed})")
    return test_seed


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Randomness that can be repeated."""
    return random.Random(seed)


@pytest.fixture
def full_disk() -> Callable[..., AbstractContextManager[None]]:
    """A context in which no file of this process may grow beyond so many bytes: a full disk."""

    @contextmanager
    def fill(size_bytes: int = 1) -> Generator[None]:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return fill
