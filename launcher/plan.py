"""From the settings of a fleet to the processes that make it up, and their keys."""

import dataclasses
import os
import secrets
import site
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rolloutbus.bus.actor.child import ProcessSpec
from rolloutbus.bus.security.key_files import (
    edit_allow_list,
    public_file,
    read_key_pair,
    write_key_pair,
    write_public_key,
)
from rolloutbus.bus.security.keys import KeyPair, SecuritySettings
from rolloutbus.bus.security.principals import Principal, Role
from rolloutbus.bus.security.zmq_curve import new_key_pair
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.engine_worker.engines.sglang.settings import first_gpu, named
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.launcher.journaled_router import JournaledRouterSettings
from rolloutbus.launcher.run_dir import RunDirectory
from rolloutbus.launcher.settings import (
    FleetSettings,
    absolute_targets,
    engine_options,
    gateway_options,
)
from rolloutbus.replay.settings import RecorderSettings
from rolloutbus.router.settings import RouterSettings
from rolloutbus.trainer_adapter.store.settings import StoreSettings

ALLOW_LIST = "allow.json"
ROUTER = "router"
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
        is_new_list = not path.exists()
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

    @property
    def _router_pub(self) -> Path:
        return public_file(self._file(ROUTER))

    def _pair(self, name: str) -> tuple[bool, KeyPair]:
        """(whether it had to be made, the pair)."""
        file = self._file(name)
        if file.exists():
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
_ANY_PORT = "tcp://127.0.0.1:0"


class FleetPlan:
    """Every process of one fleet."""

    def __init__(self, settings: FleetSettings, run_dir: RunDirectory) -> None:
        self._settings = settings
        self._run_dir = run_dir
        weights_dir = settings.weights_dir
        self._weights_dir = str(Path(weights_dir).absolute()) if weights_dir else ""
        # A store's record names the fleet. Without a store its clients would know it by no name at
        # first, and the next fleet at the address would go on with what this one has sampled.
        self._fleet = "" if settings.store else secrets.token_hex(16)
        self.worker_names = [f"w{index}" for index in range(settings.workers)]
        self._keys = FleetKeys(Path(settings.secure)) if settings.secure is not None else None
        if self._keys is not None:
            self._keys.make({STORE: "store", **dict.fromkeys(self.worker_names, _WORKER)})

    @property
    def key_file(self) -> str:
        """Key file for clients; empty if the fleet asks for no keys."""
        return str(self._keys.operator) if self._keys is not None else ""

    def router(self, endpoints: dict[str, str] | None = None) -> ProcessSpec:
        """The router.

        Args:
            endpoints: of an earlier incarnation; they stay, also where ports were chosen freely.
        """
        known = endpoints or {}
        settings = RouterSettings(
            frontend=known.get("frontend") or self._settings.address or self._endpoint("frontend"),
            backend=known.get("backend") or self._endpoint("backend"),
            leases=self._settings.lease,
            sessions_per_slot=self._settings.sessions_per_slot,
            expected_workers=dict.fromkeys(self.worker_names, self._settings.policy),
            fleet=self._fleet,
            dead_letters=self._dead_letters(),
            tap=(known.get("tap") or self._endpoint("tap")) if self._has_tap else "",
            security=self._security(ROUTER),
            exit_with_parent=True,
        )
        if not self._settings.journal:
            return self._spec(
                ROUTER, "rolloutbus.router", settings, ready_timeout_s=READY_TIMEOUT_S
            )
        journal = str(Path(self._settings.journal).absolute())
        journaled = JournaledRouterSettings(settings, journal)
        return self._spec(
            ROUTER,
            "rolloutbus.launcher.journaled_router",
            journaled,
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
            bulk=bulk or self._endpoint("bulk"),
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
            ready_timeout_s=READY_TIMEOUT_S,
            interpreter=self._settings.python,
        )

    def worker(self, name: str, backend: str) -> ProcessSpec:
        """One worker, which joins at `backend`."""
        profile_dir = self._settings.profile_dir
        settings = WorkerSettings(
            name=name,
            router=backend,
            policy=self._settings.policy,
            stream=self._endpoint(f"{name}.stream"),
            weights_root=self._weights_dir,
            save_targets=absolute_targets(self._settings.save_targets),
            profile_dir=str(profile_dir and Path(profile_dir).absolute()),
            engine=self._settings.engine,
            engine_options=self._engine_options(name),
            lease=self._settings.lease,
            security=self._security(name),
            host=self._settings.host,
            exit_with_parent=True,
        )
        spec = self._spec(
            name, "rolloutbus.engine_worker", settings, interpreter=self._settings.python
        )
        return dataclasses.replace(spec, grace_s=WORKER_GRACE_S, may_leave=True)

    def _engine_options(self, name: str) -> dict[str, Any]:
        options = engine_options(self._settings)
        if self._settings.engine != "sglang" or options.get("device") == "cpu":
            return options
        # Each engine takes the GPUs after those of the one before.
        arguments = named(options.get("arguments", {}))
        first = first_gpu(arguments, self.worker_names.index(name))
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

    def _endpoint(self, name: str) -> str:
        is_ipc = self._settings.transport == "ipc" and self._keys is None
        return self._run_dir.ipc(name) if is_ipc else _ANY_PORT

    def _security(self, name: str) -> SecuritySettings | None:
        return self._keys.security_of(name) if self._keys is not None else None


def python(module: str, interpreter: str | os.PathLike[str] = "") -> list[str]:
    """Returns the command that runs one of our modules with an interpreter; see `environment`."""
    return [os.fspath(interpreter) or sys.executable, "-m", module]


def environment() -> dict[str, str]:
    """Environment of our processes: they run this very code, whatever lies in the directory.

    Without the safe path, a folder of our name where the user happens to be would be run instead.
    """
    variables = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    root = str(Path(__file__).absolute().parents[2])
    if root not in {*site.getsitepackages(), site.getusersitepackages()}:
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, [root, os.environ.get("PYTHONPATH")])
        )
    return variables


def private_dir(path: Path) -> Path:
    """`path`, made if needed and closed to other users (mode 0700)."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return path
