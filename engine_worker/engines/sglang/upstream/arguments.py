"""The arguments that SGLang's engine is started with."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rolloutbus.engine_worker.engines.sglang.settings import CPU_LORA, SglangSettings, named

ON_ANY_DEVICE: Mapping[str, object] = {
    "log_level": "warning",
    "enable_custom_logit_processor": True,
    # An idle scheduler would keep a core busy.
    "sleep_on_idle": True,
    # The worker's own watch looks at steps; SGLang's takes a pause in place for a hang.
    "watchdog_timeout": 86_400.0,
}
ON_A_CPU: Mapping[str, object] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "lora_backend": CPU_LORA,
}
FOR_ENCODERS: Mapping[str, object] = {"disable_radix_cache": True, "chunked_prefill_size": -1}
"""Each place of their texts sees the whole: a beginning that is cached, or computed before the
rest, is of another text, and SGLang ends when it cuts a pair of texts in two."""
ENCODERS = re.compile("Bert|Roberta|Contriever")
"""In the names of their architectures."""


class Architectures(msgspec.Struct):
    """What is looked for in a model's `config.json`."""

    architectures: list[str] = []


def server_arguments(settings: SglangSettings, known: Mapping[str, Any]) -> dict[str, object]:
    """Keyword arguments for `Engine`; what the operator named wins over our choices.

    Args:
        settings: the operator's.
        known: type of each argument of the installed version, by name.

    Raises:
        ValueError: an argument that does not exist, has a setting of its own, or a value of
            another type.
    """
    given = named(settings.arguments)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"arguments: this SGLang has no argument {name!r}{hint}")
    given = {name: typed(name, value, known[name]) for name, value in given.items()}
    chosen: dict[str, object] = {
        "model_path": settings.model,
        "skip_tokenizer_init": not settings.text,
        "max_running_requests": settings.slots,
        "dtype": settings.dtype,
        **ON_ANY_DEVICE,
    }
    if settings.device != "auto":
        chosen["device"] = settings.device
    if settings.device == "cpu":
        chosen |= ON_A_CPU
    if is_encoder(Path(settings.model)):
        chosen |= FOR_ENCODERS
    if settings.max_context:
        chosen["context_length"] = settings.max_context
    if not settings.text:
        chosen["grammar_backend"] = "none"
    return {name: value for name, value in {**chosen, **given}.items() if name in known}


def is_encoder(model: Path) -> bool:
    """Whether the model's attention looks ahead, as its `config.json` tells."""
    try:
        config = msgspec.json.decode((model / "config.json").read_bytes(), type=Architectures)
    except (OSError, msgspec.DecodeError):
        return False  # SGLang says what is wrong with it
    return any(ENCODERS.search(name) for name in config.architectures)


def typed(name: str, value: object, kind: Any) -> object:  # noqa: ANN401 - any annotation
    """`value` as `kind`; text that is not of that type itself is read as JSON.

    Raises:
        ValueError: it cannot be; names the argument.
    """
    for read in (value, _decoded(value)):
        try:
            return msgspec.convert(read, kind)
        except msgspec.ValidationError:
            continue
        except TypeError:
            # An annotation that only SGLang itself can judge.
            return _decoded(value)
    raise ValueError(f"arguments: {name}: {value!r} is not {_shown(kind)}")


def _decoded(value: object) -> object:
    """What text says as JSON, if it says anything; other values are themselves."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value


def _shown(kind: Any) -> str:  # noqa: ANN401 - any annotation
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
