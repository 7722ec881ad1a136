from typing import cast

import pytest
import typer

from rolloutbus.cli.options import engine_options
from rolloutbus.cli.verbs import Verb


def context(line: str) -> typer.Context:
    class Said:
        args = line.split()
        command = Verb("up", callback=None)

    return cast("typer.Context", Said)


def test_arguments_of_sglang_keep_their_text_for_sglang_to_judge() -> None:
    line = "--sglang.mem-fraction-static 0.8 --sglang.ep_size=2 --sglang.enable_lora"
    options = engine_options(context(line), "sglang", ["slots=8"], tp=2, text=True)
    assert options == {
        "slots": 8,
        "text": True,
        "arguments": {
            "mem_fraction_static": "0.8",
            "ep_size": "2",
            "enable_lora": True,
            "tp_size": 2,
        },
    }


def test_without_any_nothing_is_added() -> None:
    assert engine_options(context(""), "fake", None) == {}


@pytest.mark.parametrize(
    ("engine", "line", "complaint"),
    [
        ("fake", "--sglang.a 1", "of --engine sglang"),
        ("sglang", "--sgleng.a 1", "no '--sgleng.a' here"),
        ("sglang", "stray", "no 'stray' here"),
        ("sglang", "--sglang. 1", "no '--sglang.' here"),
    ],
)
def test_an_option_of_nobody_is_refused(engine: str, line: str, complaint: str) -> None:
    with pytest.raises(typer.BadParameter, match=complaint):
        engine_options(context(line), engine, None)


def test_parallel_tensors_are_of_sglang_only() -> None:
    with pytest.raises(typer.BadParameter, match="of --engine sglang"):
        engine_options(context(""), "transformers", None, tp=2)
