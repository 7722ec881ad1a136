"""Checks of what the commands of "More of an engine" may ask for.

Spec: docs/protocol.md, "Limits".
"""

import re

import msgspec

from rolloutbus.bus.wire.limits import MAX_LABELS, MAX_SCORED, MAX_TEXT_CHARS
from rolloutbus.bus.wire.messages.control import (
    Embed,
    FlushCache,
    LoadLora,
    Rerank,
    SaveWeights,
    Score,
    UnloadLora,
)
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.validation import (
    ADAPTER_NAME,
    MAX_ADAPTER_CHARS,
    TOKEN_BYTES,
    check_tokens,
    check_tokens_listed,
)
from rolloutbus.bus.wire.versions import MAX_VERSION

_ADAPTER = re.compile(ADAPTER_NAME)
_DIRECTORY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")


def check_command(body: msgspec.Struct, *, vocab_size: int, max_context: int) -> Problem | None:
    """Why no engine of this vocabulary and context (tokens) could do it; None if one could."""
    match body:
        case Score():
            return _check_score(body, vocab_size, max_context)
        case Embed():
            return _check_embed(body, vocab_size, max_context)
        case Rerank():
            return _check_rerank(body)
        case LoadLora():
            return _check_load(body)
        case UnloadLora(name):
            return _check_adapter(name)
        case SaveWeights(name=name):
            if _DIRECTORY.fullmatch(name) is None:
                limit = "1 to 64 of A-Z a-z 0-9 _ - ., no dot first"
                return bad_request("name", f"{name!r} is no name of a directory; use {limit}")
            return None
        case FlushCache(tiers=[]):
            return bad_request("tiers", "no tier is named; name at least one")
        case _:
            return None


def _check_score(body: Score, vocab_size: int, max_context: int) -> Problem | None:
    labels = body.label_token_ids
    if len(labels) > MAX_LABELS:
        message = f"{len(labels)} labels; at most {MAX_LABELS} are allowed"
        return bad_request("label_token_ids", message)
    n_query = len(body.query) // TOKEN_BYTES
    return (
        check_tokens_listed("label_token_ids", labels, vocab_size)
        or _check_number("items", len(body.items))
        or check_tokens("query", body.query, vocab_size)
        or _check_texts("items", body.items, vocab_size, (n_query, max_context))
    )


def _check_embed(body: Embed, vocab_size: int, max_context: int) -> Problem | None:
    return _check_number("inputs", len(body.inputs)) or _check_texts(
        "inputs", body.inputs, vocab_size, (0, max_context)
    )


def _check_rerank(body: Rerank) -> Problem | None:
    for query, text in body.pairs:
        if not query or not text or max(len(query), len(text)) > MAX_TEXT_CHARS:
            limit = f"query and text have 1 to {MAX_TEXT_CHARS} characters each"
            return bad_request("pairs", f"{len(query)} and {len(text)} characters; {limit}")
    return _check_number("pairs", len(body.pairs))


def _check_load(body: LoadLora) -> Problem | None:
    problem = _check_adapter(body.name)
    if problem is None and body.version > MAX_VERSION:
        problem = bad_request("version", f"{body.version} is no version")
    if problem is None and not body.path and not (body.version and body.bulk):
        message = "without a path, `version` and `bulk` say what to take from the weight store"
        problem = bad_request("version" if body.bulk else "bulk", message)
    return problem


def _check_adapter(name: str) -> Problem | None:
    if _ADAPTER.fullmatch(name) is None:
        limit = f"1 to {MAX_ADAPTER_CHARS} of A-Z a-z 0-9 _ -"
        return bad_request("name", f"{name!r} is no name of an adapter; use {limit}")
    return None


def _check_number(field: str, n: int) -> Problem | None:
    if not 1 <= n <= MAX_SCORED:
        return bad_request(field, f"{n} of them; 1 to {MAX_SCORED} are allowed")
    return None


def _check_texts(
    field: str, texts: list[bytes], vocab_size: int, room: tuple[int, int]
) -> Problem | None:
    """`room` is how many tokens stand beside each text, and how many fit in all."""
    n_beside, max_context = room
    for text in texts:
        n_tokens = n_beside + len(text) // TOKEN_BYTES
        if not 1 <= n_tokens <= max_context:
            message = f"{n_tokens} tokens; the engine's context takes 1 to {max_context}"
            return bad_request(field, message)
        problem = check_tokens(field, text, vocab_size)
        if problem is not None:
            return problem
    return None
