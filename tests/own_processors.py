"""Logit processors of an operator's own, registered by their paths in tests of both engines."""

import gc

import torch

from rolloutbus.engine_worker.engines.shared.processors import LogitProcessor, Params, SoFar


def no_repeats(params: Params, vocab_size: int) -> LogitProcessor:
    """Rules out every token that the prompt has, or that was sampled before."""
    if params:
        raise ValueError("it takes no parameters")

    def process(logits: torch.Tensor, so_far: SoFar) -> torch.Tensor:
        assert len(so_far.generated) == so_far.n_generated
        known = [each for each in (*so_far.prompt, *so_far.generated) if each < vocab_size]
        return logits.index_fill(0, torch.tensor(known, device=logits.device), -torch.inf)

    return process


LOADED = 50_000
"""Objects; torch alone has more."""
SPARED, SEARCHED = 7, 8


def collected(params: Params, vocab_size: int) -> LogitProcessor:
    """Samples `SPARED` where the collector works, and leaves alone what was loaded."""
    if params or vocab_size <= SEARCHED:
        raise ValueError("it takes no parameters, and some vocabulary")

    def process(logits: torch.Tensor, so_far: SoFar) -> torch.Tensor:
        del so_far
        spared = gc.isenabled() and gc.get_freeze_count() > LOADED
        token = SPARED if spared else SEARCHED
        only = torch.full_like(logits, -torch.inf)
        only[token] = 0.0
        return only

    return process
