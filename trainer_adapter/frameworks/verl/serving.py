"""Tokens for verl: its load balancer, its servers and its replicas, by the bus."""

# pyright: basic, reportMissingImports=false, reportPrivateUsage=false
# verl and Ray are not installed where types are checked.

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ray
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.utils.device import get_device_name
from verl.workers.config import RolloutConfig
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput
from verl.workers.rollout.router import DEFAULT_ROUTING_CACHE_SIZE, GlobalRequestLoadBalancer

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.generation import Want
from rolloutbus.trainer_adapter.client.client import RolloutClient, connect
from rolloutbus.trainer_adapter.client.core.results import Rollout, RolloutCancelled
from rolloutbus.trainer_adapter.frameworks.verl.options import (
    NAME,
    SERVER,
    FleetOptions,
    fleet_of,
    require_supported,
)

_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_STOP_REASONS = {"stop": "completed", "length": "completed", "abort": "aborted"}


class FleetLoadBalancer(GlobalRequestLoadBalancer):
    """Chooses a server as verl's own does, and leaves the worker to the bus.

    verl tells a server nothing that two turns of one trajectory have in common. So the handle that
    a turn gets here adds it, as the name of a session: the router places its first turn at the
    less loaded worker, and keeps later ones there.
    """

    def __init__(
        self,
        servers: Mapping[str, Any],
        router_config: Mapping[str, Any] | None = None,
        *,
        max_cache_size: int = DEFAULT_ROUTING_CACHE_SIZE,
    ) -> None:
        """Made by verl: of the file in `rollout.router_config_path`, or as `load_balancer_cls`.

        Raises:
            SettingsError: the file says more than `router_class`.
        """
        if more := set(router_config or ()) - {"router_class"}:
            raise SettingsError(f"{', '.join(sorted(more))}: the router has settings of its own")
        super().__init__(dict(servers), max_cache_size)
        self._n_cleared = 0

    def acquire_server(self, request_id: str) -> tuple[str, "SessionHandle"]:
        """The server for the next turn of a trajectory, and its handle."""
        server_id, server = super().acquire_server(request_id)
        return server_id, SessionHandle(server, f"{request_id}-{self._n_cleared}")

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Have the next turn of each trajectory placed anew."""
        self._n_cleared += 1
        return super().clear_sticky_cache()


@dataclass(frozen=True)
class SessionHandle:
    """What verl calls `generate.remote(...)` of, for a turn of one session."""

    server: Any
    session: str

    @property
    def generate(self) -> Any:  # noqa: ANN401 - has a `remote`, as a method of Ray's actors
        """The server's method, with the session."""
        call = functools.partial(self.server.generate.remote, session=self.session)
        return SimpleNamespace(remote=call)


class FleetServer:
    """The server of a replica, an actor of Ray's: a client of the fleet.

    How many there are says nothing of the fleet. Each may use all of its workers.
    """

    def __init__(self, fleet: FleetOptions, config: RolloutConfig) -> None:
        self._fleet = fleet
        self._config = config
        self._client: RolloutClient
        self._step_of: dict[int, int | None] = {}
        """The fleet's version -> verl's `global_steps`."""
        self._n_under_way = 0
        self._is_idle = asyncio.Event()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_rejecting = False

    async def launch_server(self) -> None:
        """Connect.

        Raises:
            PeerLost: no router answers there.
            SettingsError: the address is not allowed without keys.
        """
        client = connect(self._fleet.address, key_file=self._fleet.key_file)
        self._client = await client.open()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        *,
        session: str = "",
        image_data: object = None,
        video_data: object = None,
        audio_data: object = None,
        mm_processor_kwargs: object = None,
    ) -> TokenOutput:
        """Sample one turn, with weights no older than the last that this server was told of.

        Args and result as of verl's own servers; `session` is added by `SessionHandle`.

        Raises:
            SettingsError: images, or no session: another load balancer is used.
            BusError: as of `RolloutClient.generate`.
        """
        del request_id  # a new one for each turn
        if any((image_data, video_data, audio_data, mm_processor_kwargs)):
            raise SettingsError("images, videos and sounds do not reach a fleet by verl")
        if not session:
            path = f"{__name__}.FleetLoadBalancer"
            raise SettingsError(
                f"rollout.router_config_path: name a file with router_class: {path}"
            )
        while not self._is_open.is_set():
            if self._is_rejecting:
                return TokenOutput(token_ids=[], stop_reason="aborted", num_preempted=0)
            await self._is_open.wait()
        newest = max(self._step_of, default=0)
        self._n_under_way += 1
        self._is_idle.clear()
        try:
            rollout = await self._client.generate(
                prompt_ids,
                self._sampling(sampling_params, len(prompt_ids)),
                session=session,
                versions=f"min:{newest}",
                want=Want(routed_experts=self._config.enable_rollout_routing_replay),
                policy=self._fleet.policy,
                deadline_s=self._fleet.deadline_s,
            )
            stop_reason = _STOP_REASONS[rollout.finish_reason]
        except RolloutCancelled as cancelled:
            rollout, stop_reason = cancelled.partial, "aborted"
        finally:
            self._n_under_way -= 1
            if not self._n_under_way:
                self._is_idle.set()
        return self._output(
            rollout, stop_reason, has_logprobs=bool(sampling_params.get("logprobs"))
        )

    def _sampling(self, given: Mapping[str, Any], n_prompt_tokens: int) -> dict[str, Any]:
        """Fields of SamplingParams; one that it does not have is refused by it."""
        config = self._config
        both = config.prompt_length + config.response_length - n_prompt_tokens
        sampling = {
            "max_new_tokens": min(config.response_length, both),
            "repetition_penalty": config.repetition_penalty,
            "ignore_eos": config.ignore_eos,
            **{_RENAMED.get(name, name): each for name, each in given.items() if each is not None},
        }
        sampling.pop("logprobs", None)  # they always come
        if config.max_model_len is not None:
            room = config.max_model_len - n_prompt_tokens
            sampling["max_new_tokens"] = min(sampling["max_new_tokens"], room)
        # A trajectory that is too long gets a last token, as from verl's own servers.
        sampling["max_new_tokens"] = max(sampling["max_new_tokens"], 1)
        return sampling

    def _output(self, rollout: Rollout, stop_reason: str, *, has_logprobs: bool) -> TokenOutput:
        versions = [version for version, _ in rollout.version_runs]
        # None: not known, e.g. of a version that another program has published.
        oldest = self._step_of.get(min(versions)) if versions else None
        newest = self._step_of.get(max(versions)) if versions else None
        return TokenOutput(
            token_ids=rollout.tokens.tolist(),
            log_probs=rollout.behaviour_logprobs.tolist() if has_logprobs else None,
            routed_experts=rollout.arrays.get("routed_experts"),
            stop_reason=stop_reason,
            num_preempted=max(rollout.n_attempts - 1, 0),
            extra_fields={
                "global_steps": oldest,
                "min_global_steps": oldest,
                "max_global_steps": newest,
                "version_runs": [list(run) for run in rollout.version_runs],
                "worker": rollout.worker,
            },
        )

    async def abort_all_requests(self, *, reject_request: bool = False) -> dict[str, int]:
        """Stop all turns under way; they end with the tokens that they have.

        Turns that come later wait for `resume_generation`, or end at once with `reject_request`.
        """
        self._is_rejecting = reject_request
        self._is_open.clear()
        n_aborted = await self._client.abort()
        if self._n_under_way:
            await self._is_idle.wait()
        return {"aborted_count": n_aborted}

    async def resume_generation(self) -> None:
        """Sample again; see `abort_all_requests`."""
        self._is_rejecting = False
        self._is_open.set()

    async def set_global_steps(self, global_steps: int | None, version: int) -> None:
        """From now on tokens of this version are told as of this step of verl's."""
        self._step_of[version] = global_steps

    async def clear_kv_cache(self) -> None:
        """Forget the prefixes that the fleet has cached."""
        await self._client.reset_prefix_cache()


class FleetReplica(RolloutReplica):
    """`rollout.name=rolloutbus`: a way into the fleet, which takes no GPU of Ray's.

    Engines are started, split and watched by the fleet; verl's words for that are refused.
    """

    def __init__(self, *of_verl: Any, **more: Any) -> None:  # noqa: ANN401 - as verl has them
        """Arguments as of verl's `RolloutReplica`.

        Raises:
            SettingsError: a word of the configuration means nothing on a fleet.
        """
        super().__init__(*of_verl, **more)
        require_supported(self.config)
        if self.is_reward_model or self.is_teacher_model:
            raise SettingsError(f"a reward or teacher model cannot be rollout.name={NAME!r}")
        lora = self.model_config.get("lora") or {}
        if (self.model_config.get("lora_rank") or lora.get("rank")) and not lora.get("merge"):
            raise SettingsError("model.lora.merge=False: say True; adapters are merged on the way")
        self.fleet = fleet_of(self.config.engine_kwargs.get(NAME))

    async def init_standalone(self) -> None:
        """Make the process that waits for weights, on a CPU, and the server."""
        self.rollout_mode = RolloutMode.STANDALONE
        name = f"{NAME}_standalone_{self.replica_rank}"
        self.resource_pool = RayResourcePool(
            [1], use_gpu=False, max_colocate_count=1, name_prefix=name
        )
        group = RayWorkerGroup(
            resource_pool=self.resource_pool,
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=name,
            use_gpu=False,
            device_name=get_device_name(),
        )
        self.workers = group.workers
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Make the server and have it connect; raises as `FleetServer.launch_server`."""
        options = {"name": f"{SERVER}{self.replica_rank}", "num_cpus": 0}
        server = ray.remote(FleetServer).options(max_concurrency=self.max_concurrency, **options)
        self._server_handle = server.remote(self.fleet, self.config)
        self.servers = [self._server_handle]
        self._server_address = f"{self.fleet.address}/{self.replica_rank}"
        await self._server_handle.launch_server.remote()

    async def sleep(self) -> None:
        """Nothing, nor do the next ones: the fleet's engines keep their memory."""

    wake_up = release_kv_cache = resume_kv_cache = stop_profile = sleep

    async def start_profile(self, **_of_verl: object) -> None:
        """Nothing, as verl's own without `rollout.profiler.enable`, which is refused."""
