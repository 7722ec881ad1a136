"""Inside SGLang's sampler: penalties, minimal length and processors of single requests.

SGLang's own penalties forget what was generated when a request is resumed or retracted, and are one
token late with overlapped scheduling; those here are right, and the same as of other engines.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import torch

from rolloutbus.engine_worker.engines.sglang.inside.row_state import WITHIN, RowState, state_in
from rolloutbus.engine_worker.engines.sglang.schedulers.rules import NO_PENALTIES
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.shared.penalties import penalised
from rolloutbus.engine_worker.engines.shared.processors import apply
from rolloutbus.engine_worker.engines.shared.row_rules import NOTHING_LEFT


class RowProcessor:
    """What SGLang calls for the rows of a batch that have rules; rows may differ in them."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Sequence[Any]) -> torch.Tensor:
        """Logits to sample from, float32 [rows, vocab]; never raises, which would end SGLang."""
        states = [state_in(params) for params in custom_param_list]
        try:
            return _shaped(logits, [state for state in states if state is not None])
        except Exception as error:  # noqa: BLE001 - as above; these requests end, others do not
            for state in states:
                if state is not None:
                    _give_up(state, f"{type(error).__name__}: {error}")
            return logits


def _shaped(logits: torch.Tensor, states: Sequence[RowState]) -> torch.Tensor:
    if len(states) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(states)} requests")
    rows = logits.clone()
    _penalise(rows, states)
    whys: dict[int, str] = {}
    for i, state in enumerate(states):
        rules, n = state.rules, state.n_generated
        if n == WITHIN:
            continue
        if n < rules.min_new_tokens and rules.end_ids:
            rows[i, list(rules.end_ids)] = -torch.inf
        if rules.processors:
            done = apply(state.processors(logits.shape[-1]), rows[i], n)
            if isinstance(done, str):
                whys[i] = done
            else:
                rows[i] = done
    # Nothing can be drawn from a row without a finite maximum: SGLang would end with it.
    had = logits.amax(-1).isfinite()
    gone = had & ~rows.amax(-1).isfinite()
    lost: list[int] = gone.nonzero()[:, 0].cpu().numpy().tolist()
    for i in {*lost, *whys}:
        _give_up(states[i], whys.get(i, NOTHING_LEFT))
        rows[i] = logits[i]
    return rows


def _penalise(rows: torch.Tensor, states: Sequence[RowState]) -> None:
    found = [i for i, state in enumerate(states) if state.rules.penalties != NO_PENALTIES]
    found = [i for i in found if states[i].n_generated != WITHIN]
    if not found:
        return
    histories = [states[i].history(rows) for i in found]
    counts = torch.stack([counts for counts, _ in histories])
    seen = torch.stack([seen for _, seen in histories])
    penalties = [states[i].rules.penalties for i in found]
    columns = torch.tensor([[p.repetition, p.frequency, p.presence] for p in penalties])
    index = torch.tensor(found, device=rows.device)
    rows[index] = penalised(rows[index], counts, seen, columns.to(rows.device))


def _give_up(state: RowState, why: str) -> None:
    state.give_up(upstream.abort_reason(why[:400], HTTPStatus.UNPROCESSABLE_ENTITY))
