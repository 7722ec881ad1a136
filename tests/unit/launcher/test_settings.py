import typing
from pathlib import Path

import msgspec
import pytest
import typer

from bus.errors import SettingsError
from launcher.options import parse_save_targets
from launcher.settings import FleetSettings, UpOptions, absolute_targets, engine_options


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"model": "/nowhere/at/all"}, "model: /nowhere/at/all is not a directory"),
        ({}, "model: the transformers engine needs"),
        ({"engine": "fake", "workers": 0}, "workers: at least 1"),
        ({"engine": "magic"}, "'magic' is not one of transformers, sglang, fake"),
        ({"engine": "fake", "transport": "udp"}, "'udp' is not one of ipc, tcp"),
        ({"engine": "fake", "engine_options": {"slotz": 1}}, "engine_options: .*slotz"),
        ({"engine": "fake", "engine_options": {"slots": "many"}}, "engine_options: .*slots"),
        (
            {"engine": "sglang", "engine_options": {"arguments": {"dp-size": 2}}},
            "engine_options: .*dp_size: 2 cannot be served: .* start more workers",
        ),
        ({"engine": "sglang", "engine_options": {"arguments": {"tp": "two"}}}, "tp_size: 'two'"),
        ({"engine": "sglang", "engine_options": {"arguments": 5}}, "engine_options: .*object"),
        ({"engine": "fake", "address": "tcp://10.0.0.1:7777"}, "beyond this machine"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(
    options: UpOptions, complaint: str
) -> None:
    with pytest.raises(SettingsError, match=complaint):
        FleetSettings(**options)


def test_places_to_save_to_are_the_same_wherever_a_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = parse_save_targets(["models=out/models", "cloud=s3://bucket/x=1"])

    assert absolute_targets(told) == {
        "models": str(tmp_path / "out/models"),
        "cloud": "s3://bucket/x=1",
    }


@pytest.mark.parametrize("option", ["models", "=out", "models="])
def test_a_place_to_save_to_needs_a_name(option: str) -> None:
    with pytest.raises(typer.BadParameter, match="NAME=PLACE"):
        parse_save_targets([option])


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"it has no config\.json"):
        FleetSettings(model=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"has no \.safetensors file"):
        FleetSettings(model=tmp_path)


def test_engines_share_the_cores_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    shared = engine_options(FleetSettings(model=tmp_path, workers=10_000))
    told = engine_options(FleetSettings(model=tmp_path, engine_options={"threads": 7}))
    assert shared == {"threads": 1, "model": str(tmp_path)}
    assert told == {"threads": 7, "model": str(tmp_path)}


def test_arguments_of_up_are_the_settings_of_a_fleet() -> None:
    fields = {field.name for field in msgspec.structs.fields(FleetSettings)}
    assert set(typing.get_type_hints(UpOptions)) == fields
