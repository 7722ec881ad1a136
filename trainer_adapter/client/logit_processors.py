"""Logit processors by name and numbers, as requests carry them, and as text for a configuration.

What they do is said by the engines that know them: `engine_worker.engines.shared.processors`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from rolloutbus.bus.wire.messages.generation import Processor

Param = bool | int | float | Sequence[int | float]


def action_mask(allowed: Sequence[int], mask_value: float = -math.inf) -> Processor:
    """Only these token ids can be sampled: the logits of others become `mask_value`."""
    given = {} if mask_value == -math.inf else {"mask_value": float(mask_value)}
    return _processor("action_mask", {"allowed": allowed, **given})


def disallowed_tokens(blocked: Sequence[int]) -> Processor:
    """These token ids are never sampled."""
    return _processor("disallowed_tokens", {"blocked": blocked})


def temperature_schedule(initial: float, final: float, warmup_tokens: int) -> Processor:
    """Logits are divided by a temperature that goes from `initial` to `final`, token by token.

    It has gone all the way after `warmup_tokens` tokens. The temperature of the sampling parameters
    divides as well.
    """
    numbers = {"initial": float(initial), "final": float(final)}
    return _processor("temperature_schedule", {**numbers, "warmup_tokens": int(warmup_tokens)})


def create_rl_logit_processor(name: str, **params: Param) -> str:
    """A processor as text that `parse_rl_logit_processor` reads: a name and numbers, no code."""
    built = _processor(name, params)
    return json.dumps({"name": built.name, "params": built.params})


def parse_rl_logit_processor(text: str) -> Processor:
    """The processor that such a text says.

    Raises:
        ValueError: it is no such text.
    """
    try:
        return msgspec.convert(json.loads(text), Processor)
    except (json.JSONDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"no logit processor: {error}") from error


def _processor(name: str, params: Mapping[str, Param]) -> Processor:
    plain = {key: _plain(value) for key, value in params.items()}
    return Processor(name, plain)


def _plain(value: Param) -> bool | float | list[int | float]:
    """Numbers as Python has them; numpy's are not sent."""
    if isinstance(value, bool | int | float):
        return value
    given = value.tolist() if hasattr(value, "tolist") else list(value)  # type: ignore[attr-defined] - of numpy
    return cast("list[int | float]", given)
