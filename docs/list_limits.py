"""Lists the limit of every field on the wire, from its type, in docs/protocol.md: `make docs`."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from bus.entry import Entry, Placement
from bus.messages import KINDS, RESULTS
from bus.messages.control import FleetOutcome

NATURAL = "0 to uint64"
PAGE = Path(__file__).with_name("protocol.md")
BEGIN = "<!-- fields by limit: made by `make docs` -->\n"
END = "<!-- end of fields by limit -->\n"

CHECKED_BY_VALUE = {
    "Placement.cost",
    "Placement.priority",
    "Sampling.max_new_tokens",
    "Sampling.min_new_tokens",
    "Sampling.top_k",
    "Sampling.seed",
    "Sampling.stop_token_ids[]",
    "Sampling.logit_bias[key]",
    "Want.top_logprobs",
    "Want.logprobs_of[]",
    "Want.prompt_logprobs_start",
    "Processor.params[]",
    "Processor.params[][]",
    "Score.label_token_ids[]",
    "Array.shape[]",
    "Repair.start",
    "Tensor.shape[]",
    "GotWeights.shape[]",
    "Hello.protocol[]",
    "Welcome.protocol",
    "WorkerStatus.beat_age_ms",
    "WorkerFacts.eos_token_ids[]",
    "EngineReady.eos_token_ids[]",
}
"""Integers of any sign that fit 64 bits: compared or checked with a message of their own."""
ATTEMPT = re.compile(r"(\.attempt\[\]|\.attempts\[\]\[\]|\.(items|running|outbox)\[\]\[\]\[\])$")
"""The same holds for the two numbers of an attempt."""


def page_with(rows: str, page: str) -> str:
    """The page with the list between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{rows}{END}{after}"


def rows() -> str:
    """The list as a table: one line per limit."""
    fields_by_limit: dict[str, list[str]] = {}
    for name, limit in limits():
        fields_by_limit.setdefault(limit, []).append(f"`{name}`")
    fields_by_limit[NATURAL] = ["all other integers"]
    lines = ["| limit | fields |", "|---|---|"]
    for limit, names in sorted(fields_by_limit.items(), key=lambda row: (row[0] == NATURAL, row)):
        lines.append(f"| {limit} | {', '.join(sorted(names))} |")
    return "\n".join([*lines, ""])


def limits() -> Iterator[tuple[str, str]]:
    """(field, limit) of every part of every field whose size or value a peer chooses.

    Raises:
        AssertionError: a field has no limit.
    """
    for struct in structs():
        for field in msgspec.structs.fields(struct):
            kind = inspect.type_info(field.type)
            yield from _limits_of(f"{struct.__name__}.{field.encode_name}", kind)


def structs() -> list[type[msgspec.Struct]]:
    """Every struct that crosses the wire, bodies and what is inside of them, by name."""
    found: dict[str, type[msgspec.Struct]] = {}
    for info in inspect.multi_type_info(
        [Entry, Placement, FleetOutcome, *KINDS.values(), *RESULTS.values()]
    ):
        _collect(info, found)
    return [found[name] for name in sorted(found)]


def _collect(info: inspect.Type, found: dict[str, type[msgspec.Struct]]) -> None:
    if isinstance(info, inspect.StructType) and info.cls.__name__ not in found:
        found[info.cls.__name__] = info.cls
        for field in info.fields:
            _collect(field.type, found)
    for child in _children(info):
        _collect(child[1], found)


def _children(info: inspect.Type) -> list[tuple[str, inspect.Type]]:
    match info:
        case inspect.UnionType(types=types):
            return [("", each) for each in types]
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return [("[]", item)]
        case inspect.TupleType(item_types=items):
            return [("[]", each) for each in items]
        case inspect.DictType(key_type=key, value_type=value):
            return [("[key]", key), ("[]", value)]
        case _:
            return []


def _limits_of(name: str, info: inspect.Type) -> Iterator[tuple[str, str]]:
    limit = _own_limit(name, info)
    if limit:
        yield name, limit
    seen: set[tuple[str, str]] = set()
    for suffix, child in _children(info):
        for each in _limits_of(name + suffix, child):
            if each not in seen:
                seen.add(each)
                yield each


def _own_limit(name: str, info: Any) -> str:  # noqa: ANN401 - each kind of type has other constraints
    match info:
        case inspect.StrType():
            assert info.max_length is not None, f"{name} has no limit"
            return f"{info.max_length} characters"
        case inspect.BytesType():
            assert info.max_length is not None, f"{name} has no limit"
            mebibytes, rest = divmod(info.max_length, 1024**2)
            return f"{info.max_length // 1024} KiB" if rest else f"{mebibytes} MiB"
        case inspect.ListType() | inspect.VarTupleType() | inspect.DictType():
            assert info.max_length is not None, f"{name} has no limit"
            return f"{info.max_length} items"
        case inspect.IntType(ge=None, le=None):
            assert name in CHECKED_BY_VALUE or ATTEMPT.search(name), f"{name} has no limit"
            return "int64 or uint64"
        case inspect.IntType(ge=low, le=high):
            return f"{'int64' if low is None else low} to {'uint64' if high is None else high}"
        case _:
            return ""


if __name__ == "__main__":
    text = PAGE.read_text()
    listed = page_with(rows(), text)
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if text == listed else "docs/protocol.md lists other limits: run `make docs`")
    PAGE.write_text(listed)
