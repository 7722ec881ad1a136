from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest

from rolloutbus.engine_worker.engines.sglang.settings import SglangSettings
from rolloutbus.engine_worker.engines.sglang.upstream.arguments import server_arguments, typed

# As SGLang declares them.
KNOWN: dict[str, Any] = {
    "model_path": str,
    "skip_tokenizer_init": bool,
    "max_running_requests": Optional[int],  # noqa: UP045
    "dtype": str,
    "device": Optional[str],  # noqa: UP045
    "mem_fraction_static": Optional[float],  # noqa: UP045
    "tp_size": int,
    "watchdog_timeout": float,
    "grammar_backend": Optional[str],  # noqa: UP045
    "chunked_prefill_size": Optional[int],  # noqa: UP045
    "disable_radix_cache": bool,
    "lora_paths": Union[dict[str, str], list[str], list[dict[str, str]], None],  # noqa: UP007
}


@pytest.mark.parametrize(
    ("value", "kind", "wanted"),
    [
        ("2", int, 2),
        (2, int, 2),
        ("0.8", float, 0.8),
        (1, float, 1.0),
        ("true", bool, True),
        (True, bool, True),
        ("null", Literal["null", "prefill"], "null"),
        ("2", Literal[1, 2], 2),
        ('{"publisher":"zmq"}', Optional[str], '{"publisher":"zmq"}'),  # noqa: UP045
        ('["q_proj"]', Optional[list[str]], ["q_proj"]),  # noqa: UP045
        ('{"a":1}', Optional[dict[str, Any]], {"a": 1}),  # noqa: UP045
        ('["a=b"]', KNOWN["lora_paths"], ["a=b"]),
        ("plain", KNOWN["lora_paths"], "plain"),
    ],
)
def test_a_value_becomes_what_its_argument_declares(
    value: object, kind: object, wanted: object
) -> None:
    assert typed("name", value, kind) == wanted


@pytest.mark.parametrize(
    ("value", "kind"),
    [("many", int), ("2.5", int), (2.5, int), ("yes", bool), ("on", Literal["null", "prefill"])],
)
def test_a_value_of_another_type_is_refused_and_names_its_argument(
    value: object, kind: object
) -> None:
    with pytest.raises(ValueError, match="arguments: name: "):
        typed("name", value, kind)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"mem_fraction_statik": 0.5}, r"no argument 'mem_fraction_statik'; did you mean mem_fr"),
        ({"zzz": 1}, "no argument 'zzz'$"),
        ({"tp_size": "two"}, "tp_size: 'two' is no whole number of at least 1"),
        ({"model_path": "elsewhere"}, "model_path follows from the worker's settings"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused(
    given: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        server_arguments(SglangSettings("m", arguments=given), KNOWN)


def test_an_adapter_needs_kernels_that_its_device_has() -> None:
    for backend in ("csgmv", "triton"):
        with pytest.raises(
            ValueError, match="lora_backend: on a CPU SGLang has torch_native alone"
        ):
            SglangSettings("m", device="cpu", arguments={"lora-backend": backend})
        SglangSettings("m", device="cuda", arguments={"lora-backend": backend})
    SglangSettings("m", device="cpu", arguments={"lora_backend": "torch_native"})


def test_what_the_operator_says_wins_over_our_choice() -> None:
    settings = SglangSettings("m", slots=8, arguments={"watchdog-timeout": "60", "tp-size": "2"})
    chosen = server_arguments(settings, KNOWN)
    assert (chosen["watchdog_timeout"], chosen["tp_size"]) == (60.0, 2)
    assert (chosen["max_running_requests"], chosen["skip_tokenizer_init"]) == (8, True)


def test_a_pause_is_not_taken_for_a_hang() -> None:
    chosen = server_arguments(SglangSettings("m"), KNOWN)
    watchdog_s = chosen["watchdog_timeout"]
    assert isinstance(watchdog_s, float)
    assert watchdog_s >= 86_400


def test_arguments_that_this_version_lacks_are_not_chosen() -> None:
    assert set(server_arguments(SglangSettings("m"), KNOWN)) <= set(KNOWN)


@pytest.mark.parametrize(
    ("config", "is_whole"),
    [
        ('{"architectures": ["XLMRobertaForSequenceClassification"]}', True),
        ('{"architectures": ["BertModel"], "hidden_size": 64}', True),
        ('{"architectures": ["LlamaForSequenceClassification"]}', False),
        ("{}", False),
        ("no json", False),
    ],
)
def test_texts_of_encoders_are_neither_cached_nor_cut(
    tmp_path: Path, config: str, is_whole: bool
) -> None:
    (tmp_path / "config.json").write_text(config)
    chosen = server_arguments(SglangSettings(str(tmp_path)), KNOWN)
    wanted = (True, -1) if is_whole else (None, None)
    assert (chosen.get("disable_radix_cache"), chosen.get("chunked_prefill_size")) == wanted
