"""The files of deploy/ pass their own tools, and name commands and options that exist."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutbus.bus.security.key_files import read_allow_list
from rolloutbus.bus.transport.ports import LAST_WORDS_MS
from rolloutbus.engine_worker.worker.core import FAREWELL_S
from rolloutbus.engine_worker.worker.host_process import STOP_S
from rolloutbus.gateway.server import ABORT_S
from tests.architecture.source_tree import ROOT
from tests.deploy.deploy_files import (
    DEPLOY,
    MAKE_KEYS,
    OURS,
    SLURM,
    UNITS,
    Words,
    ours_in,
    output_of,
    parse,
    pods_of,
    probes_of,
    tool,
    unit_command,
    units_of,
)

PAGE = ROOT / "docs" / "deploy.md"
LEAVING_S = {
    "worker": FAREWELL_S + LAST_WORDS_MS / 1000 + STOP_S,
    "gateway": ABORT_S,
}
"""What a member takes to leave once what runs has had its time."""
SHELL_VARIABLES = {"DRAIN_S": "120", "TP": "1", "ENGINE": "sglang", "2": "client"}


def commands_on_the_page() -> Iterator[Words]:
    for line in PAGE.read_text().splitlines():
        if line.startswith(f"$ {OURS} "):
            yield shlex.split(line.removeprefix(f"$ {OURS} "), comments=True)


def test_scripts_pass_shellcheck() -> None:
    ours = [path for path in (ROOT / ".ci").iterdir() if path.suffix == ""]
    output_of(tool("shellcheck"), MAKE_KEYS, SLURM, *ours)


@pytest.mark.parametrize("script", [MAKE_KEYS, SLURM], ids=lambda path: path.name)
def test_commands_of_scripts_exist(script: Path) -> None:
    commands = list(ours_in(script.read_text(), SHELL_VARIABLES))
    assert len(commands) >= 3
    for words in commands:
        parse(words)


def test_an_option_that_does_not_exist_is_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(["router", "--fronted", "tcp://127.0.0.1:7777"])
    with pytest.raises(AssertionError, match="--drian"):
        parse(["worker", "--name", "worker-0", "--drian", "3"])


def test_commands_of_the_page_exist() -> None:
    commands = list(commands_on_the_page())
    assert commands
    for words in commands:
        parse(words)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_commands_of_units_exist(unit: Path) -> None:
    parse(unit_command(unit))


def test_units_are_what_systemd_understands(tmp_path: Path) -> None:
    for unit in UNITS:
        # It wants the program to be there.
        text = unit.read_text().replace("/opt/rolloutbus/bin/rolloutbus", "/bin/true")
        (tmp_path / unit.name).write_text(text)
    assert output_of(tool("systemd-analyze"), "verify", "--man=no", *tmp_path.iterdir()) == ""


@pytest.mark.parametrize("member", sorted(LEAVING_S))
def test_systemd_waits_for_as_long_as_a_member_may_take(member: str) -> None:
    [unit] = [each for each in UNITS if each.stem.removesuffix("@") == f"rolloutbus-{member}"]
    drain_s = parse(unit_command(unit))["drain"]
    assert float(units_of(unit)["TimeoutStopSec"][0]) > drain_s + LEAVING_S[member]


@pytest.mark.parametrize("member", sorted(LEAVING_S))
def test_kubernetes_waits_for_as_long_as_a_member_may_take(
    member: str, manifests: list[dict[str, Any]]
) -> None:
    pod = pods_of(manifests)[member]
    [container] = pod["containers"]
    paused_s = float(
        container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", 0])[1]
    )
    needed_s = paused_s + parse(container["args"])["drain"] + LEAVING_S[member]
    assert pod["terminationGracePeriodSeconds"] > needed_s


def test_commands_of_pods_exist(manifests: list[dict[str, Any]]) -> None:
    pods = pods_of(manifests)
    assert sorted(pods) == ["gateway", "router", "store", "worker"]
    for pod in pods.values():
        [container] = pod["containers"]
        parse(container["args"])
        for command in probes_of(container).values():
            text = command[-1] if command[0] == "sh" else shlex.join(command)
            [words] = ours_in(text, {"POD_NAME": "worker-0"})
            assert parse(words)["member"] in ("", "store", "worker-0")


def test_pods_have_no_rights_that_they_do_not_need(manifests: list[dict[str, Any]]) -> None:
    for name, pod in pods_of(manifests).items():
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        for container in [*pod["initContainers"], *pod["containers"]]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"], name
            assert not rights["allowPrivilegeEscalation"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"].get("requests"), name
            _, colon, tag = container["image"].rpartition(":")
            assert colon, container["image"]
            assert tag not in ("", "latest")
        [secrets] = [each for each in pod["volumes"] if each["name"] == "secrets"]
        held = {each["secret"]["name"] for each in secrets["projected"]["sources"]}
        assert held <= {f"{name}-key", f"{name}-keys", "probe-key"}


def test_manifests_are_what_kubernetes_knows(
    manifests: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "manifests.yaml"
    path.write_text(yaml.safe_dump_all(manifests))
    output_of(tool("kubernetes-validate"), "--strict", "--quiet", path)


def test_the_dockerfile_passes_hadolint() -> None:
    output_of(tool("hadolint"), DEPLOY / "Dockerfile")


@pytest.mark.integration
def test_keys_are_made_once_and_let_in_whom_the_files_name(keys: Path, tmp_path: Path) -> None:
    made = tmp_path / "keys"
    output_of("bash", MAKE_KEYS, made)
    first = {path.name: path.read_bytes() for path in made.iterdir()}
    output_of("bash", MAKE_KEYS, made)
    assert {path.name: path.read_bytes() for path in made.iterdir()} == first
    assert {*first, "http-keys.json"} == {path.name for path in keys.iterdir()}
    lists = [read_allow_list(each / "allow.json") for each in (made, keys)]
    ours, theirs = ({(each.name, each.role) for each in allowed} for allowed in lists)
    assert ours == theirs
    assert made.stat().st_mode & 0o777 == 0o700
