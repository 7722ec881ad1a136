"""Logit processors for reinforcement learning: what a name and its parameters do to logits.

Peers name a processor and give numbers. The operator may register more of them by the import path
of a factory; code never comes from a peer.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, cast

import torch

from rolloutbus.bus.wire.messages.generation import Processor
from rolloutbus.bus.wire.validation import MAX_TEMPERATURE, MIN_TEMPERATURE

Param = bool | int | float | Sequence[int | float]
Params = Mapping[str, Param]


@dataclass(frozen=True, slots=True)
class SoFar:
    """The tokens of a request at the moment when its next one is drawn."""

    n_generated: int
    """Tokens sampled so far, those of earlier attempts included."""
    read: Callable[[], tuple[Sequence[int], Sequence[int]]]
    """Reads `prompt` and `generated`, in one go."""

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids of the prompt; in the place of media, ids beyond the vocabulary."""
        return self.read()[0]

    @property
    def generated(self) -> Sequence[int]:
        """Token ids sampled so far, [n_generated]; on a GPU this may wait for the step before."""
        return self.read()[1]


class LogitProcessor(Protocol):
    """Changes the logits of one request. A pure function: engines may call it again."""

    def __call__(self, logits: torch.Tensor, so_far: SoFar) -> torch.Tensor:
        """Returns new logits, float32 [vocab]; must not change `logits`.

        Args:
            logits: float32 [vocab], after bias and penalties, before temperature.
            so_far: the tokens before the one that is drawn.
        """
        ...


Factory = Callable[[Params, int], LogitProcessor]
"""Makes a processor of its parameters and the vocabulary's size; ValueError: they do not fit."""


class Processors:
    """The processors that an engine knows by name."""

    def __init__(self, registered: Mapping[str, str]) -> None:
        """The built-in ones, and the operator's: name -> `package.module:factory`.

        Raises:
            ValueError: a path leads nowhere, or a name is taken; names it.
        """
        if taken := sorted(registered.keys() & BUILT_IN.keys()):
            raise ValueError(f"processors: {', '.join(taken)} cannot be registered again")
        self._paths: Mapping[str, str] = {**BUILT_IN, **registered}
        self._factories = {name: factory_at(path) for name, path in self._paths.items()}

    @property
    def names(self) -> Sequence[str]:
        """All, in order."""
        return sorted(self._paths)

    def path_of(self, name: str) -> str:
        """Where the factory of a known processor is."""
        return self._paths[name]

    def build(self, asked: Sequence[Processor], vocab_size: int) -> list[LogitProcessor]:
        """The processors of one request, in order.

        Raises:
            ValueError: one is not known, or its parameters do not fit; names it.
        """
        built: list[LogitProcessor] = []
        for each in asked:
            factory = self._factories.get(each.name)
            if factory is None:
                known = ", ".join(self.names)
                raise ValueError(f"{each.name!r} is not registered here; known are {known}")
            try:
                built.append(factory(each.params, vocab_size))
            except ValueError as error:
                raise ValueError(f"{each.name}: {error}") from error
            # Whatever an operator's factory raises concerns this request and not its engine.
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                raise ValueError(
                    f"{each.name} cannot be made of these parameters: {why}"
                ) from error
        return built


def factory_at(path: str) -> Factory:
    """Import a factory.

    The path is from the settings of the worker's own operator. Nothing that a peer sends gets here:
    peers give the names under which processors were registered, and numbers.

    Raises:
        ValueError: there is none at this path.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"processors: no factory at {path!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"processors: {path!r} is no function")  # noqa: TRY004 - its value
    return cast("Factory", found)


def apply(
    processors: Sequence[LogitProcessor], logits: torch.Tensor, so_far: SoFar
) -> torch.Tensor | str:
    """Logits of one request after its processors; a sentence if one of them failed.

    What was ruled out before (-inf) stays so, whatever the processors fill in.
    """
    if not processors:
        return logits
    is_out = logits == -torch.inf
    try:
        for processor in processors:
            logits = processor(logits, so_far)
        return logits.masked_fill(is_out, -torch.inf)
    # Whatever an operator's processor raises concerns this request and not its engine.
    except Exception as error:  # noqa: BLE001
        return f"a processor failed: {type(error).__name__}: {error}"[:500]


def action_mask(params: Params, vocab_size: int) -> LogitProcessor:
    """`allowed`: list of token ids; every other logit becomes `mask_value`, -inf unless given."""
    known = _only(params, "allowed", "mask_value")
    mask = _mask("allowed", known.get("allowed"), vocab_size)
    if not mask.any():
        raise ValueError("allowed is empty")
    fill = _number("mask_value", known.get("mask_value", -torch.inf))
    if fill == torch.inf:
        raise ValueError("mask_value is infinite")
    return _keep(mask, fill)


def disallowed_tokens(params: Params, vocab_size: int) -> LogitProcessor:
    """`blocked`: list of token ids that are never sampled."""
    mask = _mask("blocked", _only(params, "blocked").get("blocked"), vocab_size)
    if mask.all():
        raise ValueError("blocked leaves no token")
    return _keep(~mask, -torch.inf)


def temperature_schedule(params: Params, vocab_size: int) -> LogitProcessor:  # noqa: ARG001
    """Divide by a temperature that goes from `initial` to `final` in `warmup_tokens` tokens."""
    known = _only(params, "initial", "final", "warmup_tokens")
    initial, final = (_temperature(name, known.get(name)) for name in ("initial", "final"))
    warmup = known.get("warmup_tokens")
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
        raise ValueError(f"warmup_tokens is {warmup!r}; it must be a number of tokens")

    def scaled(logits: torch.Tensor, so_far: SoFar) -> torch.Tensor:
        part = min(1.0, so_far.n_generated / warmup) if warmup else 1.0
        return logits / (initial + (final - initial) * part)

    return scaled


BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        each.__name__: f"{__name__}:{each.__name__}"
        for each in (
            action_mask,
            disallowed_tokens,
            temperature_schedule,
        )
    }
)
"""Name -> path of its factory."""


def _keep(keep: torch.Tensor, fill: float) -> LogitProcessor:
    """Keeps the logits of some tokens, bool [vocab], and fills the others in."""

    def kept(logits: torch.Tensor, so_far: SoFar) -> torch.Tensor:  # noqa: ARG001
        nonlocal keep
        if keep.device != logits.device:
            keep = keep.to(logits.device)
        return torch.where(keep, logits, fill)

    return kept


def _only(params: Params, *names: str) -> Params:
    if unknown := sorted(set(params) - set(names)):
        raise ValueError(f"no parameter {unknown[0]!r}; there are {', '.join(names)}")
    return params


def _mask(name: str, ids: Param | None, vocab_size: int) -> torch.Tensor:
    if not isinstance(ids, Sequence) or not all(type(i) is int for i in ids):
        raise ValueError(f"{name} must be a list of token ids")
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"{name} has ids outside of 0 to {vocab_size - 1}")
    mask[torch.tensor(cast("Sequence[int]", ids), dtype=torch.int64)] = True
    return mask


def _number(name: str, value: Param) -> float:
    if isinstance(value, bool | Sequence) or value != value:  # noqa: PLR0124 - NaN
        raise ValueError(f"{name} is {value!r}; it must be a number")
    return float(value)


def _temperature(name: str, value: Param | None) -> float:
    number = _number(name, () if value is None else value)
    if not MIN_TEMPERATURE <= number <= MAX_TEMPERATURE:
        limit = f"from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        raise ValueError(f"{name} is {number:g}; it must be {limit}")
    return number
