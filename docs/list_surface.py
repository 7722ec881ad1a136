"""Writes the table of names that users know into docs/engine.md: `make docs`.

The names are in engine_surface.toml. Tests with a real engine say by a mark, `shows("NAME")`, which
of them they show. Their sources are only read; no test runs.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, cast

import msgspec

from rolloutbus.engine_worker.engines.sglang.upstream.hooks import TESTED

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_name("engine.md")
SOURCE = Path(__file__).with_name("engine_surface.toml")
BEGIN = (
    "<!-- Made by `make docs` from engine_surface.toml and the marks of tests: edit those. -->\n"
)
END = "<!-- The end of what is made. -->\n"
MARK = "shows"
Engine = Literal["sglang", "gpu", "transformers"]
FOLDERS: Mapping[str, Engine] = {
    "tests/sglang": "sglang",
    "tests/gpu": "gpu",
    "tests/unit/engine_worker/transformers_engine": "transformers",
    "tests/integration": "transformers",
    "tests/adapters": "transformers",
}
"""Where tests have a real engine, and which one."""


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name that users of other engines know."""

    call: str
    """What does it here, as Markdown; empty only if `not_shown` says why nothing does."""
    difference: str = ""
    """What is not as it is elsewhere, or why there is no such thing here."""
    not_shown: str = ""
    """Why no test shows it on a real engine; empty: one does."""


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names of one subject."""

    title: str
    items: dict[str, Item]


class GpuRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last run of tests/gpu; what is marked there was shown by it."""

    commit: str
    date: str
    gpus: str
    sglang: str


class Surface(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of engine_surface.toml."""

    gpu_run: GpuRun
    group: list[Group]

    @property
    def items(self) -> dict[str, Item]:
        """All names."""
        return {name: item for group in self.group for name, item in group.items.items()}


class Shown(NamedTuple):
    """A test that shows an item on a real engine."""

    item: str
    engine: Engine
    file: Path
    """Relative to the repository."""
    test: str
    sglang: str
    """The only version of SGLang on which it runs; empty: on all that are tested."""

    @property
    def place(self) -> str:
        """Its file, as the table names it."""
        note = self.sglang
        if self.engine == "gpu" and not self.file.stem.startswith("test_sglang"):
            note = "transformers"
        return f"`{self.file.stem}`" + (f" ({note})" if note else "")


def surface() -> Surface:
    """What engine_surface.toml says.

    Raises:
        msgspec.ValidationError: a key is missing or unknown.
    """
    return msgspec.convert(tomllib.loads(SOURCE.read_text(encoding="utf-8")), Surface)


@cache
def shown() -> Sequence[Shown]:
    """What the marks of tests say, in the order of files.

    Raises:
        ValueError: a mark stands where no real engine is, or is not written as this reads it.
    """
    found: list[Shown] = []
    for folder, engine in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("test_*.py")):
            found += _shown_in(file.relative_to(ROOT), engine)
    return found


def _shown_in(file: Path, engine: Engine) -> Iterator[Shown]:
    text = (ROOT / file).read_text(encoding="utf-8")
    if f"mark.{MARK}" not in text:
        return
    n_read = 0
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for each in node.decorator_list:
            if isinstance(each, ast.Call) and ast.unparse(each.func) == f"pytest.mark.{MARK}":
                n_read += 1
                names, only = _arguments_of(each, file)
                yield from (Shown(name, engine, file, node.name, only) for name in names)
    if n_read != text.count(f"mark.{MARK}"):
        raise ValueError(f'{file}: write each mark as @pytest.mark.{MARK}("name") on a function')


def _arguments_of(call: ast.Call, file: Path) -> tuple[list[str], str]:
    """The items, and the only version of SGLang."""
    values = [*call.args, *(each.value for each in call.keywords)]
    is_plain = all(isinstance(v, ast.Constant) and isinstance(v.value, str) for v in values)
    if not call.args or not is_plain or {each.arg for each in call.keywords} - {"sglang"}:
        raise ValueError(f'{file}:{call.lineno}: names of items, and sglang="VERSION" at most')
    names = [cast("str", ast.literal_eval(each)) for each in call.args]
    return names, "".join(ast.literal_eval(each.value) for each in call.keywords)


def page() -> str:
    """The page as it is to be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table(surface(), shown())}\n{END}{rest.partition(END)[2]}"


def table(known: Surface, marks: Sequence[Shown]) -> str:
    """The table and what its columns mean."""
    run = known.gpu_run
    columns: dict[Engine, str] = {
        "sglang": f"SGLang {', '.join(TESTED)} on a CPU",
        "gpu": f"SGLang {run.sglang} on a GPU",
        "transformers": f"transformers {_tested_transformers()} on a CPU",
    }
    places: dict[tuple[str, Engine], dict[str, None]] = {}
    for each in marks:
        places.setdefault((each.item, each.engine), {})[each.place] = None
    n_shown = len({each.item for each in marks} & known.items.keys())
    lines = [
        f"{len(known.items)} names, {n_shown} of them shown on a real engine. The middle columns",
        "name the files of the tests that do; those on a GPU passed at commit",
        f"{run.commit} ({run.date}, {run.gpus}).\n",
        f"| elsewhere | here | {' | '.join(columns.values())} | what differs, and why |",
        "|---|---|---|---|---|---|",
    ]
    for group in known.group:
        lines.append(f"| **{group.title}** | | | | | |")
        for name, item in group.items.items():
            of_columns = [", ".join(places.get((name, engine), ())) for engine in columns]
            lines.append(_row(name, item, of_columns))
    return "\n".join(lines) + "\n"


def _row(name: str, item: Item, places: Sequence[str]) -> str:
    why = [item.difference, f"not shown: {item.not_shown}" if item.not_shown else ""]
    is_code = " " not in name.replace(": ", "")
    cells = [f"`{name}`" if is_code else name, item.call, *places, "; ".join(filter(None, why))]
    return f"| {' | '.join(each.replace('|', '&#124;') for each in cells)} |"


def _tested_transformers() -> str:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return "".join(re.findall(r"^transformers==(.+)$", pins, re.MULTILINE))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
