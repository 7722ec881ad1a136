"""Loads the installed torchvision without its compiled operators.

Its Linux wheel on the package index is built for CUDA, and its library does not load beside a CPU
torch. What is written in Python works all the same: transforms of images and of videos. Only two
operators have to be known by name while it is imported; nothing here calls them.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

import torch

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _load() -> torch.library.Library:
    here = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if Path(entry).resolve() != here]
    spec = PathFinder.find_spec(__name__, others)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("torchvision is not installed: make test-sglang", name=__name__)
    library = torch.library.Library(__name__, "DEF")
    for schema in OPERATORS:
        library.define(schema)  # pyright: ignore[reportUnknownMemberType]
    # Whoever imports the name gets this module, not the file that you read.
    module = sys.modules[__name__] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return library


_LIBRARY = _load()
"""As long as it lives, the operators are known."""
