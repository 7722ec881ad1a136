"""Stands in for `torch_memory_saver`, whose allocator needs CUDA.

Memory stays where it is; what is paused is overwritten with bytes that make every float NaN, so
that a user who needs what was not brought back does not get away with it.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportMissingSuperCall=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

RUINED = 0xFF


@dataclass
class _Tagged:
    """Storages made under one tag, weakly held."""

    keeps_a_copy: bool
    storages: dict[int, StorageWeakRef] = field(default_factory=dict[int, StorageWeakRef])

    def live(self) -> list[torch.Tensor]:
        """Bytes of each storage that is still there, uint8."""
        return [_bytes_of(ref) for ref in self.storages.values() if not ref.expired()]


class _Watch(TorchDispatchMode):
    """Notes the storage of every CPU tensor that an operation returns."""

    def __init__(self, tagged: _Tagged) -> None:
        super().__init__()
        self._tagged = tagged

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, list | tuple) else (result,):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                ref = StorageWeakRef(each.untyped_storage())
                self._tagged.storages.setdefault(ref.cdata, ref)
        return result


class _Saver:
    """The part of the real one's interface that SGLang uses."""

    enabled = True
    hook_mode = "preload"

    def __init__(self) -> None:
        self._by_tag: dict[str | None, _Tagged] = {}
        self._copies: dict[str | None, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @contextmanager
    def region(self, tag: str = "default", *, enable_cpu_backup: bool = False) -> Generator[None]:
        with _Watch(self._by_tag.setdefault(tag, _Tagged(enable_cpu_backup))):
            yield

    @contextmanager
    def disable(self) -> Generator[None]:
        yield

    @contextmanager
    def cuda_graph(self, *_: object, **__: object) -> Generator[None]:
        yield

    def pause(self, tag: str | None = None) -> None:
        if tag in self._copies:
            raise RuntimeError(f"{tag} is paused already")
        tagged = self._by_tag.get(tag, _Tagged(keeps_a_copy=False))
        live = tagged.live()
        self._copies[tag] = [(each, each.clone()) for each in live if tagged.keeps_a_copy]
        for each in live:
            each.fill_(RUINED)

    def resume(self, tag: str | None = None) -> None:
        for live, copy in self._copies.pop(tag):
            live.copy_(copy)


def _bytes_of(ref: StorageWeakRef) -> torch.Tensor:
    found = torch.empty(0, dtype=torch.uint8)
    found.set_(torch.UntypedStorage._new_with_weak_ptr(ref.cdata))
    return found


@contextmanager
def configure_subprocess() -> Generator[None]:
    yield


torch_memory_saver = _Saver()
