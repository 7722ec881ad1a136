"""A peer can name files below the operator's roots, and nothing else on the machine."""

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutbus.bus.paths import (
    MAX_DEPTH,
    MAX_PATH_BYTES,
    WEIGHTS,
    FileRules,
    below,
    check_path,
    open_named,
)
from rolloutbus.bus.wire.errors import Refused

SECRET = b"secret"
N_RACES = 3000


@pytest.fixture
def rules(tmp_path: Path) -> Iterator[FileRules]:
    root = tmp_path / "root"
    (root / "run/step").mkdir(parents=True)
    (root / "run/step/a.safetensors").write_bytes(b"weights")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.safetensors").write_bytes(SECRET)
    yield FileRules((root,))
    assert (outside / "a.safetensors").read_bytes() == SECRET


def content(name: str, rules: FileRules) -> bytes:
    fd = open_named(name, rules)
    with os.fdopen(fd, "rb") as file:
        return file.read()


def opened_files() -> Iterator[str]:
    """What the descriptors of this process are of; those of other threads come and go."""
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - readlink wants names
        with suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - may be no path


def test_a_file_below_a_root_is_opened(rules: FileRules) -> None:
    assert content("run/step/a.safetensors", rules) == b"weights"


def test_roots_are_searched_in_order(rules: FileRules, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    (second / "b.safetensors").write_bytes(b"second")
    both = FileRules((*rules.roots, second))
    assert content("b.safetensors", both) == b"second"
    assert content("run/step/a.safetensors", both) == b"weights"


def test_an_absolute_name_must_lie_below_the_root(tmp_path: Path) -> None:
    assert below("run/step", tmp_path) == "run/step"
    assert below(f"{tmp_path}/run/step", tmp_path) == "run/step"
    for name in ("/etc", f"{tmp_path}-other/run"):
        with pytest.raises(Refused, match="root") as refusal:
            below(name, tmp_path, field="lora_path")
        assert refusal.value.field == "lora_path"
    outwards = below(f"{tmp_path}/../x", tmp_path)
    assert check_path(outwards, frozenset({""})) is not None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../outside/a.safetensors",
        "run/../../outside/a.safetensors",
        "run//step/a.safetensors",
        "./run/step/a.safetensors",
        "run/step/a.safetensors/",
        "https://host/a.safetensors",
        "file:a.safetensors",
        "run\\step\\a.safetensors",
        "a\0.safetensors",
        "a\n.safetensors",
        "run/step/a.bin",
        "run/step/a",
        ".safetensors",
        "\ud800.safetensors",
        "x" * MAX_PATH_BYTES + ".safetensors",
        "x" * 300 + ".safetensors",
        "a/" * MAX_DEPTH + "a.safetensors",
        "run/step/missing.safetensors",
        "run/step",
    ],
)
def test_whatever_is_no_plain_name_is_refused(rules: FileRules, name: str) -> None:
    with pytest.raises(Refused) as caught:
        open_named(name, rules)
    assert (caught.value.code, caught.value.field) == ("bad_request", "path")
    assert len(str(caught.value)) < 500


def test_links_are_not_followed(rules: FileRules) -> None:
    root = rules.roots[0]
    (root / "link.safetensors").symlink_to(root.parent / "outside/a.safetensors")
    (root / "linked").symlink_to(root.parent / "outside")
    for name in ("link.safetensors", "linked/a.safetensors"):
        with pytest.raises(Refused, match="cannot be opened"):
            open_named(name, rules)


@pytest.mark.parametrize("linked", ["a", "a/b", "a/b/c", "a/b/c/d.safetensors"])
@pytest.mark.parametrize("is_inside", [True, False])
def test_a_link_in_place_of_any_component_is_refused(
    rules: FileRules, linked: str, *, is_inside: bool
) -> None:
    """Also one that leads back below the root: what it leads to may change."""
    whole = Path("a/b/c/d.safetensors")
    root = rules.roots[0]
    beyond = root / "real" if is_inside else root.parent / "outside/real"
    for base in (root, beyond):
        (base / whole).parent.mkdir(parents=True)
        (base / whole).write_bytes(SECRET)
    assert content(str(whole), rules) == SECRET
    (root / linked).rename(root / "aside.safetensors")
    (root / linked).symlink_to(beyond / linked)
    assert (root / whole).read_bytes() == SECRET
    with pytest.raises(Refused, match="cannot be opened"):
        open_named(str(whole), rules)


def test_only_regular_files_are_opened(rules: FileRules) -> None:
    root = rules.roots[0]
    os.mkfifo(root / "pipe.safetensors")
    (root / "folder.safetensors").mkdir()
    for name in ("pipe.safetensors", "folder.safetensors"):
        with pytest.raises(Refused, match="not a regular file"):
            open_named(name, rules)


def test_a_file_that_is_too_large_is_refused(rules: FileRules) -> None:
    small = FileRules(rules.roots, max_bytes=6)
    with pytest.raises(Refused, match="has 7 bytes; at most 6"):
        open_named("run/step/a.safetensors", small)


def test_refusals_leave_no_descriptor_open(rules: FileRules) -> None:
    for name in ("run/step/missing.safetensors", "run/step/a.bin", "run", "x/y.safetensors"):
        with pytest.raises(Refused):
            open_named(name, FileRules(rules.roots, max_bytes=1))
    below_root = str(rules.roots[0])
    assert [each for each in opened_files() if each.startswith(below_root)] == []


def test_a_folder_swapped_for_a_link_never_leads_outside(rules: FileRules) -> None:
    """Both ways happen: the swap lies between two looks at the path in most of the rounds."""
    root = rules.roots[0]
    run, spare, link = root / "run", root / "spare", root / "link"
    link.symlink_to(root.parent / "outside", target_is_directory=True)
    (root.parent / "outside/step").mkdir()
    (root.parent / "outside/step/a.safetensors").write_bytes(SECRET)
    is_over = threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            for source, target in ((run, spare), (link, run), (run, link), (spare, run)):
                source.rename(target)

    swapper = threading.Thread(target=swap)
    swapper.start()
    found: set[bytes] = set()
    n_refused = 0
    try:
        for _ in range(N_RACES):
            try:
                found.add(content("run/step/a.safetensors", rules))
            except Refused:
                n_refused += 1
    finally:
        is_over.set()
        swapper.join()
    assert SECRET not in found


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["..", ".", "", "a", "linked", "etc", "~", "%2e%2e", "a.safetensors", "\0"])
        | st.text(max_size=8),
        min_size=1,
        max_size=6,
    ).map("/".join)
)
def test_a_name_that_passes_stays_below_its_root(name: str) -> None:
    if check_path(name, WEIGHTS) is None:
        whole = os.path.normpath(f"/root/{name}")
        assert whole == f"/root/{name}"
        assert whole.endswith(".safetensors")
    with suppress(Refused):
        os.close(open_named(name, FileRules((Path("/nowhere"),))))
