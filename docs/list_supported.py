"""Writes docs/reference/supported.md from what the tests run with: `make docs`."""

import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolloutbus.engine_worker.engines.sglang.upstream.hooks import TESTED

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_name("reference") / "supported.md"
HEAD = """# Supported versions and models

<!-- Made by `make docs` from requirements and tests: edit those. -->

What is in these tables has tests. Other versions may work; `rolloutbus doctor --model ./model` says
what this machine, the installed engine and a model can do, and why not.

"""
MODELS = """An architecture is listed if tests build a model of it, with random weights, and compare
what the engine says with transformers itself. The transformers engine takes each causal language
model of Hugging Face whose layers have full or sliding attention, from safetensors files. SGLang
takes what SGLang takes.
"""
PIN = re.compile(r"^([\w.-]+)==([\w.]+)", re.MULTILINE)
CONFIG = re.compile(r"\b(\w+Config)\b")
TIERS = {
    "transformers": ("tests/tiny_models.py", "tests/integration", "tests/unit/engine_worker"),
    "SGLang, CPU": ("tests/sglang", "tests/gpu/tiny.py"),
    "SGLang or transformers, GPU": ("tests/gpu",),
}
"""Where the models of each tier of tests are made."""
FRAMEWORKS = {
    "areal": ("areal", "AReaL", "areal.md"),
    "art": ("openpipe-art", "OpenPipe ART", "art.md"),
    "skyrl-0.2": ("skyrl", "SkyRL", "skyrl.md"),
    "skyrl-0.3": ("skyrl", "SkyRL", "skyrl.md"),
    "trl": ("trl", "TRL", "trl.md"),
    "verl": ("verl", "verl", "verl.md"),
}
"""Folder of tests/adapters -> its package, its name, its page."""


def page() -> str:
    """The page as it is to be."""
    parts = {
        "Engines, Python and Ray": _engines(),
        "Models": f"{MODELS}\n{_models()}",
        "Trainer frameworks": _frameworks(),
        "HTTP clients, unmodified": _peers(),
    }
    return HEAD + "\n".join(f"## {title}\n\n{part}" for title, part in parts.items())


def _engines() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    pins = _pins(ROOT / "constraints.txt")
    sglang = project["optional-dependencies"]["sglang"][0].removeprefix("sglang")
    needs = "\n".join(project["optional-dependencies"]["transformers"])
    ranges = dict(re.findall(r"^(\w+)(.*)$", needs, re.MULTILINE))
    rows = ["| what | accepted | tested |\n|---|---|---|\n"]
    rows.append(f"| Python | {', '.join(pythons)} | the one that `make test` runs with |\n")
    rows += [f"| {name} | {ranges[name]} | {pins[name]} |\n" for name in ("torch", "transformers")]
    for version in TESTED:
        beside = _pins(ROOT / "tests" / "sglang" / f"requirements-{version}.txt")
        rows.append(
            f"| SGLang | {sglang}; not a tested one: a warning at the start | {version}, beside "
            f"transformers {beside['transformers']} |\n"
        )
    ray = project["optional-dependencies"]["ray"][0].removeprefix("ray")
    rows.append(f"| Ray, [for a fleet on it](../ray.md) | {ray} | {', '.join(_rays())} |\n")
    return "".join(rows)


def _rays() -> list[str]:
    """Releases of Ray that an environment of the tests has, oldest first."""
    files = (ROOT / "tests" / "adapters").glob("*/requirements.txt")
    found = {pins["ray"] for pins in map(_pins, files) if "ray" in pins}
    return sorted(found, key=lambda release: [int(part) for part in release.split(".")])


def _models() -> str:
    tiers_by_model: dict[str, list[str]] = {}
    for tier, places in TIERS.items():
        for name in sorted({each for place in places for each in _configs(ROOT / place)}):
            tiers_by_model.setdefault(name, []).append(tier)
    heads = list(TIERS)
    rows = [f"| architecture | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}\n"]
    for name, tiers in sorted(tiers_by_model.items()):
        marks = " | ".join("yes" if each in tiers else "" for each in heads)
        rows.append(f"| {name.removesuffix('Config')} | {marks} |\n")
    return "".join(rows)


def _configs(place: Path) -> Iterator[str]:
    """Configurations of transformers that the sources there name."""
    untyped: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    known: set[str] = set(untyped.CONFIG_MAPPING_NAMES.values())
    for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
        yield from known.intersection(CONFIG.findall(file.read_text(encoding="utf-8")))


def _frameworks() -> str:
    rows = ["| framework | release | page |\n|---|---|---|\n"]
    for folder, (package, name, file) in FRAMEWORKS.items():
        found = _pins(*sorted((ROOT / "tests" / "adapters" / folder).glob("requirements*.txt")))
        rows.append(f"| {name} | {found[package]} | [adapters/{file}](../adapters/{file}) |\n")
    rows.append(
        "| slime, miles | by SGLang's endpoints | [adapters/slime.md](../adapters/slime.md) |\n"
    )
    return "".join(rows)


def _peers() -> str:
    found = _pins(*sorted((ROOT / "tests" / "peers").glob("requirements*.txt")))
    rows = [f"| {name} | {found[name]} |\n" for name in ("openai", "skyrl", "smg")]
    return "| client | release |\n|---|---|\n" + "".join(rows)


def _pins(*files: Path) -> dict[str, str]:
    text = "\n".join(each.read_text(encoding="utf-8") for each in files)
    return dict(PIN.findall(text))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
