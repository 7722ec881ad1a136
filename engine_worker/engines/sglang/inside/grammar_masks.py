"""Grammars on a CPU: some versions of SGLang end at the first one, though xgrammar can do it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rolloutbus.engine_worker.engines.sglang.upstream import hooks
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.hooks import Hook
from rolloutbus.engine_worker.engines.sglang.upstream.types import SglangObject

Call = Callable[..., Any]


def calls() -> Sequence[tuple[Hook, Call]]:
    """What is wrapped, and what is called instead; nothing without xgrammar."""
    if not upstream.has_xgrammar():
        return ()
    return (hooks.ALLOCATE_MASK, _allocate), (hooks.APPLY_MASK, _apply)


def _allocate(
    call: Call, grammar: SglangObject, vocab_size: int, batch_size: int, device: object
) -> object:
    if str(device) != "cpu":
        return call(grammar, vocab_size, batch_size, device)
    return upstream.xgrammar().allocate_token_bitmask(batch_size, vocab_size)


def _apply(call: Call, grammar: SglangObject, logits: torch.Tensor, vocab_mask: object) -> None:
    if logits.device.type != "cpu":
        call(grammar, logits, vocab_mask)
    else:
        upstream.xgrammar().apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")
