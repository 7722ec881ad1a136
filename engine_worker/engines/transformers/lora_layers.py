"""Low-rank adapters inside a model: what each row of a forward pass adds to its linear modules.

Rows of one pass may use different adapters, or none.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from rolloutbus.engine_worker.engines.shared.lora_adapter import Adapter, Factors

Hook = Callable[[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]
Named = Iterable[tuple[str, torch.nn.Module]]
PROBE_ROWS, PROBE_TOKENS = 2, 3


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter beside its model; it stays for as long as a request refers to it."""

    name: str
    version: int
    kv_root: bytes
    """Different for each that is ever loaded: where its chains of KV blocks begin."""
    scale: float
    factors: Mapping[str, Factors]
    """By module; where the module's weight lies, and of its type."""

    @property
    def full_name(self) -> str:
        """`NAME@VERSION`."""
        return f"{self.name}@{self.version}"


Rows = Sequence[LoadedAdapter | None]


class LoraLayers:
    """The adapted modules of one model; on the engine's thread only, but for `shapes`."""

    def __init__(self, model: torch.nn.Module, run: Callable[[int, int], object]) -> None:
        """Find the linear modules that see the rows of a pass as they are.

        `run(n_rows, n_tokens)` is a forward pass of the model, whose weights stay as they are.
        """
        self._modules = _modules_with_rows(model, run)
        self.shapes = {
            name: (module.out_features, module.in_features)
            for name, module in self._modules.items()
        }
        """(out, in) of each module that can be adapted."""
        self._hooked: set[str] = set()
        self._groups: Sequence[tuple[LoadedAdapter, torch.Tensor | None]] = ()
        """Of the pass under way: adapter, and its rows, int64 [n]; None: all of them."""

    def place(self, name: str, version: int, kv_root: bytes, adapter: Adapter) -> LoadedAdapter:
        """Bring an adapter to where the model is."""
        factors: dict[str, Factors] = {}
        for module, (a, b) in adapter.modules.items():
            weight = self._modules[module].weight
            factors[module] = Factors(a.to(weight.device, weight.dtype), b.to(weight))
            if module not in self._hooked:
                self._hooked.add(module)
                _hook(self._modules[module], self._adder(module))
        return LoadedAdapter(name, version, kv_root, adapter.scale, factors)

    @contextmanager
    def of_rows(self, rows: Rows, device: torch.device) -> Generator[None]:
        """For the passes inside: which adapter each row uses."""
        used = {each: None for each in rows if each is not None}
        if len(used) == 1 and all(rows):
            self._groups = [(next(iter(used)), None)]
        else:
            self._groups = [(each, _places(rows, each, device)) for each in used]
        try:
            yield
        finally:
            self._groups = ()

    def _adder(self, module: str) -> Hook:
        def add(_: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            for adapter, rows in self._groups:
                factors = adapter.factors.get(module)
                if factors is None:
                    continue
                x = inputs[0] if rows is None else inputs[0][rows]
                added = (x @ factors.a.T) @ factors.b.T * adapter.scale
                output = output + added if rows is None else output.index_add(0, rows, added)
            return output

        return add


def _places(rows: Rows, adapter: LoadedAdapter, device: torch.device) -> torch.Tensor:
    return torch.tensor([i for i, each in enumerate(rows) if each is adapter], device=device)


def _modules_with_rows(
    model: torch.nn.Module, run: Callable[[int, int], object]
) -> dict[str, torch.nn.Linear]:
    """Returns the linear modules whose input has one row per token of the pass.

    Others, as the experts of a mixture, are given tokens of several rows in one piece.
    """
    linear: dict[str, torch.nn.Linear] = {
        name: each
        for name, each in cast("Named", model.named_modules())
        if type(each) is torch.nn.Linear
    }
    seen: dict[str, torch.Size] = {}
    handles = [_hook(module, _note(seen, name)) for name, module in linear.items()]
    try:
        run(PROBE_ROWS, PROBE_TOKENS)
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: module
        for name, module in linear.items()
        if name in seen and len(seen[name]) == 3 and seen[name][0] == PROBE_ROWS  # noqa: PLR2004
    }


def _note(seen: dict[str, torch.Size], name: str) -> Hook:
    def note(_: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        seen[name] = inputs[0].shape
        return output

    return note


def _hook(module: torch.nn.Module, hook: Hook) -> Any:  # noqa: ANN401 - untyped
    return module.register_forward_hook(hook)
