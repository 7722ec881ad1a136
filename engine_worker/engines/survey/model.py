"""Whether a model directory is one that an engine here can run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.survey.machine import Finding

GIB = 1 << 30


def model(path: Path) -> Iterator[Finding]:
    """The directory, its weights, and which engines know its architecture."""
    try:
        content = (path / "config.json").read_bytes()
        config = msgspec.json.decode(content, type=dict[str, Any])
    except OSError as error:
        what = "holds no readable config.json" if path.is_dir() else "is no directory"
        says = f"{path} {what} ({error.strerror}): give a local model directory"
        yield Finding("model", "config.json", "failed", says)
        return
    except msgspec.DecodeError as error:
        yield Finding("model", "config.json", "failed", f"{path}/config.json is broken: {error}")
        return
    names: list[str] = config.get("architectures") or []
    yield Finding("model", "config.json", "ok", f"{', '.join(names)}, {config.get('model_type')}")
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    says = f"{sum(sizes) / GIB:.2f} GiB in {len(sizes)} safetensors files"
    if not sizes:
        says = "no safetensors files; load_format=dummy starts without, for a trainer to bring them"
    yield Finding("model", "weights", "ok" if sizes else "failed", says)
    tokenizer = any(path.glob("tokenizer*"))
    says = "there" if tokenizer else "none: only token ids, no stop texts, no --text"
    yield Finding("model", "tokenizer", "ok" if tokenizer else "note", says)
    yield _for_transformers(str(config.get("model_type")))
    yield _for_sglang(names)


def _for_transformers(model_type: str) -> Finding:
    try:
        from transformers.models.auto.modeling_auto import (  # noqa: PLC0415 - seconds, and optional
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        )
    except ImportError as error:
        return Finding("model", "transformers engine", "missing", str(error))
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return Finding("model", "transformers engine", "ok", f"knows {model_type}")
    return Finding("model", "transformers engine", "failed", f"does not know {model_type!r}")


def _for_sglang(architectures: list[str]) -> Finding:
    try:
        known = upstream.supported_architectures()
    except ImportError as error:
        return Finding("model", "sglang engine", "missing", str(error))
    if any(name in known for name in architectures):
        return Finding("model", "sglang engine", "ok", f"knows {', '.join(architectures)}")
    says = f"does not know {', '.join(architectures)}; it may run it through transformers"
    return Finding("model", "sglang engine", "note", says)
