"""Stands in for `sgl_kernel`, whose CPU build no package index carries.

SGLang imports its kernels by name and calls none of them here: without an AMX kernel to be found,
each of its operations takes the path that is written in plain torch.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportAttributeAccessIssue=false, reportUnknownVariableType=false
# pyright: reportUnknownLambdaType=false

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils._device import _device_constructors

__version__ = "0.0.0"

OPERATORS = torch.library.Library("sgl_kernel", "DEF")
"""Those that models look up while they are imported; none of them has a kernel."""
for _name in (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
):
    OPERATORS.define(f"{_name}(Tensor x) -> Tensor")


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called: this is a stand-in")

    return kernel


def _without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:  # noqa: ANN401
        del pin_memory
        return make(*args, **kwargs)

    return call


def _pin_nothing() -> None:
    """SGLang's LoRA code pins memory whatever the device is; without a GPU torch refuses to."""
    # The set of functions that `with torch.device(...)` redirects is built once: before ours.
    _device_constructors()
    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self


if not torch.accelerator.is_available():
    _pin_nothing()
