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


def ActionMaskProcessor(  # noqa: N802 - the name that users know
    valid_token_ids: Sequence[int], mask_value: float = -math.inf
) -> Processor:
    """`action_mask` under the name and with the parameters that it has elsewhere."""
    return action_mask(valid_token_ids, mask_value)


def DisallowedTokensProcessor(disallowed_token_ids: Sequence[int]) -> Processor:  # noqa: N802
    """`disallowed_tokens` under the name and with the parameter that it has elsewhere."""
    return disallowed_tokens(disallowed_token_ids)


def TemperatureScheduleProcessor(  # noqa: N802
    initial_temp: float, final_temp: float, warmup_tokens: int
) -> Processor:
    """`temperature_schedule` under the name and with the parameters that it has elsewhere."""
    return temperature_schedule(initial_temp, final_temp, warmup_tokens)


def create_rl_logit_processor(
    action_mask: Sequence[int] | None = None, disallowed_tokens: Sequence[int] | None = None
) -> str | None:
    """The text of the processor that these token ids ask for; None: nothing is asked for.

    Args:
        action_mask: ids that can be sampled, no others.
        disallowed_tokens: ids that cannot; of an `action_mask`, too.

    Raises:
        ValueError: no id is left of `action_mask`.
    """
    blocked = _ids(disallowed_tokens)
    if action_mask is None:
        return text_of(DisallowedTokensProcessor(blocked)) if blocked else None
    allowed = [token for token in _ids(action_mask) if token not in set(blocked)]
    if not allowed:
        raise ValueError("action_mask: no token is left that can be sampled; name at least one")
    return text_of(ActionMaskProcessor(allowed))


def text_of(processor: Processor) -> str:
    """A processor as text that `parse_rl_logit_processor` reads: a name and numbers, no code."""
    return json.dumps({"name": processor.name, "params": processor.params})


def parse_rl_logit_processor(text: str) -> Processor:
    """The processor that such a text says.

    Raises:
        ValueError: it is no such text.
    """
    try:
        return msgspec.convert(json.loads(text), Processor)
    except (json.JSONDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"no logit processor: {error}") from error


def _ids(tokens: Sequence[int] | None) -> list[int]:
    """Plain ids, also of an array."""
    return [] if tokens is None else [int(token) for token in tokens]


def _processor(name: str, params: Mapping[str, Param]) -> Processor:
    plain = {key: _plain(value) for key, value in params.items()}
    return Processor(name, plain)


def _plain(value: Param) -> bool | float | list[int | float]:
    """Numbers as Python has them; numpy's are not sent."""
    if isinstance(value, bool | int | float):
        return value
    given = value.tolist() if hasattr(value, "tolist") else list(value)  # type: ignore[attr-defined] - of numpy
    return cast("list[int | float]", given)
