"""Stands in for `torchvision`, whose Linux wheel is built for CUDA and breaks beside a CPU torch.

Models of text need its names while they are imported, and nothing else of it.
"""

import enum
import sys
from types import ModuleType
from typing import NoReturn

__version__ = "0.28.0"
__path__: list[str] = []

SUBMODULES = (
    "io",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
)


class InterpolationMode(enum.Enum):
    """The names that image processors have as defaults."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Submodule(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.InterpolationMode = InterpolationMode

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _not_here


def _not_here(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError("torchvision was called: this is a stand-in")


def _install() -> None:
    for name in SUBMODULES:
        module = _Submodule(f"{__name__}.{name}")
        sys.modules[module.__name__] = module
        parent, _, own_name = module.__name__.rpartition(".")
        setattr(sys.modules[parent], own_name, module)


_install()
