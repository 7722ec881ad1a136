"""How penalties change logits; the same on every engine that draws its own tokens."""

import torch


def penalised(
    logits: torch.Tensor, counts: torch.Tensor, seen: torch.Tensor, penalties: torch.Tensor
) -> torch.Tensor:
    """Logits after the repetition penalty, then the frequency and presence penalties.

    Args:
        logits: float32 [n, vocab].
        counts: int [n, vocab], how often each token was generated.
        seen: bool [n, vocab], whether it is in the prompt or was generated.
        penalties: float32 [n, 3]: repetition, frequency, presence.
    """
    repetition, frequency, presence = (penalties[:, i : i + 1] for i in range(3))
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    scaled = torch.where(seen, repeated, logits)
    return scaled - frequency * counts - presence * (counts > 0)
