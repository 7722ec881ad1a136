"""Tiny models that see and hear, with random weights, and what transformers says of them.

Their shapes are those of Qwen2-VL and Qwen2-Audio. The projection of what is seen or heard is
drawn wide, or an untrained model would let nothing of it through.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportMissingImports=false
# torch's and transformers' stubs leave parameters untyped; PyAV is beside SGLang alone.

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from rolloutbus import Media
from tests.sglang.models import FIRST_BYTE, SHAPE, save_byte_tokenizer

SIDE, PATCH = 56, 14
"""Pixels of a picture's side and of a patch's."""
RATE = 16_000
"""Samples of a sound in each second."""
SECONDS = 1
"""Length of a sound. Shorter ones are padded to it, and SGLang's model hears the padding, too."""
VISION_BEGIN, VISION_END, IMAGE, VIDEO = 500, 501, 502, 503
SEEN = {
    VISION_BEGIN: "<|vision_start|>",
    VISION_END: "<|vision_end|>",
    IMAGE: "<|image_pad|>",
    VIDEO: "<|video_pad|>",
}
AUDIO_BEGIN, AUDIO_END, AUDIO = 500, 501, 502
HEARD = {AUDIO_BEGIN: "<|audio_bos|>", AUDIO_END: "<|audio_eos|>", AUDIO: "<|AUDIO|>"}
PLACES = (SEEN[IMAGE], SEEN[VIDEO], HEARD[AUDIO])
BETWEEN = FIRST_BYTE + ord(" ")
"""A token that tells two places apart."""
PIXELS = {"shortest_edge": SIDE * SIDE, "longest_edge": 4 * SIDE * SIDE}
_KINDS = cast("Any", transformers)


def save_seeing_model(path: Path) -> Path:
    """Write a Qwen2-VL, its tokenizer and its processors of images and videos."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
    text = {**SHAPE, "max_position_embeddings": 2048, "rope_parameters": rope}
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": SHAPE["hidden_size"],
        "num_heads": 2,
        "patch_size": PATCH,
        # Published checkpoints say it by this name, and SGLang reads it.
        "in_chans": 3,
        "initializer_range": 0.1,
    }
    config = _KINDS.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=VISION_BEGIN,
        vision_end_token_id=VISION_END,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    model = _KINDS.Qwen2VLForConditionalGeneration(config)
    _widen(model, "merger.mlp")
    model.save_pretrained(path)
    tokenizer = _tokenizer(path, SEEN)
    images = _KINDS.Qwen2VLImageProcessor(size=PIXELS)
    videos = _KINDS.Qwen2VLVideoProcessor(size=PIXELS)
    _KINDS.Qwen2VLProcessor(images, tokenizer, videos).save_pretrained(path)
    return path


def save_hearing_model(path: Path) -> Path:
    """Write a Qwen2-Audio, its tokenizer and its feature extractor."""
    torch.manual_seed(0)
    audio = {
        "num_mel_bins": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 32,
        "max_source_positions": 50 * SECONDS,
        "initializer_range": 0.1,
    }
    text = {**SHAPE, "max_position_embeddings": 2048, "model_type": "qwen2"}
    config = _KINDS.Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=AUDIO)
    model = _KINDS.Qwen2AudioForConditionalGeneration(config)
    _widen(model, "multi_modal_projector")
    model.save_pretrained(path)
    _rename(path / "model.safetensors", "language_model.model.model.", "language_model.model.")
    features = _KINDS.WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS)
    _KINDS.Qwen2AudioProcessor(features, _tokenizer(path, HEARD)).save_pretrained(path)
    return path


def picture(color: tuple[int, int, int]) -> bytes:
    """A PNG of one colour."""
    written = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), color).save(written, "PNG")
    return written.getvalue()


def film(colors: Sequence[tuple[int, int, int]]) -> bytes:
    """An MP4 of two frames a second, each of one colour."""
    written = io.BytesIO()
    with av.open(written, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width = stream.height = SIDE
        stream.pix_fmt = "yuv420p"
        for color in colors:
            frame = av.VideoFrame.from_image(Image.new("RGB", (SIDE, SIDE), color))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return written.getvalue()


def tone(hertz: float) -> np.ndarray:
    """float32 [samples]: a sine."""
    t = np.arange(RATE * SECONDS) / RATE
    return (0.5 * np.sin(2 * np.pi * hertz * t)).astype(np.float32)


def recording(samples: np.ndarray) -> bytes:
    """An MP4 that holds the samples without a loss beyond 16 bits."""
    written = io.BytesIO()
    with av.open(written, "w", format="mp4") as container:
        stream = container.add_stream("alac", rate=RATE, layout="mono")
        whole = (samples * 32767).astype(np.int16)[None]
        frame = av.AudioFrame.from_ndarray(whole, format="s16p", layout="mono")
        frame.sample_rate = RATE
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return written.getvalue()


def _rename(path: Path, new: str, published: str) -> None:
    """Names as published checkpoints have them, which SGLang reads and transformers understands."""
    tensors = {name.replace(new, published): value for name, value in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def _widen(model: torch.nn.Module, part: str) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name and parameter.ndim > 1:
                parameter.normal_(std=0.5)


def _tokenizer(path: Path, names: dict[int, str]) -> Any:  # noqa: ANN401
    save_byte_tokenizer(path, names)
    return _KINDS.AutoTokenizer.from_pretrained(path)


class MediaReference:
    """Forward passes of a model that sees or hears, by transformers alone."""

    def __init__(self, model: Path) -> None:
        self.processor = _KINDS.AutoProcessor.from_pretrained(model)
        kind = getattr(_KINDS, json.loads((model / "config.json").read_text())["architectures"][0])
        self.model = kind.from_pretrained(model, dtype=torch.float32).eval()

    def logprobs(
        self, prompt: Sequence[int], media: Sequence[Media], tokens: Sequence[int]
    ) -> np.ndarray:
        """float32 [n_tokens]: of each token after the prompt and those before it."""
        ids, inputs = self._inputs(prompt, media)
        whole = torch.tensor([[*ids, *tokens]])
        inputs["attention_mask"] = torch.ones_like(whole)
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = (whole == IMAGE).long() + 2 * (whole == VIDEO).long()
        with torch.no_grad():
            logits = self.model(input_ids=whole, **inputs).logits[0, len(ids) - 1 : -1]
        chosen = torch.tensor(list(tokens))[:, None]
        return logits.log_softmax(-1).gather(-1, chosen)[:, 0].numpy()

    def _inputs(
        self, prompt: Sequence[int], media: Sequence[Media]
    ) -> tuple[list[int], dict[str, Any]]:
        """The prompt with as many tokens in each place as its medium has, and what it shows.

        The processor gets the places alone: it would write other tokens of the rest anew.
        """
        if not media:
            return list(prompt), {}
        places = {self.processor.tokenizer.convert_tokens_to_ids(each) for each in PLACES}
        spaced = [each for t in prompt if t in places for each in (t, BETWEEN)]
        text = self.processor.tokenizer.decode(spaced)
        inputs = dict(self.processor(text=[text], return_tensors="pt", **_read(media)))
        long = iter(inputs.pop("input_ids")[0].tolist())
        ids: list[int] = []
        for token in prompt:
            run = iter(long.__next__, BETWEEN) if token in places else (token,)
            # Some processors put tokens of their own around a place.
            ids += [each for each in run if token not in places or each in places]
        return ids, inputs


def _read(media: Sequence[Media]) -> dict[str, Any]:
    """The media as a processor of transformers takes them."""
    images = [Image.open(io.BytesIO(each.data)) for each in media if each.kind == "image"]
    videos = [_frames(each.data) for each in media if each.kind == "video"]
    sounds = [_samples(each.data) for each in media if each.kind == "audio"]
    found: dict[str, Any] = {"images": images, "videos": videos, "audio": sounds}
    if sounds:
        found["sampling_rate"] = RATE
    return {name: value for name, value in found.items() if value}


def _frames(data: bytes) -> np.ndarray:
    """uint8 [n_frames, height, width, 3]."""
    with av.open(io.BytesIO(data)) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])


def _samples(data: bytes) -> np.ndarray:
    """float32 [n_samples]."""
    with av.open(io.BytesIO(data)) as container:
        plain = av.AudioResampler(format="fltp", layout="mono", rate=RATE)
        frames = [part for frame in container.decode(audio=0) for part in plain.resample(frame)]
    return np.concatenate([frame.to_ndarray()[0] for frame in frames])
