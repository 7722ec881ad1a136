"""The weights of a running model: their names, replacing them, and putting them aside."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from engine_worker.engine import Bytes, TensorSpec

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
_EXPONENTS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F32": (np.uint32, 0x7F80_0000),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
}
"""dtype -> how to read its bits, and the exponent bits: all ones mean infinity or NaN."""
_CHUNK = 1 << 20


class ModelWeights:
    """Parameters of one module by name, tied ones once. Little-endian hosts only."""

    def __init__(self, model: torch.nn.Module) -> None:
        # Duplicates are left out, so tied weights appear once, under their first name.
        self._parameters = dict(model.named_parameters())
        for parameter in self._parameters.values():
            parameter.data = parameter.data.contiguous()
        self._specs = tuple(
            TensorSpec(name, _NAMES[p.dtype], tuple(p.shape), p.nbytes)
            for name, p in self._parameters.items()
        )
        self._aside: dict[str, torch.Tensor] | None = None

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """What `write` expects."""
        return self._specs

    @property
    def are_aside(self) -> bool:
        """Whether `put_aside` is in force."""
        return self._aside is not None

    def check(self, tensors: Mapping[str, Bytes]) -> None:
        """Judge tensors without touching the model.

        Raises:
            ValueError: names the tensors that are unknown, missing, of the wrong size, or that
                hold infinity or NaN (what a diverged trainer publishes).
        """
        expected = {spec.name: spec for spec in self._specs}
        problems = [f"unknown: {name}" for name in tensors if name not in expected]
        problems += [f"missing: {name}" for name in expected if name not in tensors]
        for name, spec in expected.items():
            if name in tensors and tensors[name].nbytes != spec.size_bytes:
                problems.append(
                    f"{name}: {tensors[name].nbytes} bytes, but {spec.dtype} "
                    f"{list(spec.shape)} has {spec.size_bytes}"
                )
            elif name in tensors and not _is_finite(tensors[name], spec.dtype):
                problems.append(f"{name}: holds infinity or NaN")
        if problems:
            shown = "; ".join(problems[:8])
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""  # noqa: PLR2004
            raise ValueError(f"weights do not fit the model: {shown}{more}")

    def write(self, tensors: Mapping[str, Bytes]) -> None:
        """Copy checked tensors into the parameters."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                into = parameter.data.view(-1).view(torch.uint8)
                raw = np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8)
                if into.device.type == "cpu":
                    np.copyto(into.numpy(), raw)
                else:
                    # numpy's copy, because torch refuses to wrap a read-only mapping.
                    into.copy_(torch.as_tensor(raw.copy()))

    def put_aside(self) -> int:
        """Move parameters of an accelerator to host memory; returns the bytes freed there.

        On a CPU there is nowhere better to put them: they stay, and 0 is returned.
        """
        if self._aside is not None:
            return 0
        self._aside = {}
        for name, parameter in self._parameters.items():
            if parameter.device.type != "cpu":
                self._aside[name] = parameter.data.to("cpu", copy=True)
                parameter.data = parameter.data.new_empty(0)
        return sum(tensor.nbytes for tensor in self._aside.values())

    def bring_back(self, device: torch.device) -> int:
        """Undo `put_aside`, values included; returns the bytes taken."""
        aside, self._aside = self._aside or {}, None
        for name, tensor in aside.items():
            self._parameters[name].data = tensor.to(device)
        return sum(tensor.nbytes for tensor in aside.values())


def _is_finite(raw: Bytes, dtype: str) -> bool:
    if dtype not in _EXPONENTS:
        return True
    kind, ones = _EXPONENTS[dtype]
    bits = np.ascontiguousarray(raw).reshape(-1).view(kind)
    mask = kind(ones)
    return not any(((chunk & mask) == mask).any() for chunk in _chunks(bits))


def _chunks(bits: np.ndarray) -> Iterator[np.ndarray]:
    """Pieces small enough that their masks stay in the cache."""
    for start in range(0, len(bits), _CHUNK):
        yield bits[start : start + _CHUNK]
