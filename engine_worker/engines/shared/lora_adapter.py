"""A low-rank adapter in PEFT's terms, judged against a model before anything is allocated for it.

What a part of the engines would leave out or get wrong without a word is refused.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import torch

from rolloutbus.bus.weights.tensor_files import LENGTH_BYTES, header_bytes, parse_header
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.engine_worker.engine import LoraTensors, TensorSpec
from rolloutbus.engine_worker.weights.adapter_sources import CONFIG, TENSORS
from rolloutbus.engine_worker.weights.torch_tensors import TORCH_TYPES

Shape = tuple[int, ...]
PREFIX = "base_model.model."
"""Before the name of each module in PEFT's files."""
A, B = ".lora_A.weight", ".lora_B.weight"
FLOATS = ("F32", "BF16", "F16")
"""Types of factors."""
MAX_NAMED = 4
"""Wrong tensors that a message lists."""


class Factors(NamedTuple):
    """What is added to one linear module: scale * B A."""

    a: torch.Tensor
    """[rank, in]."""
    b: torch.Tensor
    """[out, rank]."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits its model."""

    rank: int
    scale: float
    modules: Mapping[str, Factors]
    """By the module's name in the model."""


class PeftConfig(msgspec.Struct, frozen=True):
    """What is read of an `adapter_config.json`."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    lora_bias: bool = False
    bias: str = "none"
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: list[str] | None = None

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def read_adapter(source: Path | LoraTensors, shapes: Mapping[str, Shape]) -> Adapter:
    """Read an adapter for a model with linear modules of these `shapes`: (out, in) by name.

    Raises:
        ValueError: it is no adapter, or not for this model; says why.
    """
    in_files = _in_files(source) if isinstance(source, Path) else source
    config = _config(in_files.config)
    specs = {each.name: each for each in in_files.specs}
    names = _modules(specs, shapes, config.r)
    modules = {
        module: Factors(
            _tensor(in_files, specs[f"{PREFIX}{module}{A}"]),
            _tensor(in_files, specs[f"{PREFIX}{module}{B}"]),
        )
        for module in names
    }
    return Adapter(config.r, config.scale, modules)


def _in_files(folder: Path) -> LoraTensors:
    """Nothing is copied: the bytes come with the first look at them."""
    path = folder / TENSORS
    try:
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, object])
        with path.open("rb") as file:
            text = file.read(header_bytes(file.read(LENGTH_BYTES)))
        size_bytes = path.stat().st_size
        ranges = parse_header(text, size_bytes)
    except (OSError, msgspec.DecodeError, RemoteProtocolError) as error:
        raise ValueError(f"{folder.name}: this is no adapter: {error}") from error
    mapped = cast("Any", torch).from_file(
        str(path), shared=False, size=size_bytes, dtype=torch.uint8
    )
    specs = [TensorSpec(name, r.dtype, r.shape, r.size_bytes) for name, r in ranges.items()]
    parts = {name: mapped[r.start : r.start + r.size_bytes] for name, r in ranges.items()}
    return LoraTensors(config, specs, parts)


def _config(fields: Mapping[str, object]) -> PeftConfig:
    try:
        config = msgspec.convert(dict(fields), PeftConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"{CONFIG}: {error}") from error
    extras = {
        "peft_type other than LORA": config.peft_type != "LORA",
        "use_dora": config.use_dora,
        "fan_in_fan_out": config.fan_in_fan_out,
        "bias": config.lora_bias or config.bias != "none",
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
        "modules_to_save": config.modules_to_save,
    }
    if found := [name for name, is_there in extras.items() if is_there]:
        raise ValueError(f"{CONFIG}: engines here cannot do {', '.join(found)}")
    if config.r < 1 or not math.isfinite(config.lora_alpha):
        raise ValueError(f"{CONFIG}: r {config.r} and lora_alpha {config.lora_alpha} are no scale")
    return config


def _modules(
    specs: Mapping[str, TensorSpec], shapes: Mapping[str, Shape], rank: int
) -> Sequence[str]:
    """Names of the adapted modules, once all tensors are known to fit them."""
    problems: list[str] = []
    modules: dict[str, None] = {}
    for spec in specs.values():
        module, is_a = _module_of(spec.name)
        shape = shapes.get(module)
        if shape is None:
            problems.append(f"{spec.name} belongs to no linear module of the model")
            continue
        expected = (rank, shape[1]) if is_a else (shape[0], rank)
        if spec.shape != expected or spec.dtype not in FLOATS:
            problems.append(
                f"{spec.name} is {spec.dtype} {list(spec.shape)}, "
                f"not floating point {list(expected)}"
            )
        modules[module] = None
    for module in modules:
        problems += [
            f"{name} is missing"
            for name in (f"{PREFIX}{module}{A}", f"{PREFIX}{module}{B}")
            if name not in specs
        ]
    if not specs:
        problems.append("it has no tensors")
    if problems:
        more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        shown = "; ".join(problems[:MAX_NAMED])
        raise ValueError(f"this is no adapter for this model: {shown}{more}")
    return [*modules]


def _module_of(name: str) -> tuple[str, bool]:
    """The module that a tensor belongs to, and whether it is the factor A; ("", …): none."""
    for suffix in (A, B):
        if name.startswith(PREFIX) and name.endswith(suffix):
            return name.removeprefix(PREFIX).removesuffix(suffix), suffix == A
    return "", False


def _tensor(source: LoraTensors, spec: TensorSpec) -> torch.Tensor:
    raw = source.tensors[spec.name]
    held = raw.clone() if isinstance(raw, torch.Tensor) else torch.as_tensor(raw.copy())
    tensor = held.view(TORCH_TYPES[spec.dtype]).view(spec.shape)
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{spec.name} has infinity or NaN in it")
    return tensor
