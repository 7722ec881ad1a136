"""AReaL on a fleet: its requests go to a gateway, and each token's version is the attested one.

Written for AReaL 1.0.4. `FleetBackend` is what AReaL asks of an inference server, as requests to
`rolloutbus gateway`; `RemoteFleetEngine` is AReaL's own remote engine with that backend, for
`use_fleet`; `FleetRouting` chooses between gateways in AReaL's inference service.
"""

# pyright: basic, reportMissingImports=false, reportPrivateUsage=false
# AReaL is not installed where types are checked, and leaves much untyped.

import contextvars
import dataclasses
import logging
import os
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from operator import itemgetter
from threading import RLock
from types import ModuleType
from typing import Any, NoReturn

import requests
from areal.api import ModelRequest, ModelResponse, WeightUpdateMeta
from areal.api.cli_args import InferenceEngineConfig, SGLangConfig
from areal.api.io_struct import HttpGenerationResult, HttpRequest, LocalInfServerInfo
from areal.engine.sglang_remote import RemoteSGLangEngine, SGLangBackend
from areal.experimental.inference_service.router import app as areal_router
from areal.experimental.inference_service.router.config import RouterConfig
from areal.experimental.inference_service.router.state import WorkerInfo
from areal.infra import RemoteInfEngine
from areal.trainer import rl_trainer
from areal.utils.network import split_hostport

from rolloutbus.bus.wire.errors import RemoteProtocolError, SettingsError

_log = logging.getLogger(__name__)

ADDRESS = "AREAL_LLM_SERVER_ADDRS"
"""AReaL's environment variable for inference servers that run already: HOST:PORT of the gateway."""
QUESTION_S = 30.0
"""For the gateway's answer which version is committed."""

HOW_TO_START = (
    "AReaL does not start a fleet: run `rolloutbus up --model DIR -n N --http PORT`, and name its "
    f"gateway in {ADDRESS}=HOST:PORT"
)
FROM_DISK = "a fleet takes no weights from AReaL's process group: set actor.weight_update_mode=disk"

Json = dict[str, Any]
_versions: contextvars.ContextVar[list[int]] = contextvars.ContextVar("versions")
"""Of the tokens of the generation that this task awaits: one answer after another."""


class FleetBackend(SGLangBackend):
    """AReaL's `RemoteInfBackendProtocol`: requests to a gateway, and what its replies say.

    A gateway has SGLang's endpoints. What is said here is what a fleet does beyond them, or cannot.
    """

    def build_generation_request(
        self,
        req: ModelRequest,
        with_lora: bool,  # noqa: FBT001 - as AReaL passes it
        version: int,
    ) -> HttpRequest:
        """A request for one sample; those of one `rid` go to the worker that has their prefix."""
        request = super().build_generation_request(req, with_lora, version)
        request.payload["session_id"] = req.rid
        if req.gconfig.min_new_tokens:
            request.payload["sampling_params"]["min_new_tokens"] = req.gconfig.min_new_tokens
        return request

    def parse_generation_response(self, response: Json) -> HttpGenerationResult:
        """What was sampled. The versions of the tokens go to the `FleetEngine` that asked.

        Raises:
            RemoteProtocolError: tokens without a logprob or a version: no fleet answers there.
        """
        result = super().parse_generation_response(response)
        meta, n_tokens = response["meta_info"], len(result.output_tokens)
        runs = meta.get("weight_versions")
        if runs is None or sum(n for _, n in runs) != n_tokens:
            message = f"{n_tokens} tokens with versions {runs}: is it a gateway of a fleet?"
            raise RemoteProtocolError(message)
        if None in result.output_logprobs:
            raise RemoteProtocolError("a sampled token has no logprob")
        collected = _versions.get(None)
        if collected is not None and "lora" in meta:
            collected += [_number_of_adapter(meta["lora"])] * n_tokens
        elif collected is not None:
            collected += [version for version, n in runs for _ in range(n)]
        return result

    def build_init_weights_group_request(self, *_: object) -> NoReturn:
        """Refuse: AReaL sends parts of a model, and never says which is the last."""
        raise NotImplementedError(FROM_DISK)

    build_distributed_weight_update_requests = build_init_weights_group_request

    def launch_server(self, server_args: Json) -> NoReturn:
        """Refuse: a fleet is there before AReaL is."""
        raise NotImplementedError(HOW_TO_START)


class VersionBook:
    """AReaL's number of each version that the fleet has had. Used from several threads."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._known: list[tuple[int, int]] = []
        """Ascending: (the fleet's, AReaL's)."""
        self._announced: int | None = None

    def note(self, number: int, version: int) -> None:
        """`version` of the fleet is what AReaL calls `number`, unless it is known already."""
        with self._lock:
            self._announced = None
            if not self._known or version > self._known[-1][0]:
                self._known.append((version, number))

    def announce(self, number: int | None) -> None:
        """The next version that the fleet gets is this one; None: none is on its way any more."""
        with self._lock:
            self._announced = number

    def number_of(self, version: int) -> int:
        """AReaL's number of a version: of the newest of its own that is no newer.

        Raises:
            RemoteProtocolError: it is older than all of its own.
        """
        with self._lock:
            if self._announced is not None and version > self._known[-1][0]:
                self.note(self._announced, version)
            place = bisect_right(self._known, version, key=itemgetter(0))
            if place == 0:
                message = f"version {version} sampled, which was gone before this engine began"
                raise RemoteProtocolError(message)
            return self._known[place - 1][1]


class FleetEngine(RemoteInfEngine):
    """AReaL's client of inference servers, with one gateway as its server.

    `output_versions` of a response are those of the weights that computed each token, as the worker
    attests them; with an adapter, the adapter's. Of several engines the first updates and pauses
    the fleet, the others leave it to that one.
    """

    def __init__(self, config: InferenceEngineConfig) -> None:
        super().__init__(config, FleetBackend())
        self._book = VersionBook()

    def initialize(
        self,
        engine_id: str | None = None,
        addr: str | list[str] | None = None,
        train_data_parallel_size: int | None = None,
    ) -> None:
        """Connect to the gateway at `addr`, or to that which the environment names.

        Raises:
            SettingsError: no gateway is named, or several are.
            TimeoutError: within `setup_timeout` no worker there takes requests.
        """
        address = _gateway(addr)
        try:
            super().initialize(engine_id, address, train_data_parallel_size)
        except TimeoutError as error:
            message = f"no worker takes requests at http://{address}: see `rolloutbus status`"
            raise TimeoutError(message) from error
        committed = self._committed()
        if committed and not self.get_version():
            _log.warning(
                "the fleet has version %d, which counts as version 0 of this run: bring it up "
                "anew, unless training begins with these weights",
                committed,
            )
        self._book.note(self.get_version(), committed)

    def check_health(self, base_url: str) -> bool:
        """Whether a worker takes requests.

        A run that was killed amidst an update leaves the fleet paused. The first engine of the next
        run has it sample again, and logs that.
        """
        is_well = super().check_health(base_url)
        if not is_well and not self.initialized and self._is_first and _is_paused(base_url):
            _log.warning("the fleet was left paused, as by a run that was killed: it goes on now")
            reply = requests.post(f"{base_url}/continue_generation", json={}, timeout=QUESTION_S)
            reply.raise_for_status()
        return is_well

    def set_version(self, version: int) -> None:
        """AReaL's number of the weights that the fleet has now."""
        super().set_version(version)
        if self.addresses:
            self._book.note(version, self._committed())

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """One sample; `output_versions` are AReaL's numbers of what the workers attest.

        Raises:
            RemoteProtocolError: some token has no version.
        """
        with _collected() as versions:
            response = await super().agenerate(req)
        if len(versions) != len(response.output_tokens):
            message = f"{len(versions)} versions of {len(response.output_tokens)} tokens"
            raise RemoteProtocolError(message)
        if not self.config.use_lora:
            versions = [self._book.number_of(version) for version in versions]
        response.output_versions = versions
        return response

    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> Future[None]:
        """Have all workers take a checkpoint that the gateway can read, or an adapter."""
        if not meta.use_lora:
            self._book.announce(meta.version)
        if not self._is_first:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        future = super().update_weights_from_disk(meta)
        future.add_done_callback(self._updated)
        return future

    def pause_generation(self) -> None:
        """End what AReaL samples, with what it has, before new weights come.

        New adapters come without a pause: they have names of their own.
        """
        if not self.config.use_lora:
            super().pause_generation()

    def continue_generation(self) -> None:
        """Sample again."""
        if not self.config.use_lora:
            super().continue_generation()

    def launch_server(self, server_args: Json) -> LocalInfServerInfo:
        """Returns the gateway, which runs already; `server_args` are for SGLang and unused."""
        del server_args
        host, port = split_hostport(_gateway(None))
        return LocalInfServerInfo(host=host, port=port, process=None)

    @property
    def _is_first(self) -> bool:
        return not self.engine_id.isdigit() or int(self.engine_id) == 0

    def _run_request_on_all_servers(self, req: HttpRequest) -> None:
        if self._is_first:
            super()._run_request_on_all_servers(req)

    def _updated(self, future: Future[None]) -> None:
        if future.cancelled() or future.exception() is not None:
            self._book.announce(None)

    def _committed(self) -> int:
        """The fleet's number of its newest version."""
        response = requests.get(f"http://{self.addresses[0]}/model_info", timeout=QUESTION_S)
        response.raise_for_status()
        return int(response.json()["weight_versions"]["default"])


class RemoteFleetEngine(RemoteSGLangEngine):
    """AReaL's `RemoteSGLangEngine` on a fleet: what trainers and controllers make."""

    def __init__(self, config: InferenceEngineConfig) -> None:
        """Connects to nothing yet.

        Raises:
            SettingsError: the second rollout controller, whose processes choose engines themselves.
        """
        kind = config._version  # noqa: SLF001 - an option all the same
        if kind != "v1":
            raise SettingsError(f"rollout._version={kind!r}: a fleet wants 'v1'")
        self.config = config
        self._engine = FleetEngine(config)


class FleetRouting:
    """AReaL's `RoutingStrategy`: gateways that are healthy take turns.

    Gateways of one fleet are alike, since the fleet chooses the worker.
    """

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, workers: list[WorkerInfo]) -> WorkerInfo | None:
        """The next healthy one; None: there is none."""
        healthy = [each for each in workers if each.is_healthy]
        if not healthy:
            return None
        self._turn += 1
        return healthy[self._turn % len(healthy)]


class NoServerConfig(SGLangConfig):
    """AReaL's `sglang` options where it starts no server, so that SGLang need not be installed."""

    @staticmethod
    def build_args(sglang_config: SGLangConfig, **_of_server: object) -> Json:
        """No arguments: the fleet's engines had theirs at its start. Logs those that are said."""
        plain = SGLangConfig()
        names = [each.name for each in dataclasses.fields(SGLangConfig)]
        said = [each for each in names if getattr(sglang_config, each) != getattr(plain, each)]
        if said:
            _log.warning(
                "sglang.%s: said to no engine; a fleet has these from its start: "
                "rolloutbus up --sglang.NAME VALUE",
                ", sglang.".join(said),
            )
        return {}


def use_fleet() -> None:
    """Have AReaL's RL trainers with the rollout backend `sglang` sample on a fleet from now on.

    Raises:
        SettingsError: this AReaL has no such place; see the supported version above.
    """
    for name, ours in {
        "RemoteSGLangEngine": RemoteFleetEngine,
        "SGLangConfig": NoServerConfig,
    }.items():
        _check_place(rl_trainer, name)
        setattr(rl_trainer, name, ours)


def router_app(config: RouterConfig) -> Any:  # noqa: ANN401 - an application of FastAPI
    """AReaL's own router of its inference service, which chooses by `FleetRouting`.

    Raises:
        SettingsError: this AReaL has no such place; see the supported version above.
    """
    _check_place(areal_router, "get_strategy")
    looked_up = areal_router.get_strategy
    areal_router.get_strategy = lambda _: FleetRouting()
    try:
        return areal_router.create_app(config)
    finally:
        areal_router.get_strategy = looked_up


def _check_place(module: ModuleType, name: str) -> None:
    if not hasattr(module, name):
        message = f"this AReaL has no {name} in {module.__name__}: install areal==1.0.4"
        raise SettingsError(message)


def _gateway(addr: str | list[str] | None) -> str:
    """The one gateway that is given, or else named by the environment.

    Raises:
        SettingsError: there is none, or several.
    """
    named = [addr] if isinstance(addr, str) else addr or os.environ.get(ADDRESS, "").split(",")
    if named == [""]:
        raise SettingsError(HOW_TO_START)
    if len(named) != 1:
        message = f"{len(named)} gateways: name one, since each would publish the same weights"
        raise SettingsError(message)
    return named[0]


def _is_paused(base_url: str) -> bool:
    """Whether a gateway is there, and some worker waits for `resume`."""
    try:
        reply = requests.get(f"{base_url}/list_workers", timeout=QUESTION_S)
    except requests.ConnectionError:
        return False
    reply.raise_for_status()
    return any("paused" in each["blocked_by"] for each in reply.json()["workers"])


@contextmanager
def _collected() -> Iterator[list[int]]:
    """The versions of tokens that this task parses meanwhile."""
    found: list[int] = []
    token = _versions.set(found)
    try:
        yield found
    finally:
        _versions.reset(token)


def _number_of_adapter(lora: str) -> int:
    """AReaL's number of the adapter that sampled: `NAME-vNUMBER@VERSION`.

    Raises:
        RemoteProtocolError: its name has none.
    """
    number = lora.partition("@")[0].rpartition("-v")[2]
    if not number.isdigit():
        raise RemoteProtocolError(f"the adapter {lora[:64]!r} sampled, which AReaL did not name")
    return int(number)
