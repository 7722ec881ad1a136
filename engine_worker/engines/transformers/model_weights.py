"""The weights of a running model: their names, replacing them, and putting them aside."""

from collections.abc import Sequence

import numpy as np
import torch

from rolloutbus.engine_worker.engine import Bytes, TensorSpec
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor
from rolloutbus.engine_worker.weights.torch_types import DTYPE_NAMES


class ModelWeights:
    """Parameters of one module by name, tied ones once. Little-endian hosts only."""

    def __init__(self, model: torch.nn.Module) -> None:
        # Duplicates are left out, so tied weights appear once, under their first name.
        self._parameters = dict(model.named_parameters())
        for parameter in self._parameters.values():
            parameter.data = parameter.data.contiguous()
        self._specs = tuple(
            TensorSpec(name, DTYPE_NAMES[p.dtype], tuple(p.shape), p.nbytes)
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

    def write(self, name: str, offset: int, raw: RawTensor) -> None:
        """Overwrite a parameter's bytes from `offset` on."""
        into = self._bytes_of(name)[offset : offset + raw.nbytes]
        if isinstance(raw, torch.Tensor):
            into.copy_(raw)
        elif into.device.type == "cpu":
            np.copyto(into.numpy(), raw)
        else:
            # numpy's copy, because torch refuses to wrap a read-only mapping.
            into.copy_(torch.as_tensor(raw.copy()))

    def read(self, name: str, offset: int, size_bytes: int) -> Bytes:
        """Copy of a parameter's bytes, uint8 [size_bytes]."""
        part = self._bytes_of(name)[offset : offset + size_bytes]
        return part.to("cpu", copy=True).numpy()

    def settle(self) -> None:
        """Wait for copies on devices, which go on by themselves."""
        for device in {each.device for each in self._parameters.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

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

    def _bytes_of(self, name: str) -> torch.Tensor:
        """The parameter's own memory, uint8 [size_bytes]."""
        held = (self._aside or {}).get(name, self._parameters[name].data)
        return held.view(-1).view(torch.uint8)
