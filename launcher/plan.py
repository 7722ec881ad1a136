"""From the settings of a fleet to the processes that make it up, and their keys."""

import dataclasses
import os
import secrets
import site
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rolloutbus.bus.actor.child import ProcessSpec
from rolloutbus.bus.security.key_files import (
    edit_allow_list,
    is_there,
    public_file,
    read_key_pair,
    write_key_pair,
    write_public_key,
)
from rolloutbus.bus.security.keys import KeyPair, SecuritySettings
from rolloutbus.bus.security.principals import Principal, Role
from rolloutbus.bus.security.zmq_curve import new_key_pair
from rolloutbus.bus.transport.endpoints import bracketed, is_local, port_of, split_key
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.engine_worker.engines.sglang.settings import first_gpu, named
from rolloutbus.engine_worker.settings import START_TIMEOUT_S, HostSettings, WorkerSettings
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.launcher.journaled_router import JournaledRouterSettings
from rolloutbus.launcher.run_dir import RunDirectory
from rolloutbus.launcher.scaling import WorkerPlace
from rolloutbus.launcher.settings import (
    CUDA_DEVICES,
    FleetSettings,
    absolute_targets,
    check_env,
    check_group,
    engine_options,
    gateway_options,
    n_gpus_of,
)
from rolloutbus.replay.settings import RecorderSettings
from rolloutbus.router.settings import PairSettings, RouterSettings
from rolloutbus.trainer_adapter.store.settings import StoreSettings

ALLOW_LIST = "allow.json"
ROUTER = "router"
STANDBY = "standby"
OPERATOR = "operator"
"""The key that the commands of `rolloutbus` use, and clients that have none of their own."""


class FleetKeys:
    """A directory of mode 0700 with a key file for each actor, and the allow-list."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()

    @property
    def operator(self) -> Path:
        """Key file of an admin."""
        return self._file(OPERATOR)

    def make(self, members: dict[str, Role]) -> None:
        """Make what is missing, for these actors of the fleet, its router and its operator.

        An allow-list that is there already is only added to: who was revoked, and still has a key
        file, does not come back.

        Raises:
            SettingsError: the directory cannot be written, or holds something else.
        """
        try:
            private_dir(self._directory)
        except OSError as error:
            raise SettingsError(f"cannot use {self._directory}: {error.strerror}") from error
        path = self._directory / ALLOW_LIST
        is_new_list = not is_there(path)
        _, router = self._pair(ROUTER)
        write_public_key(self._router_pub, router.public)
        everybody: dict[str, Role] = {**members, OPERATOR: "admin"}
        added: list[Principal] = []
        for name, role in everybody.items():
            is_new_key, pair = self._pair(name)
            if is_new_key or is_new_list:
                added.append(Principal(pair.public, name, role))

        def add(known: Sequence[Principal]) -> list[Principal]:
            return [*known, *added]

        if added:
            edit_allow_list(path, add)

    def security_of(self, name: str) -> SecuritySettings:
        """Security settings of one actor."""
        return SecuritySettings(
            key_file=str(self._file(name)),
            server_key_file=str(self._router_pub),
            allow_list=str(self._directory / ALLOW_LIST),
        )

    def files_of(self, name: str) -> dict[str, bytes]:
        """Content by file name of all that `security_of` names, for another machine."""
        files = (self._file(name), self._router_pub, self._directory / ALLOW_LIST)
        return {file.name: file.read_bytes() for file in files}

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write what `files_of` has returned on another machine; only this user may read it."""
        private_dir(self._directory)
        for name, content in files.items():
            file = self._directory / name
            file.touch(mode=0o600)
            file.write_bytes(content)

    @property
    def _router_pub(self) -> Path:
        return public_file(self._file(ROUTER))

    def _pair(self, name: str) -> tuple[bool, KeyPair]:
        """(whether it had to be made, the pair)."""
        file = self._file(name)
        if is_there(file):
            return False, read_key_pair(file)
        pair = new_key_pair(name)
        write_key_pair(file, pair)
        return True, pair

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.key"


STORE = "store"
GATEWAY = "gateway"
RECORDER = "recorder"
LEDGER = ".ledger"
"""In the directory of the weights' files, among which no name begins with a dot."""
DEAD_LETTERS = "dead_letters.msgpack"
"""In the directory of the logs, unless another file is named."""
READY_TIMEOUT_S = 30.0
"""Of what has no engine to build."""
WORKER_GRACE_S = 12.0
"""A worker gives its engine host 8 s to leave."""

_WORKER: Role = "worker"
LOOPBACK = "127.0.0.1"
_GPUS = Path("/proc/driver/nvidia/gpus")


class FleetPlan:
    """Every process of one fleet."""

    ready_timeout_s = READY_TIMEOUT_S
    """Of what has no engine to build."""

    def __init__(
        self, settings: FleetSettings, run_dir: RunDirectory, host: str = LOOPBACK
    ) -> None:
        """Plan a fleet.

        Args:
            settings: of the fleet.
            run_dir: gets settings files, logs and Unix sockets.
            host: address of this machine's interface that the router listens on; one that others
                can reach needs keys.
        """
        self._settings = settings
        self._run_dir = run_dir
        self._host = host
        weights_dir = settings.weights_dir
        self._weights_dir = str(Path(weights_dir).absolute()) if weights_dir else ""
        # A store's record names the fleet. Without a store its clients would know it by no name at
        # first, and the next fleet at the address would go on with what this one has sampled.
        self._fleet = "" if settings.store else secrets.token_hex(16)
        self.places: dict[str, WorkerPlace] = {}
        """Workers that run or are to be started, by name."""
        self._keys = FleetKeys(Path(settings.secure)) if settings.secure is not None else None
        self.take_places(settings.workers)

    def take_places(
        self, n: int, *, gpus: Sequence[int] = (), env: Mapping[str, str] | None = None
    ) -> list[WorkerPlace]:
        """Places for so many more workers: the lowest free numbers, with the GPUs of each number.

        Args:
            n: how many.
            gpus: of each; empty: those of its number.
            env: variables beside those of all workers.

        Raises:
            SettingsError: there are not enough GPUs, or a value is none; no place is taken.
        """
        if gpus:
            check_group(gpus, self._settings)
        check_env(env or {}, has_gpus=bool(gpus or self._settings.gpus or self._is_on_ray))
        free = self.free_numbers(n)
        if not gpus:
            self._require_gpus(free)
        taken: list[WorkerPlace] = []
        for number in free:
            group = gpus or (self._settings.gpus[number] if self._settings.gpus else ())
            variables = {**self._settings.env, **(env or {})}
            if group:
                visible_gpus(group)
            taken.append(WorkerPlace(f"w{number}", number, tuple(group), variables))
        self.places.update({place.name: place for place in taken})
        if self._keys is not None:
            self._keys.make({STORE: "store", **dict.fromkeys(self.places, _WORKER)})
        return taken

    def free_numbers(self, n: int) -> list[int]:
        """The lowest numbers that no worker has."""
        numbers = range(len(self.places) + n)
        return [number for number in numbers if f"w{number}" not in self.places][:n]

    def give_back(self, name: str) -> None:
        """The worker is gone for good: its number and its GPUs are free."""
        self.places.pop(name, None)

    def _require_gpus(self, numbers: Collection[int]) -> None:
        last, groups = max(numbers, default=-1), self._settings.gpus
        if groups and last >= len(groups):
            raise SettingsError(
                f"no GPUs are left for w{last}: `gpus` names {len(groups)} groups, one for each "
                "worker; name more, or say which with add_worker(gpus=…)"
            )
        n_here = 0 if self._is_on_ray else n_visible_gpus()
        if groups or self._settings.engine != "sglang" or not n_here or self._is_on_cpu:
            return
        n_each = n_gpus_of(self._settings)
        first = first_gpu(named(self._settings.engine_options.get("arguments", {})), last)
        if first + n_each > n_here:
            raise SettingsError(
                f"no GPUs are left for w{last}: it would have those from {first} to "
                f"{first + n_each - 1}, and this machine has {n_here}"
            )

    @property
    def _is_on_ray(self) -> bool:
        return self._settings.launcher is not None

    @property
    def _is_on_cpu(self) -> bool:
        return self._settings.engine_options.get("device") == "cpu"

    @property
    def key_file(self) -> str:
        """Key file for clients; empty if the fleet asks for no keys."""
        return str(self._keys.operator) if self._keys is not None else ""

    def key_files(self, name: str) -> dict[str, bytes]:
        """What an actor needs of the keys on another machine; see `FleetKeys.files_of`."""
        return self._keys.files_of(name) if self._keys is not None else {}

    def router(self, endpoints: dict[str, str] | None = None) -> ProcessSpec:
        """The router.

        Args:
            endpoints: of an earlier incarnation; they stay, also where ports were chosen freely.
        """
        known = endpoints or {}
        if not self._settings.standby:
            return self._router_of(ROUTER, known, None)
        return self._router_of(ROUTER, known, self._pair_with(STANDBY))

    def standby(self, endpoints: dict[str, str] | None = None) -> ProcessSpec:
        """The router that stands by; `endpoints` as of `router`."""
        return self._router_of(STANDBY, endpoints or {}, self._pair_with(ROUTER))

    def _pair_with(self, other: str) -> PairSettings:
        return PairSettings(
            self._router_endpoint("frontend", other),
            is_first=other == STANDBY,
            other_backend=self._router_endpoint("backend", other),
        )

    def _router_of(
        self, name: str, known: dict[str, str], pair: PairSettings | None
    ) -> ProcessSpec:
        def listens(what: str) -> str:
            return known.get(what) or self._router_endpoint(what, name)

        settings = RouterSettings(
            frontend=listens("frontend"),
            backend=listens("backend"),
            leases=self._settings.lease,
            sessions_per_slot=self._settings.sessions_per_slot,
            expected_workers=dict.fromkeys(self.places, self._settings.policy),
            fleet=self._fleet,
            dead_letters=self._dead_letters(),
            tap=listens("tap") if self._has_tap else "",
            pair=pair,
            security=self._security(ROUTER),
            exit_with_parent=True,
        )
        if not self._settings.journal:
            return self._spec(name, "rolloutbus.router", settings, ready_timeout_s=READY_TIMEOUT_S)
        journal = Path(self._settings.journal).absolute()
        # A journal has one writer.
        place = journal if name == ROUTER else journal.with_name(f"{journal.name}-{name}")
        return self._spec(
            name,
            "rolloutbus.launcher.journaled_router",
            JournaledRouterSettings(settings, str(place)),
            ready_timeout_s=READY_TIMEOUT_S,
        )

    def store(self, backend: str, endpoints: dict[str, str] | None = None) -> ProcessSpec:
        """The weight store, which joins at `backend`.

        Args:
            backend: of the router.
            endpoints: of an earlier incarnation: workers ask there again for what they began to
                pull.
        """
        bulk = (endpoints or {}).get("bulk", "").partition("#")[0]
        # What is committed has to be remembered for as long as the files live.
        ledger = (
            Path(self._weights_dir, LEDGER) if self._weights_dir else self._run_dir.path / STORE
        )
        settings = StoreSettings(
            router=backend,
            directory=str(ledger),
            bulk=bulk or self._member_endpoint("bulk"),
            lease=self._settings.lease,
            keep_committed=self._settings.keep_committed,
            disk=self._weights_dir,
            security=self._security(STORE),
            exit_with_parent=True,
        )
        return self._spec(
            STORE, "rolloutbus.trainer_adapter.store", settings, ready_timeout_s=READY_TIMEOUT_S
        )

    def recorder(self, router: str) -> ProcessSpec:
        """What writes the journal of `FleetSettings.record`.

        Args:
            router: where clients connect.
        """
        settings = RecorderSettings(
            router=router,
            directory=str(Path(self._settings.record).absolute()),
            key_file=self.key_file,
            exit_with_parent=True,
        )
        spec = self._spec(RECORDER, "rolloutbus.replay", settings, ready_timeout_s=READY_TIMEOUT_S)
        return dataclasses.replace(spec, may_leave=True)

    def gateway(self, router: str, endpoints: dict[str, str] | None = None) -> ProcessSpec:
        """The HTTP gateway.

        Args:
            router: where clients connect.
            endpoints: of an earlier incarnation, whose port stays.
        """
        port = urlsplit((endpoints or {}).get("http", "")).port or self._settings.http or 0
        model = os.fspath(self._settings.model)
        settings = GatewaySettings(
            router=router,
            key_file=self.key_file,
            port=port,
            model_path=str(Path(model).absolute()) if model else "",
            exit_with_parent=True,
            **gateway_options(self._settings),
        )
        return self._spec(
            GATEWAY,
            "rolloutbus.gateway",
            settings,
            ready_timeout_s=self._settings.start_timeout_s,
            interpreter=self._settings.python,
        )

    def worker(self, name: str, backend: str) -> ProcessSpec:
        """One worker, which has a place, and joins at `backend`."""
        place = self.places[name]
        settings = self.worker_settings(name, backend)
        options = self._on_its_gpus(place, settings.engine_options)
        spec = self._spec(
            name,
            "rolloutbus.engine_worker",
            msgspec.structs.replace(settings, engine_options=options),
            interpreter=self._settings.python,
        )
        variables = {**(spec.environment or {}), **place.env}
        if place.gpus:
            variables[CUDA_DEVICES] = ",".join(visible_gpus(place.gpus))
        return dataclasses.replace(
            spec, environment=variables, grace_s=WORKER_GRACE_S, may_leave=True
        )

    def worker_settings(self, name: str, backend: str) -> WorkerSettings:
        """Settings of a worker whose engine takes the first GPUs that it sees."""
        profile_dir = self._settings.profile_dir
        return WorkerSettings(
            name=name,
            router=backend,
            policy=self._settings.policy,
            stream=self._member_endpoint(f"{name}.stream"),
            weights_root=self._weights_dir,
            save_targets=absolute_targets(self._settings.save_targets),
            profile_dir=str(profile_dir and Path(profile_dir).absolute()),
            engine=self._settings.engine,
            engine_options=engine_options(self._settings, len(self.places)),
            lease=self._settings.lease,
            security=self._security(name),
            host=_host_settings(self._settings),
            exit_with_parent=True,
        )

    def _on_its_gpus(self, place: WorkerPlace, options: dict[str, Any]) -> dict[str, Any]:
        if self._settings.engine == "transformers" and place.gpus:
            # By itself it would take the CPU where torch finds no GPU, without a word.
            return {"device": "cuda", **options}
        # An engine with a group of its own sees no other GPUs.
        if self._settings.engine != "sglang" or self._is_on_cpu or place.gpus:
            return options
        # Each engine takes the GPUs after those of the one before.
        arguments = named(options.get("arguments", {}))
        first = first_gpu(arguments, place.number)
        return {**options, "arguments": {**arguments, "base_gpu_id": first}}

    def _spec(
        self,
        name: str,
        module: str,
        settings: msgspec.Struct,
        *,
        ready_timeout_s: float = 0.0,
        interpreter: str | os.PathLike[str] = "",
    ) -> ProcessSpec:
        # In a file: a list of processes should be readable.
        file = self._run_dir.path / f"{name}.json"
        file.write_bytes(msgspec.json.encode(settings))
        return ProcessSpec(
            name,
            [*python(module, interpreter), "--settings-file", str(file)],
            self._run_dir.logs / f"{name}.log",
            environment(),
            ready_timeout_s,
        )

    @property
    def _has_tap(self) -> bool:
        return self._settings.tap or bool(self._settings.record)

    def _dead_letters(self) -> str:
        given = self._settings.dead_letters
        # Beside the logs, and so left behind with them.
        return str(Path(given).absolute() if given else self._run_dir.logs / DEAD_LETTERS)

    def _router_endpoint(self, name: str, router: str = ROUTER) -> str:
        """Where a router listens, on the host of `address` if that is beyond this machine.

        The standby listens at the ports after those of the first router.
        """
        is_first, given = router == ROUTER, self._settings
        chosen = {"frontend": given.address, "backend": given.backend}.get(name)
        if is_first and chosen:
            return chosen
        if self._is_ipc:
            return self._run_dir.ipc(name if is_first else f"{router}-{name}")
        address, _ = split_key(given.address)
        if not address or (is_local(address) and not given.standby):
            return f"tcp://{self._host}:0"
        host = bracketed(urlsplit(address).hostname or "")
        # Other hosts, and their firewalls, must know the ports that workers and clients join at.
        first, step = port_of(address), {"frontend": 0, "backend": 1}.get(name)
        port = 0 if step is None or not first else first + step + (0 if is_first else 2)
        return f"tcp://{host}:{port}"

    def _member_endpoint(self, name: str) -> str:
        """Where a member listens; empty: on the interface that faces the router."""
        return self._run_dir.ipc(name) if self._is_ipc else ""

    @property
    def _is_ipc(self) -> bool:
        return self._settings.transport == "ipc" and self._keys is None

    def _security(self, name: str) -> SecuritySettings | None:
        return self._keys.security_of(name) if self._keys is not None else None


def python(module: str, interpreter: str | os.PathLike[str] = "") -> list[str]:
    """Returns the command that runs one of our modules with an interpreter; see `environment`."""
    return [os.fspath(interpreter) or sys.executable, "-m", module]


def environment() -> dict[str, str]:
    """Returns the environment of the fleet's processes, in which they import this very code.

    Without the safe path, a folder of our name where the user happens to be would be run instead.
    """
    variables = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    root = str(Path(__file__).absolute().parents[2])
    if root not in {*site.getsitepackages(), site.getusersitepackages()}:
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, [root, os.environ.get("PYTHONPATH")])
        )
    return variables


def visible_gpus(gpus: Sequence[int]) -> list[str]:
    """The names, for CUDA_VISIBLE_DEVICES, of GPUs that this process numbers so.

    Raises:
        SettingsError: this process sees fewer.
    """
    mine = os.environ.get(CUDA_DEVICES)
    if mine is None:
        n_here = n_visible_gpus()
        if n_here and max(gpus) >= n_here:
            raise SettingsError(f"gpus: there is no GPU {max(gpus)}: this machine has {n_here}")
        return [str(gpu) for gpu in gpus]
    names = [name.strip() for name in mine.split(",") if name.strip()]
    if max(gpus) >= len(names):
        why = f"{CUDA_DEVICES} lets this process see {len(names)}"
        raise SettingsError(f"gpus: there is no GPU {max(gpus)}: {why}")
    return [names[gpu] for gpu in gpus]


def n_visible_gpus() -> int:
    """Counts the NVIDIA GPUs that this process sees; 0 also where that cannot be found out."""
    mine = os.environ.get(CUDA_DEVICES)
    if mine is not None:
        return len([name for name in mine.split(",") if name.strip()])
    return sum(1 for _ in _GPUS.iterdir()) if _GPUS.is_dir() else 0


def private_dir(path: Path) -> Path:
    """`path`, made if needed and closed to other users (mode 0700)."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def _host_settings(settings: FleetSettings) -> HostSettings:
    """When an engine host counts as dead; a start may take as long as the fleet waits for it."""
    host = settings.host
    if host.start_timeout_s != START_TIMEOUT_S:
        return host
    patience_s = max(host.start_timeout_s, settings.start_timeout_s)
    return msgspec.structs.replace(host, start_timeout_s=patience_s)
