import typing
from pathlib import Path

import msgspec
import pytest
import typer

from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.cli.options import parse_save_targets
from rolloutbus.engine_worker.settings import START_TIMEOUT_S, HostSettings, WorkerSettings
from rolloutbus.launcher.plan import FleetPlan
from rolloutbus.launcher.run_dir import RunDirectory
from rolloutbus.launcher.settings import FleetSettings, UpOptions, absolute_targets, engine_options
from rolloutbus.router.settings import PairSettings, RouterSettings
from rolloutbus.trainer_adapter.store.settings import StoreSettings


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"model": "/nowhere/at/all"}, "model: /nowhere/at/all is not a directory"),
        ({}, "model: the transformers engine needs"),
        ({"engine": "fake", "workers": 0}, "workers: at least 1"),
        ({"engine": "fake", "policy": "a b"}, "policy: 'a b' is no name"),
        ({"engine": "magic"}, "'magic' is not one of transformers, sglang, fake"),
        ({"engine": "fake", "transport": "udp"}, "'udp' is not one of ipc, tcp"),
        ({"engine": "fake", "engine_options": {"slotz": 1}}, "engine_options: .*slotz"),
        ({"engine": "fake", "engine_options": {"slots": "many"}}, "engine_options: .*slots"),
        (
            {"engine": "sglang", "engine_options": {"arguments": {"attn-dp-size": 2}}},
            "engine_options: .*attn_dp_size: 2 cannot be served: .* use dp_size alone",
        ),
        (
            {"engine_options": {"report_prefixes": True, "prefix_cache": False}},
            "engine_options: report_prefixes: with prefix_cache=false nothing is kept",
        ),
        ({"engine": "sglang", "engine_options": {"arguments": {"tp": "two"}}}, "tp_size: 'two'"),
        ({"engine": "sglang", "engine_options": {"arguments": 5}}, "engine_options: .*object"),
        ({"engine": "fake", "workers": "2"}, "workers: '2': Expected `int`"),
        ({"engine": "fake", "workers": True}, "workers: True: Expected `int`"),
        ({"engine": "fake", "start_timeout_s": -1}, "start_timeout_s: -1 is not above 0"),
        ({"engine": "fake", "start_timeout_s": float("nan")}, "start_timeout_s: nan is not"),
        ({"engine": "fake", "sessions_per_slot": 0}, "sessions_per_slot: 0 is not above 0"),
        ({"engine": "fake", "weights_dir": 3}, "weights_dir: 3 is not a path"),
        ({"engine": "fake", "keep_committed": 0}, "keep_committed: at least 1 is needed"),
        ({"engine": "fake", "keep_committed": 5, "store": False}, "keep_committed: .* no store"),
        ({"engine": "fake", "save_targets": {"a": 3}}, "save_targets: a: 3 is neither a path"),
        ({"engine": "fake", "engine_options": 5}, "engine_options: 5: Expected `object`"),
        ({"engine": "fake", "engine_options": {"foo": 1}}, "'foo' is no .*; it has slots, max_con"),
        ({"engine": "fake", "engine_options": {"slotz": 1}}, "did you mean slots"),
        ({"model": "Qwen/Qwen3-0.6B"}, "not in the local Hugging Face cache: download it first"),
        ({"engine": "fake", "address": "tcp://10.0.0.1:7777"}, "beyond this machine"),
        ({"engine": "fake", "gpus": [[0]]}, "gpus: 1 groups for 2 workers: name one for each"),
        ({"engine": "fake", "gpus": [[0], []]}, r"gpus: \[\] is no group of GPUs"),
        ({"engine": "fake", "gpus": [[0], [-1]]}, r"gpus: \[-1\] is no group of GPUs"),
        ({"engine": "fake", "gpus": [0, 1]}, "gpus: .*Expected `array`"),
        ({"engine": "fake", "env": {"A=B": "1"}}, "env: 'A=B' cannot be a variable"),
        ({"engine": "fake", "env": {"A": 1}}, "env: .*Expected `str`"),
        (
            {"engine": "fake", "gpus": [[0], [1]], "env": {"CUDA_VISIBLE_DEVICES": "0"}},
            "CUDA_VISIBLE_DEVICES follows from gpus",
        ),
        (
            {"engine": "sglang", "gpus": [[0], [1]], "engine_options": {"arguments": {"tp": 2}}},
            r"gpus: \[0\]: each engine of this fleet uses 2",
        ),
        (
            {
                "engine": "sglang",
                "gpus": [[0], [1]],
                "engine_options": {"arguments": {"base_gpu_id": 2}},
            },
            "gpus: with it, leave base_gpu_id out",
        ),
        ({"engine": "fake", "http_options": {"stall_s": 1}}, "no gateway without http"),
        ({"engine": "fake", "http": 0, "http_options": {"stal_s": 1}}, "did you mean stall_s"),
        ({"engine": "fake", "http": 0, "http_options": {"port": 1}}, "'port' is no option"),
        (
            {"engine": "fake", "http": 0, "http_options": {"chat_defaults": {"logprob": True}}},
            "chat_defaults: 'logprob' is no field of a chat; did you mean logprobs",
        ),
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


def test_a_model_of_the_local_hub_cache_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").touch()
    refs = tmp_path / "models--Qwen--Qwen3-0.6B" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    found = FleetSettings(model="Qwen/Qwen3-0.6B")

    assert found.model == str(snapshot)
    assert engine_options(found)["model"] == str(snapshot)


def test_a_place_to_save_to_may_be_a_path(tmp_path: Path) -> None:
    settings = FleetSettings(engine="fake", save_targets={"out": tmp_path, "hub": "s3://b"})
    assert absolute_targets(settings.save_targets) == {"out": str(tmp_path), "hub": "s3://b"}


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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"transport": "tcp"}, "the first of four ports"),
        ({"transport": "tcp", "address": "tcp://127.0.0.1:0"}, "the first of four ports"),
        ({"address": "ipc:///tmp/x"}, "neither an ipc address nor a backend"),
        ({"address": "tcp://127.0.0.1:7777"}, "say transport='tcp'"),
    ],
)
def test_a_standby_must_know_where_the_first_router_listens(
    options: dict[str, typing.Any], says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        FleetSettings(engine="fake", standby=True, **options)


def test_a_router_is_not_its_own_standby() -> None:
    own = "tcp://127.0.0.1:7777"
    for ports in ((own, "tcp://127.0.0.1:7778"), ("tcp://127.0.0.1:7778", own)):
        with pytest.raises(SettingsError, match="is this router's own address"):
            RouterSettings(*ports, pair=PairSettings(own, is_first=False))


def test_a_standby_over_tcp_takes_the_ports_after_those_of_the_first(tmp_path: Path) -> None:
    settings = FleetSettings(
        engine="fake", standby=True, transport="tcp", address="tcp://127.0.0.1:7777"
    )
    with RunDirectory(tmp_path / "run") as run_dir:
        plan = FleetPlan(settings, run_dir)
        plan.router()
        plan.standby()
        first, second = (
            msgspec.json.decode((run_dir.path / f"{name}.json").read_bytes(), type=RouterSettings)
            for name in ("router", "standby")
        )
    assert (first.frontend, first.backend) == ("tcp://127.0.0.1:7777", "tcp://127.0.0.1:7778")
    assert (second.frontend, second.backend) == ("tcp://127.0.0.1:7779", "tcp://127.0.0.1:7780")
    assert first.pair == PairSettings(second.frontend, is_first=True, other_backend=second.backend)
    assert second.pair == PairSettings(first.frontend, is_first=False, other_backend=first.backend)


@pytest.mark.parametrize(
    ("fleet_s", "host_s", "found_s"),
    [(1200.0, START_TIMEOUT_S, 1200.0), (5.0, START_TIMEOUT_S, START_TIMEOUT_S), (1200.0, 30, 30)],
)
def test_an_engine_may_take_as_long_to_start_as_its_fleet_waits_for_it(
    tmp_path: Path, fleet_s: float, host_s: float, found_s: float
) -> None:
    host = HostSettings(start_timeout_s=host_s)
    settings = FleetSettings(engine="fake", start_timeout_s=fleet_s, host=host)
    with RunDirectory(tmp_path / "run") as run_dir:
        worker = FleetPlan(settings, run_dir).worker_settings("w0", "ipc:///tmp/backend")
    assert worker.host.start_timeout_s == found_s


def test_all_members_of_a_fleet_have_its_lease(tmp_path: Path) -> None:
    lease = LeaseSettings(lease_s=30.0, holder_s=24.0, recovery_s=31.0)
    settings = FleetSettings(engine="fake", lease=lease)
    with RunDirectory(tmp_path / "run") as run_dir:
        plan = FleetPlan(settings, run_dir)
        plan.router()
        plan.store("ipc:///backend")
        plan.worker("w0", "ipc:///backend")
        router, store, worker = (
            (run_dir.path / f"{name}.json").read_bytes() for name in ("router", "store", "w0")
        )
    assert msgspec.json.decode(router, type=RouterSettings).leases == lease
    assert msgspec.json.decode(store, type=StoreSettings).lease == lease
    assert msgspec.json.decode(worker, type=WorkerSettings).lease == lease


@pytest.mark.parametrize(
    ("given", "device"), [({}, "cuda"), ({"device": "cpu"}, "cpu"), ({"device": "auto"}, "auto")]
)
def test_a_worker_that_is_given_a_gpu_does_not_compute_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], device: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (tmp_path / "config.json").touch()
    options = {"load_format": "dummy", **given}
    settings = FleetSettings(model=str(tmp_path), workers=1, gpus=[[1]], engine_options=options)
    with RunDirectory(tmp_path / "run") as run_dir:
        FleetPlan(settings, run_dir).worker("w0", "ipc:///backend")
        worker = msgspec.json.decode((run_dir.path / "w0.json").read_bytes(), type=WorkerSettings)
    assert worker.engine_options["device"] == device
