"""Writes docs/reference/engine_options.md from the settings of fleets and engines: `make docs`."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from rolloutbus.engine_worker.engines.fake.settings import FakeSettings
from rolloutbus.engine_worker.engines.sglang.settings import SglangSettings
from rolloutbus.engine_worker.engines.transformers.settings import TransformersSettings
from rolloutbus.launcher.settings import FleetSettings

PAGE = Path(__file__).with_name("reference") / "engine_options.md"
HEAD = """# Engine options and their defaults

<!-- Made by `make docs` from the settings in the code: edit those. -->

```console
$ rolloutbus up -n 1 --model ./model --engine-option slots=64 --engine-option kv_tokens=40000
```

```python
options = {"slots": 64, "kv_tokens": 40_000, "threads": 1}
async with rolloutbus.up(model="./model", workers=1, engine_options=options) as fleet:
    print(fleet.address)
```

A name that an engine does not have, or a value that does not fit, is refused before anything
starts. [Choose GPUs and slots](../howto/sizing.md) says which of these matter.
"""
SECTIONS: tuple[tuple[str, str, type[msgspec.Struct]], ...] = (
    (
        "transformers",
        "The default. Hugging Face models, on CPU or one GPU, batched here.",
        TransformersSettings,
    ),
    (
        "sglang",
        (
            "For production. `--sglang.NAME VALUE` is any argument of SGLang's server; in Python "
            '`engine_options={"arguments": {"NAME": VALUE}}`.'
        ),
        SglangSettings,
    ),
    ("fake", "For tests: tokens are a function of prompt, seed and version.", FakeSettings),
)


def page() -> str:
    """The page as it is to be."""
    parts = [HEAD]
    for name, sentence, struct in SECTIONS:
        parts.append(f"\n## Engine `{name}`\n\n{sentence}\n\n{_table(struct, without=('model',))}")
    parts.append(
        "\n## Options of a fleet\n\nArguments of `rolloutbus.up`; `rolloutbus up` has the same as "
        f"[options](../cli.md#up).\n\n{_table(FleetSettings)}"
    )
    return "".join(parts)


def _table(struct: type[msgspec.Struct], without: tuple[str, ...] = ()) -> str:
    told = dict(_docstrings(struct))
    annotations = dict(_annotations(struct))
    rows = ["| option | type | default | |\n|---|---|---|---|\n"]
    for field in msgspec.structs.fields(struct):
        if field.name in without:
            continue
        kind = " or ".join(f"`{each}`" for each in annotations[field.name].split(" | "))
        rows.append(
            f"| `{field.name}` | {kind} | {_default(field)} | {told.get(field.name, '')} |\n"
        )
    return "".join(rows)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        made: Any = field.default_factory()
        return f"`{made!r}`" if not isinstance(made, msgspec.Struct) else "its defaults"
    return f"`{field.default!r}`" if field.default != "" else "empty"


def _annotations(struct: type[msgspec.Struct]) -> Iterator[tuple[str, str]]:
    """(field, its type as the source has it, without limits)."""
    for statement in _body(struct):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            kind = statement.annotation
            if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Annotated":
                kind = kind.slice.elts[0] if isinstance(kind.slice, ast.Tuple) else kind.slice
            name = {"Count": "int", "Seconds": "float"}.get(ast.unparse(kind), ast.unparse(kind))
            yield statement.target.id, name


def _docstrings(struct: type[msgspec.Struct]) -> Iterator[tuple[str, str]]:
    """(field, the text below it) of each field that has one."""
    body = _body(struct)
    for field, below in pairwise(body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as text)),
            ):
                yield name, " ".join(text.split()).replace("|", "\\|")
            case _:
                pass


def _body(struct: type[msgspec.Struct]) -> list[ast.stmt]:
    [found] = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(found, ast.ClassDef)
    return found.body


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
