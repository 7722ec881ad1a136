"""How a request enters a scheduler's queue: with what it has from earlier attempts."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus

from rolloutbus.engine_worker.engines.sglang.inside.row_processor import state_of
from rolloutbus.engine_worker.engines.sglang.inside.text_stops import Texts, watch
from rolloutbus.engine_worker.engines.sglang.schedulers.rules import RULES
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.types import SglangObject


def admit(request: SglangObject, texts: Texts) -> None:
    """Prepare a request of SGLang before it is queued, or is queued again after a retraction."""
    if getattr(request, "rolloutbus_is_admitted", False):
        # Its states are computed again with its cache.
        request.hidden_states.clear()
        return
    request.rolloutbus_is_admitted = True
    if request.to_finish is not None or request.finished_reason is not None:
        return
    params = request.sampling_params
    if params.ignore_eos and params.stop_token_ids:
        # SGLang ignores these, too.
        test = partial(_stops_at_its_ids, weakref.proxy(request))
        request._check_token_based_finish = test  # noqa: SLF001 - the only door
    if params.custom_params and RULES in params.custom_params:
        state = state_of(request)
        if state.rules.seen_with:
            _require_media(request, state.rules.seen_with)
        kept = list(request.origin_input_ids)[-state.n_kept :] if state.n_kept else []
        if kept and request.grammar is not None and request.to_finish is None:
            _advance(request, kept)
        if state.rules.has_text and request.to_finish is None:
            watch(request, state.rules, texts, kept)


def refuse(request: SglangObject, why: str, status: int) -> None:
    """End a request that is about to be queued; none of it is computed."""
    request.set_finish_with_abort(why[:500])
    request.to_finish = upstream.abort_reason(why[:500], status)


def _require_media(request: SglangObject, tokens: Sequence[int]) -> None:
    """SGLang leaves media without a place out, and may write the prompt anew: both in silence.

    With places that do not fit what it made of the media, some versions end.
    """
    found = request.multimodal_inputs
    items: Sequence[SglangObject] = found.mm_items if found is not None else ()
    # Each medium's places hold a number of its own, so that cached prefixes tell media apart.
    marks = {item.pad_value for item in items}
    if not marks or not marks <= set(request.origin_input_ids):
        why = (
            "the prompt has no place for its media: use the tokens that the model's processor wants"
        )
    elif not _is_kept(tokens, request.origin_input_ids_unpadded, items):
        why = "the prompt's tokens would change: write the media's places as the processor does"
    else:
        return
    refuse(request, why, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)


def _is_kept(tokens: Sequence[int], longer: Sequence[int], items: Sequence[SglangObject]) -> bool:
    """Whether `longer` is the prompt with more tokens only where media are."""
    places: set[int] = {longer[start] for item in items for start, _ in item.offsets or ()}
    if places.isdisjoint(tokens):
        rest = iter(longer)
        return all(token in rest for token in tokens)
    # Given as single tokens, each place grows, and nothing else may.
    return [t for t in tokens if t not in places] == [t for t in longer if t not in places]


def _advance(request: SglangObject, tokens: Sequence[int]) -> None:
    accept: Callable[[int], None] = request.grammar.accept_token
    try:
        for token in tokens:
            accept(token)
    except ValueError as error:
        why = f"the tokens of its prefix do not match the grammar: {error}"
        refuse(request, why, HTTPStatus.BAD_REQUEST)


def _stops_at_its_ids(request: SglangObject, new_tokens: Sequence[int]) -> bool:
    """In place of SGLang's test for requests that ignore the model's own stop ids."""
    stops: set[int] = request.sampling_params.stop_token_ids
    for i, token in enumerate(new_tokens):
        if token in stops:
            request.finished_reason = upstream.stop_reason(token)
            request.finished_len = len(request.output_ids) - len(new_tokens) + i + 1
            return True
    return False
