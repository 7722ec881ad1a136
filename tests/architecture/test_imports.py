"""Imports point one way, heavy packages stay in their corner, and cores import nothing impure."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

from tests.architecture.source_tree import (
    LINKED,
    PUBLIC,
    ROOT,
    Import,
    Module,
    folder_of,
    imported_modules,
    imports_of,
    source_modules,
)

MIDDLE = {"router", "engine_worker", "trainer_adapter"}

# Package -> the other packages of this repository it may import.
LAW: dict[str, set[str]] = {
    "bus": set(),
    "router": {"bus"},
    "engine_worker": {"bus"},
    "trainer_adapter": {"bus"},
    # A recorder is a client of the bus: see CLIENT_SIDE.
    "replay": {"bus", "trainer_adapter"},
    # A gateway decides nothing that another client could not; of replay see SUBSCRIBING.
    "gateway": {"bus", "replay", "trainer_adapter"},
    "launcher": {"bus", "gateway", "replay"} | MIDDLE,
    "cli": {"bus", "gateway", "launcher", "replay"} | MIDDLE,
    "rolloutbus": {"bus", "cli", "launcher", "replay"} | MIDDLE,
    "examples": {"rolloutbus"},
    "benchmarks": {"bus", "cli", "launcher", "rolloutbus", "examples", "replay"} | MIDDLE,
    "tests": {"bus", "cli", "gateway", "launcher", "rolloutbus", "examples", "benchmarks", "replay"}
    | MIDDLE,
}

# `rolloutbus demo` runs a program of examples/, when it is asked to, hence in a function.
LAZY_EXCEPTIONS = {("cli", "examples")}

# A framework whose backend starts its engines itself brings up a fleet for them.
FLEET_STARTERS = re.compile(r"trainer_adapter/frameworks/art/.*")

# What those who are clients of the bus may use of the package that clients are in.
CLIENT_SIDE = (
    r"rolloutbus\.trainer_adapter\.client"
    r"\.(client|connection|core\.results|core\.settings|text)\..*"
)
CLIENTS = {"replay"}

# What the page of a gateway uses of replay: what `rolloutbus.subscribe` gives everybody.
SUBSCRIBING = r"rolloutbus\.replay\.(subscriber|stream\.events)\..*"

# Imported package -> the files that may import it.
CORNERS = {
    "pyarrow": r"replay/trajectory_files\.py|tests/.*",
    "google_crc32c": r"replay/journal/format\.py",
    "msgpack": r"replay/inspection\.py|tests/.*",
    "zmq": r"bus/.*(_port|zmq[a-z_]*)\.py|(tests|benchmarks)/.*",
    "torch": r"(engine_worker/(engines|weights)|trainer_adapter|examples|tests|benchmarks)/.*",
    "fastapi": r"gateway/.*|tests/.*|benchmarks/command_peers/.*",
    "starlette": r"gateway/.*",
    "uvicorn": r"gateway/server\.py|benchmarks/command_peers/.*",
    "prometheus_client": r"gateway/.*|tests/.*",
    "openai": r"tests/.*",
    # A framework is imported in its own adapter alone.
    "areal": r"trainer_adapter/frameworks/areal\.py|tests/adapters/.*",
    "trl": r"trainer_adapter/frameworks/trl/.*|tests/adapters/.*|benchmarks/adapter_overhead\.py",
    "art": r"trainer_adapter/frameworks/art/.*|tests/adapters/.*",
    "skyrl": r"trainer_adapter/frameworks/skyrl/.*|tests/adapters/.*",
    "verl": r"trainer_adapter/frameworks/verl/.*|tests/adapters/.*",
    "ray": r"launcher/on_ray/.*|trainer_adapter/frameworks/verl/.*|tests/adapters/.*"
    r"|benchmarks/command_peers/.*",
    "hydra": r"tests/adapters/.*",
    "peft": r"trainer_adapter/frameworks/art/.*|tests/.*",
    "datasets": r"tests/adapters/.*|benchmarks/adapter_overhead\.py",
    "playwright": r"tests/.*",
    "opentelemetry": r"bus/actor/otlp\.py|tests/.*",
    "transformers": r"engine_worker/engines/.*|trainer_adapter/openai/answer_reader\.py"
    r"|trainer_adapter/frameworks/.*"
    r"|gateway/server\.py"
    r"|(examples|tests|benchmarks)/.*",
    "xgrammar": r"engine_worker/engines/transformers/grammars\.py",
    "regex": r"engine_worker/engines/shared/texts\.py",
    "tokenizers": r"engine_worker/engines/shared/texts\.py"
    r"|(trainer_adapter|examples|tests|benchmarks)/.*",
    "safetensors": r"engine_worker/(engines|weights)/.*|(trainer_adapter|examples|tests)/.*",
    "accelerate": r"engine_worker/engines/.*|trainer_adapter/frameworks/trl/.*",
    "sglang": r"engine_worker/engines/sglang.*|trainer_adapter/openai/sglang_reader\.py"
    r"|tests/gpu/.*",
    "matplotlib": r"replay/timeline/picture\.py|(examples|benchmarks)/.*",
    "typer": r"cli/.*|tests/.*",
    "rich": r"(cli|examples|tests)/.*",
    "zstandard": r"bus/weights/weight_delta\.py|replay/(inspection|journal/pack)\.py"
    r"|(tests|benchmarks)/.*",
    "unittest.mock": r"",
}

IMPURE = {
    "asyncio",
    "concurrent",
    "datetime",
    "logging",
    "multiprocessing",
    "os",
    "random",
    "secrets",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
    "uuid",
    "uvloop",
    "zmq",
}
CORE_FILE = re.compile(r"(.*_)?core\.py")
PURE_FILES = re.compile(r"bus/(wire/(messages/.*|ids|entry|errors)|actor/effects)(\.py)?")


def _is_from(imported: Import, package: str) -> bool:
    return imported.name == package or imported.name.startswith(f"{package}.")


def _pure_modules() -> list[Module]:
    """The cores, what they are made of, and everything of ours that those import."""
    found = {
        module.name: module
        for module in source_modules()
        if module.package != "tests"
        and (CORE_FILE.fullmatch(module.path.name) or PURE_FILES.fullmatch(str(module)))
    }
    waiting = list(found.values())
    while waiting:
        for module in imported_modules(waiting.pop()):
            if module.name not in found:
                found[module.name] = module
                waiting.append(module)
    return sorted(found.values(), key=str)


def _unlawful(module: Module) -> Iterator[str]:
    for imported in imports_of(module):
        package = folder_of(imported.name)
        if package not in LAW or package == module.package or package in LAW[module.package]:
            continue
        if (module.package, package) in LAZY_EXCEPTIONS and not imported.is_top_level:
            continue
        if package == "launcher" and FLEET_STARTERS.fullmatch(str(module)):
            continue
        yield f"{module}:{imported.line} imports {imported.name}"


def test_every_package_has_a_place_in_the_import_law() -> None:
    assert {module.package for module in source_modules()} <= set(LAW)


def test_imports_point_one_way() -> None:
    assert [each for module in source_modules() for each in _unlawful(module)] == []


def test_clients_of_the_bus_use_the_client_and_nothing_else_of_its_package() -> None:
    strays = [
        f"{module}:{imported.line} imports {imported.name}"
        for module in source_modules()
        if module.package in CLIENTS
        for imported in imports_of(module)
        if folder_of(imported.name) == "trainer_adapter"
        and not re.fullmatch(CLIENT_SIDE, imported.name)
    ]
    assert strays == []


def test_a_gateway_subscribes_and_uses_nothing_else_of_replay() -> None:
    strays = [
        f"{module}:{imported.line} imports {imported.name}"
        for module in source_modules()
        if module.package == "gateway"
        for imported in imports_of(module)
        if folder_of(imported.name) == "replay" and not re.fullmatch(SUBSCRIBING, imported.name)
    ]
    assert strays == []


def test_heavy_packages_are_imported_only_in_their_corner() -> None:
    strays = [
        f"{module}:{imported.line} imports {imported.name}"
        for module in source_modules()
        for imported in imports_of(module)
        for package, files in CORNERS.items()
        if _is_from(imported, package) and not re.fullmatch(files, str(module))
    ]
    assert strays == []


def test_cores_and_what_they_import_are_pure() -> None:
    impure = [
        f"{module}:{imported.line} imports {imported.name}"
        for module in _pure_modules()
        for imported in imports_of(module)
        if imported.name.split(".")[0] in IMPURE
    ]
    assert impure == []


def test_everything_of_ours_is_imported_by_its_one_name() -> None:
    strays = [
        f"{module}:{imported.line} imports {imported.name}"
        for module in source_modules()
        for imported in imports_of(module)
        if imported.name.split(".")[0] in LINKED
    ]
    assert strays == []


def test_types_are_checked_in_every_folder() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {module.package for module in source_modules()}
    wanted = {f"{PUBLIC}/{folder}" if folder in LINKED else folder for folder in folders}
    assert wanted <= set(project["tool"]["pyright"]["include"])


def test_the_public_package_imports_only_what_is_asked_for() -> None:
    loads_nothing = """
import sys
import rolloutbus
loaded = [name for name in sys.modules if name.startswith("rolloutbus.")]
assert loaded == [], loaded
"""
    needs_no_optional_package = """
sys.modules.update(dict.fromkeys(["torch", "transformers", "tokenizers", "matplotlib", "sglang"]))
from rolloutbus import RolloutClient, connect, subscribe
assert not [name for name in sys.modules if name.startswith("rolloutbus.router")]
from rolloutbus import record, up
"""
    result = subprocess.run(
        [sys.executable, "-c", loads_nothing + needs_no_optional_package],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_a_host_of_the_fake_engine_loads_no_heavy_package() -> None:
    """Fleets of fake engines are started by the hundred, and torch takes seconds each time."""
    script = (
        "import sys\n"
        "import rolloutbus.engine_worker.host.__main__\n"
        "from rolloutbus.engine_worker.engines.registry import build_engine\n"
        "from rolloutbus.engine_worker.host.commands import HostCommands\n"
        "engine = build_engine('fake', {}, lambda _: None)\n"
        "HostCommands(engine, 1.0)\n"
        "engine.close()\n"
        "heavy = {'torch', 'transformers', 'sglang', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
