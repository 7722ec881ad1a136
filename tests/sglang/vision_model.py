"""A tiny model that sees, with random weights: what an image changes is all that counts."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
# pyright: reportUnknownVariableType=false
# torch's and transformers' stubs leave parameters untyped.

import io
import json
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.sglang.models import SHAPE, save_byte_tokenizer

IMAGE, BEGIN, END = 500, 501, 502
"""Tokens: the place of an image in a prompt, and what the processor puts around it."""
NAMES = {IMAGE: "<image_soft_token>", BEGIN: "<start_of_image>", END: "<end_of_image>"}
SIDE, PATCH, PLACES = 28, 14, 4
"""Pixels of an image's side and of a patch's; tokens that an image becomes."""
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "vision_use_head": False,
}


def save_vision_model(path: Path, head_size: int = 16) -> Path:
    """Write a Gemma 3, its tokenizer and its image processor, the one that needs no torchvision."""
    torch.manual_seed(0)
    kinds = cast("Any", transformers)
    shape = {**SHAPE, "max_position_embeddings": 2048}
    text = kinds.Gemma3TextConfig(**shape, head_dim=head_size, sliding_window=512)
    vision = kinds.SiglipVisionConfig(**VISION)
    tokens = {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END}
    config = kinds.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=PLACES, **tokens
    )
    model = kinds.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        # Untrained, it would let nothing of an image through.
        for name, parameter in model.named_parameters():
            if "mm_input_projection" in name:
                parameter.normal_(std=0.5)
    model.save_pretrained(path)
    _rename(path / "model.safetensors")
    _save_processor(path)
    return path


def picture(color: tuple[int, int, int]) -> bytes:
    """A PNG of one colour."""
    written = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), color).save(written, "PNG")
    return written.getvalue()


def _rename(path: Path) -> None:
    """The vision tower's names as published checkpoints have them, which SGLang reads."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        is_new = name.startswith("vision_tower.") and ".vision_model." not in name
        longer = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
        tensors[longer if is_new else name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


def _save_processor(path: Path) -> None:
    save_byte_tokenizer(
        path, NAMES, image_token=NAMES[IMAGE], boi_token=NAMES[BEGIN], eoi_token=NAMES[END]
    )
    images = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
        "image_seq_length": PLACES,
        "do_pan_and_scan": False,
    }
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": PLACES}
    (path / "preprocessor_config.json").write_text(json.dumps(images))
    (path / "processor_config.json").write_text(json.dumps(processor | {"image_processor": images}))
