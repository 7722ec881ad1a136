"""Models without weight files: their modules, and the tensors that a version of them holds.

An engine starts so where a trainer brings the first weights: `load_format="dummy"`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

SEED = 0
"""Of made-up weights: they are the same on every worker."""
GENERATION = "generation_config.json"


def made_up_model(path: Path, config: Any, dtype: torch.dtype, attention: str) -> Any:  # noqa: ANN401 - untyped
    """A causal language model as its configuration describes it, with random weights.

    Args:
        path: its directory, for what the model generates with unless told otherwise.
        config: of transformers.
        dtype: of its weights.
        attention: how transformers computes attention, `sdpa` or `eager`.
    """
    models, generation = cast("Any", AutoModelForCausalLM), cast("Any", GenerationConfig)
    chance = cast("Any", torch.random)  # untyped
    with chance.fork_rng():
        chance.manual_seed(SEED)
        model = models.from_config(
            config, trust_remote_code=False, dtype=dtype, attn_implementation=attention
        )
    if (path / GENERATION).is_file():
        model.generation_config = generation.from_pretrained(path, local_files_only=True)
    return model


def checkpoint_tensors(path: Path) -> Mapping[str, torch.Tensor]:
    """What a checkpoint of the model in this directory would hold, without content, tied ones once.

    Raises:
        ValueError: transformers cannot make such a model from its configuration.
    """
    config = cast("Any", AutoConfig).from_pretrained(path, local_files_only=True)
    names: list[str] = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        message = f"no weight files are there, and transformers {transformers.__version__} has no"
        raise ValueError(f"model: {path}: {message} {names}: which tensors it has is not known")
    with torch.device("meta"):
        model = kind(config)
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return _as_saved(model, found)


def _as_saved(model: Any, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:  # noqa: ANN401
    """Under the names of its files: transformers 5 merges experts, for one, when it loads them."""
    try:
        from transformers.core_model_loading import (  # noqa: PLC0415 - not in every transformers
            revert_weight_conversion,
        )
    except ImportError:
        return tensors
    revert = cast("Any", revert_weight_conversion)  # untyped
    return revert(model, dict(tensors))
