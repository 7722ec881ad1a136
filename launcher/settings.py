"""Settings of a local fleet: one value, checked before anything starts."""

import importlib
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args, get_origin, get_type_hints

import msgspec

from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.strict_calls import nearest
from rolloutbus.bus.transport.endpoints import is_local, is_wildcard, port_of, split_key
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.limits import MAX_MEMBERS
from rolloutbus.bus.wire.validation import check_name
from rolloutbus.engine_worker.engines.fake.settings import FakeSettings
from rolloutbus.engine_worker.engines.sglang.settings import SglangSettings, n_gpus, named
from rolloutbus.engine_worker.engines.transformers.settings import TransformersSettings
from rolloutbus.engine_worker.settings import START_TIMEOUT_S, HostSettings
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.launcher.engine_python import find_python
from rolloutbus.launcher.on_ray.launcher import RayLauncher
from rolloutbus.trainer_adapter.store.settings import KEEP_COMMITTED

EngineKind = Literal["transformers", "sglang", "fake"]
Transport = Literal["ipc", "tcp"]

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""What a model of the Hugging Face hub is called; a path may look the same."""
HTTP_OPTIONS = (
    *("served_model_name", "tool_format", "reasoning_format", "default_max_tokens"),
    *("chat_defaults", "max_body_bytes", "weights_root", "stall_s"),
)
"""Settings of a gateway that a fleet does not choose itself."""
GATEWAY_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
MAX_PORT = 65535
_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "transformers": ("torch", "transformers", "safetensors"),
    "sglang": ("sglang", "torch", "transformers", "safetensors"),
}
"""What the engines that run a model need; each is an extra of this distribution."""


class UpOptions(TypedDict, total=False):
    """The keyword arguments of `rolloutbus.up`; FleetSettings has their meanings and defaults."""

    name: str
    model: str | os.PathLike[str]
    workers: int
    engine: EngineKind
    engine_options: Mapping[str, Any]
    gpus: Sequence[Sequence[int]]
    env: Mapping[str, str]
    python: str | os.PathLike[str]
    policy: str
    store: bool
    weights_dir: str | os.PathLike[str]
    keep_committed: int
    save_targets: Mapping[str, str | os.PathLike[str]]
    profile_dir: str | os.PathLike[str]
    transport: Transport
    address: str
    backend: str
    run_dir: str | os.PathLike[str] | None
    keep_logs: bool
    dead_letters: str | os.PathLike[str]
    sessions_per_slot: float
    lease: LeaseSettings
    host: HostSettings
    start_timeout_s: float
    secure: str | os.PathLike[str] | None
    standby: bool
    tap: bool
    journal: str | os.PathLike[str]
    record: str | os.PathLike[str]
    http: int | None
    http_options: Mapping[str, Any]
    launcher: RayLauncher | None


class FleetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Router, weight store and workers: on this machine, or on the nodes of a Ray cluster."""

    name: str = ""
    """What commands know the fleet by, unique among this user's on this machine; empty: `default`,
    or `default-2` and so on if that runs."""
    model: str | os.PathLike[str] = ""
    """Directory with config.json, weights and tokenizer, or the name of a model that lies in the
    local Hugging Face cache; nothing is downloaded. The fake engine needs none."""
    workers: int = 2
    """They are named w0, w1, …"""
    engine: EngineKind = "transformers"
    engine_options: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """See `engine_worker.engines`: TransformersSettings, SglangSettings, FakeSettings."""
    gpus: Sequence[Sequence[int]] = ()
    """GPUs of each worker, as this process numbers them: w0 has the first group, w1 the second one,
    and there can be no more workers than groups. Empty: SGLang's engines take theirs one after the
    other, those of transformers the first one, or the CPU where there is none."""
    env: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    """Variables of the environment of workers and their engines, beside those of this process."""
    python: str | os.PathLike[str] = ""
    """Interpreter of workers, engines and the gateway, or its environment's directory; empty: this
    one. It needs the same rolloutbus, and their packages, which may be others than ours."""
    policy: str = "default"
    """Name of the policy whose weights they serve."""
    store: bool = True
    """Start a weight store, which weight updates need."""
    weights_dir: str | os.PathLike[str] = ""
    """Every version is also written to files here, and outlives the fleet: the next one begins with
    the last version that was committed. Empty: versions end with the fleet."""
    keep_committed: int = KEEP_COMMITTED
    """Committed versions of each policy whose bytes the store keeps, in `/dev/shm`; at least 1."""
    save_targets: Mapping[str, str | os.PathLike[str]] = msgspec.field(
        default_factory=dict[str, str | os.PathLike[str]]
    )
    """Where `save_weights` may write: name -> directory, or an address that the engine knows."""
    profile_dir: str | os.PathLike[str] = ""
    """Directory that profiles are written into; empty: none are."""
    transport: Transport = "ipc"
    """`ipc`: sockets in the run directory, for this user only; `tcp`: ports of the loopback."""
    address: str = ""
    """Where clients connect; empty: chosen by the transport."""
    backend: str = ""
    """Where workers and the store connect, those of other hosts too; empty: the port after that of
    `address` if that is beyond this machine, else chosen by the transport."""
    run_dir: str | os.PathLike[str] | None = None
    """An empty or new directory for sockets and logs; None: a temporary one."""
    keep_logs: bool = False
    """Leave the processes' logs behind, and the dead letters beside them."""
    dead_letters: str | os.PathLike[str] = ""
    """File that gets requests which killed engines, mode 0600, appended to; empty:
    `dead_letters.msgpack` among the logs."""
    sessions_per_slot: float = 2.0
    """Sessions that may be open at a worker for each of its slots; more are refused as `busy`."""
    lease: LeaseSettings = msgspec.field(default_factory=LeaseSettings)
    host: HostSettings = msgspec.field(default_factory=HostSettings)
    """When an engine host counts as dead, and how often it may die."""
    start_timeout_s: float = START_TIMEOUT_S
    """Until every worker has built its engine and joined; then, until the gateway serves. One that
    is started again gets as long, unless `host.start_timeout_s` says otherwise, and 600 s at least.
    """
    secure: str | os.PathLike[str] | None = None
    """A directory of keys, made if missing: every link is encrypted, over TCP, and only keys of
    its allow-list may connect. None: no keys, this machine only."""

    standby: bool = False
    """A second router stands by, and takes over when the first one does not come back. Over TCP it
    listens at the two ports after those of the first."""
    tap: bool = False
    """The router publishes everything that it routes, so that it can be recorded."""
    journal: str | os.PathLike[str] = ""
    """Directory that gets every turn of the router, for `replay --core`; empty: none are kept."""
    record: str | os.PathLike[str] = ""
    """Directory of a journal of all streams and commands, from the start; turns `tap` on. Empty:
    nothing is recorded."""
    http: int | None = None
    """Port of a gateway: OpenAI's and SGLang's endpoints over HTTP; 0: a free one. None: there is
    none."""
    http_options: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """More settings of the gateway: GatewaySettings, those of `HTTP_OPTIONS`."""
    launcher: RayLauncher | None = None
    """Who brings the processes up; None: this program, as its children. On Ray everything goes over
    TCP with keys: those of `secure`, or of this run alone."""

    def __post_init__(self) -> None:
        _check_types(self)
        if self.workers < 1:
            raise SettingsError("workers: at least 1 is needed")
        if self.keep_committed < 1:
            raise SettingsError("keep_committed: at least 1 is needed")
        if not self.store and self.keep_committed != KEEP_COMMITTED:
            raise SettingsError(
                "keep_committed: this fleet starts no store; tell `rolloutbus store` instead"
            )
        if (problem := check_name(self.policy)) is not None:
            raise SettingsError(f"policy: {problem.message}")
        check_not_too_many(self.workers)
        for name in ("start_timeout_s", "sessions_per_slot"):
            if not 0 < getattr(self, name) < math.inf:
                raise SettingsError(f"{name}: {getattr(self, name)} is not above 0 and finite")
        for value, kind in ((self.engine, EngineKind), (self.transport, Transport)):
            if value not in get_args(kind):
                raise SettingsError(f"{value!r} is not one of {', '.join(get_args(kind))}")
        has_keys = self.secure is not None or self.launcher is not None
        for endpoint in filter(None, (self.address, self.backend)):
            if not has_keys and not is_local(endpoint):
                raise SettingsError(f"{endpoint} is beyond this machine: say secure (--secure DIR)")
            if is_wildcard(endpoint):
                raise SettingsError(
                    f"{endpoint}: workers and clients connect to this address: name one of an "
                    "interface of this host"
                )
        _check_standby(self)
        if self.http is not None:
            if not 0 <= self.http <= MAX_PORT:
                raise SettingsError(f"http: {self.http} is no port; one is from 0 to {MAX_PORT}")
            if not self.python:
                _require_packages("http", GATEWAY_PACKAGES, "gateway")
        gateway_options(self)
        engine_options(self)
        check_gpus(self)
        check_env(self.env, has_gpus=bool(self.gpus or self.launcher))
        if self.python:
            msgspec.structs.force_setattr(self, "python", find_python(self.python))
        if self.engine in _PACKAGES:
            if not self.python:
                who = f"engine {self.engine}"
                _require_packages(who, _PACKAGES[self.engine], self.engine)
            msgspec.structs.force_setattr(self, "model", _model_directory(os.fspath(self.model)))
            _require_model(self, needs_files=not _has_format(self))


def check_not_too_many(workers: int) -> None:
    """SettingsError if no router could tell its clients of so many."""
    if workers > MAX_MEMBERS:
        raise SettingsError(f"workers: {workers} are too many; at most {MAX_MEMBERS}")


def _check_standby(settings: FleetSettings) -> None:
    """SettingsError unless the two routers can know beforehand where each of them listens."""
    if not settings.standby:
        return
    if settings.launcher is not None:
        raise SettingsError("standby: on Ray both routers would be on one node: leave it out")
    is_tcp = settings.transport != "ipc" or settings.secure is not None
    if settings.address.startswith("ipc:") or settings.backend:
        raise SettingsError("standby: with it, name neither an ipc address nor a backend")
    if is_tcp and not (settings.address and port_of(split_key(settings.address)[0])):
        raise SettingsError(
            "standby: over TCP say address='tcp://HOST:PORT' (--address), the first of four ports: "
            "the first router takes two, and the standby two"
        )
    if not is_tcp and settings.address:
        raise SettingsError("standby: with an address say transport='tcp' (--transport), or secure")


def packages_of(settings: FleetSettings) -> tuple[str, ...]:
    """Packages that engine and gateway need besides rolloutbus."""
    gateway = () if settings.http is None else GATEWAY_PACKAGES
    return (*_PACKAGES.get(settings.engine, ()), *gateway)


def absolute_targets(targets: Mapping[str, str | os.PathLike[str]]) -> dict[str, str]:
    """The places of `save_targets`, for processes that may run elsewhere."""
    places = {name: os.fspath(place) for name, place in targets.items()}
    return {
        name: place if "://" in place else str(Path(place).absolute())
        for name, place in places.items()
    }


def gateway_options(settings: FleetSettings) -> dict[str, Any]:
    """The settings that the gateway is given beyond those of every fleet's.

    Raises:
        SettingsError: one is unknown or has no valid value, or there is no gateway.
    """
    options = dict(settings.http_options)
    if options and settings.http is None:
        raise SettingsError("http_options: there is no gateway without http, its port")
    for name in options.keys() - set(HTTP_OPTIONS):
        meant = nearest(str(name), HTTP_OPTIONS)
        raise SettingsError(
            f"http_options: {str(name)[:64]!r} is no option of the gateway; "
            + (f"did you mean {meant}? " if meant else "")
            + f"it has {', '.join(HTTP_OPTIONS)}"
        )
    try:
        msgspec.convert({"router": "", **options}, GatewaySettings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"http_options: {error}") from error
    return options


CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"


def n_gpus_of(settings: FleetSettings) -> int:
    """GPUs that each engine uses; 0: any number, none as well."""
    match settings.engine:
        case "sglang":
            return n_gpus(named(settings.engine_options.get("arguments", {})))
        case "transformers":
            return 1
        case "fake":
            return 0


def check_gpus(settings: FleetSettings) -> None:
    """SettingsError unless each worker has a group of as many GPUs as its engine uses."""
    if not settings.gpus:
        return
    if settings.launcher is not None:
        raise SettingsError("gpus: Ray chooses the GPUs of each worker: leave gpus out")
    if len(settings.gpus) < settings.workers:
        raise SettingsError(
            f"gpus: {len(settings.gpus)} groups for {settings.workers} workers: name one for each"
        )
    if "base_gpu_id" in named(settings.engine_options.get("arguments", {})):
        raise SettingsError("gpus: with it, leave base_gpu_id out: they say the same")
    for group in settings.gpus:
        check_group(group, settings)


def check_group(group: Sequence[int], settings: FleetSettings) -> None:
    """SettingsError unless an engine can use these GPUs."""
    n_needed = n_gpus_of(settings)
    if not group or min(group) < 0 or len(set(group)) < len(group):
        raise SettingsError(f"gpus: {list(group)} is no group of GPUs, such as [0, 1]")
    if n_needed and len(group) != n_needed:
        raise SettingsError(
            f"gpus: {list(group)}: each engine of this fleet uses {n_needed}, no more and no fewer"
        )


def check_env(env: Mapping[str, str], *, has_gpus: bool) -> None:
    """SettingsError unless these can be variables of an environment."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise SettingsError(f"env: {name!r:.80} cannot be a variable")
    if has_gpus and CUDA_DEVICES in env:
        raise SettingsError(f"env: {CUDA_DEVICES} follows from gpus, or from Ray: leave it out")


def engine_options(settings: FleetSettings, n_workers: int = 0) -> dict[str, Any]:
    """The settings of each worker's engine, as JSON knows them.

    Args:
        settings: of the fleet.
        n_workers: that share this machine's cores; 0: those that the fleet starts with.

    Raises:
        SettingsError: an option is unknown or has no valid value.
    """
    options = dict(settings.engine_options)
    if settings.engine in _PACKAGES:
        options["model"] = str(Path(settings.model).absolute())
    match settings.engine:
        case "fake":
            kind = FakeSettings
        case "sglang":
            kind = SglangSettings
        case "transformers":
            kind = TransformersSettings
            # Engines that each use all cores slow each other down many times over.
            options.setdefault(
                "threads", max(1, len(os.sched_getaffinity(0)) // (n_workers or settings.workers))
            )
    known = [name for name in kind.__struct_fields__ if name != "model"]
    for name in options.keys() - {"model", *known}:
        meant = nearest(str(name), known)
        raise SettingsError(
            f"engine_options: {str(name)[:64]!r} is no option of the {settings.engine} engine; "
            + (f"did you mean {meant}? " if meant else "")
            + f"it has {', '.join(known)}"
        )
    try:
        msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = where.removesuffix("`")
        at = f"{name}: " if name else ""
        raise SettingsError(f"engine_options: {at}{what}") from error
    return options


def _require_packages(who: str, packages: Sequence[str], extra: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(f"{who} needs {', '.join(missing)}: pip install rolloutbus[{extra}]")


def _check_types(settings: FleetSettings) -> None:
    """Structs do not look at what they are built from; here people build one."""
    for name, annotation in get_type_hints(FleetSettings).items():
        value = getattr(settings, name)
        is_path = "PathLike" in str(annotation) and name != "save_targets"
        is_none = value is None and type(None) in get_args(annotation)
        if is_path and not is_none and not isinstance(value, str | os.PathLike):
            raise SettingsError(f"{name}: {value!r} is not a path")
        if is_path or get_origin(annotation) is Literal:
            continue
        try:
            msgspec.convert(value, Mapping[str, Any] if name == "save_targets" else annotation)
        except msgspec.ValidationError as error:
            raise SettingsError(f"{name}: {value!r:.80}: {error}") from error
    for name, place in dict[str, Any](settings.save_targets).items():
        if not isinstance(place, str | os.PathLike):
            raise SettingsError(f"save_targets: {name}: {place!r} is neither a path nor an address")


def _model_directory(model: str) -> str:
    """The directory of a model; of one that is named as on the Hugging Face hub, in its cache."""
    if Path(model).exists() or HUB_NAME.fullmatch(model) is None:
        return model
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        hub = None
    if hub is not None:
        try:
            return str(hub.snapshot_download(model, local_files_only=True))
        except (OSError, ValueError):  # what it raises for one that is not there
            pass
    raise SettingsError(
        f"model: {model} is not a directory, and not in the local Hugging Face cache: "
        f"download it first (hf download {model}), or give the path of a directory"
    )


def _has_format(settings: FleetSettings) -> bool:
    """Whether the engine is told to read something else than safetensors files, or nothing."""
    if settings.engine == "transformers":
        return settings.engine_options.get("load_format", "safetensors") != "safetensors"
    # Other formats, and weights made up at the start, are for SGLang to judge.
    return "load_format" in named(settings.engine_options.get("arguments", {}))


def _require_model(settings: FleetSettings, *, needs_files: bool) -> None:
    engine, model = settings.engine, os.fspath(settings.model)
    if not model:
        raise SettingsError(f"model: the {engine} engine needs the path of a model directory")
    if not Path(model).is_dir():
        raise SettingsError(f"model: {model} is not a directory")
    if not (Path(model) / "config.json").is_file():
        raise SettingsError(f"model: {model} holds no model: it has no config.json")
    if needs_files and not any(Path(model).glob("*.safetensors")):
        option = "engine_options" if engine == "transformers" else "engine_options['arguments']"
        raise SettingsError(
            f"model: {model} has no .safetensors file, and other formats are not read; if a "
            f"trainer is to bring the weights, say load_format='dummy' in {option}"
        )
