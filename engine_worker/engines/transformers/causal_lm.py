"""A Hugging Face causal language model from a local directory: loading, weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rolloutbus.engine_worker.engine import Bytes, TensorSpec
from rolloutbus.engine_worker.engines.shared.made_up_weights import made_up_model
from rolloutbus.engine_worker.engines.shared.model_size import require_room
from rolloutbus.engine_worker.engines.transformers.settings import TransformersSettings
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor
from rolloutbus.engine_worker.weights.torch_tensors import DTYPE_NAMES


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


MAX_DEFAULT_KV_TOKENS = 65_536
OTHERWISE = (
    'other formats are not loaded; load_format="dummy" starts without weights, which a trainer '
    "brings then"
)


@dataclass(frozen=True, slots=True)
class CausalLm:
    """A model and what its configuration says about running it."""

    model: Any
    """torch.nn.Module whose forward returns `.logits` [n, q, vocab]."""
    device: torch.device
    dtype: torch.dtype
    n_layers: int
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    windows: Mapping[str, int | None]
    """Kinds of attention layers: name -> sliding window in tokens, None for full attention.

    The one kind of a uniform model is named `all`.
    """
    is_mask_additive: bool
    """Whether attention adds its mask to the scores, instead of reading it as booleans."""


def load_causal_lm(settings: TransformersSettings) -> CausalLm:
    """Load the model that `settings` names.

    Raises:
        ValueError: no such directory, no model in it, one this engine cannot run, or one that this
            machine has no room for.
    """
    path = Path(settings.model)
    if not (path / "config.json").is_file():
        raise ValueError(f"model: {path} is not a directory with a config.json")
    is_made_up = settings.load_format == "dummy"
    if not is_made_up and not any(path.glob("*.safetensors")):
        raise ValueError(f"model: {path} has no .safetensors file; {OTHERWISE}")
    transformers_logging.disable_progress_bar()
    device = _device(settings.device)
    dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
    require_room(path, dtype.itemsize, [device] if device.type == "cuda" else [])
    configs, models = cast("Any", AutoConfig), cast("Any", AutoModelForCausalLM)  # untyped
    config = configs.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    text = config.get_text_config()
    windows = _windows(text)
    # The fused kernels cannot cap attention scores; transformers refuses the combination.
    is_eager = "attn_logit_softcapping" in text.to_dict()
    attention = "eager" if is_eager else "sdpa"
    if is_made_up:
        model = made_up_model(path, config, dtype, attention)
    else:
        model = models.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation=attention,
        )
    model.to(device).eval().requires_grad_(False)  # noqa: FBT003 - torch's own signature
    return CausalLm(
        model=model,
        device=device,
        dtype=dtype,
        n_layers=int(text.num_hidden_layers),
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        max_context=_max_context(settings.max_context, text),
        eos_token_ids=_eos(model),
        windows=windows,
        is_mask_additive=is_eager,
    )


def kv_tokens(settings: TransformersSettings, max_context: int) -> int:
    """Tokens that the KV cache is to hold.

    Raises:
        ValueError: one full request would not fit.
    """
    if not settings.kv_tokens:
        return min(settings.slots * max_context, max(max_context, MAX_DEFAULT_KV_TOKENS))
    if settings.kv_tokens < max_context:
        raise ValueError(
            f"kv_tokens: {settings.kv_tokens} cannot hold one request of {max_context} tokens; "
            "raise it or lower max_context"
        )
    return settings.kv_tokens


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for and torch finds none")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _windows(text: Any) -> dict[str, int | None]:  # noqa: ANN401 - configurations are untyped
    fields: dict[str, Any] = text.to_dict()
    window: int | None = fields.get("sliding_window")
    kinds: list[str] | None = fields.get("layer_types")
    if kinds is None:
        return {"all": window}
    known = {"full_attention": None, "sliding_attention": window}
    if unknown := set(kinds) - set(known):
        raise ValueError(f"model: layers of type {sorted(unknown)} have no paged KV cache here")
    if set(kinds) == {"full_attention"}:
        return {"all": None}
    return {kind: known[kind] for kind in known if kind in kinds}


def _max_context(asked: int, text: Any) -> int:  # noqa: ANN401
    built_for = int(text.max_position_embeddings)
    if asked > built_for:
        raise ValueError(f"max_context: {asked} is beyond the model's {built_for} positions")
    return asked or built_for


def _eos(model: Any) -> tuple[int, ...]:  # noqa: ANN401
    eos: int | list[int] | None = model.generation_config.eos_token_id
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
