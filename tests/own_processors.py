"""Logit processors of an operator's own, registered by their paths in tests of both engines."""

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
