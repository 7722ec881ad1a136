"""The processes of a fleet on Ray, and what is reserved for them."""

# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import ray
import ray.util
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rolloutbus.bus.actor.child import ProcessSpec
from rolloutbus.bus.actor.variables import CHOICES
from rolloutbus.bus.wire.errors import DeadlineExceeded, SettingsError
from rolloutbus.launcher.on_ray.child import PLACED_AFTER_S, Choice, RayChild, RayProgram
from rolloutbus.launcher.on_ray.host import WorkerOrder
from rolloutbus.launcher.on_ray.launcher import RayLauncher
from rolloutbus.launcher.on_ray.placement import Demand, seats_in, shown
from rolloutbus.launcher.plan import READY_TIMEOUT_S, WORKER_GRACE_S, FleetPlan
from rolloutbus.launcher.run_dir import RunDirectory
from rolloutbus.launcher.scaling import WorkerPlace
from rolloutbus.launcher.settings import FleetSettings, n_gpus_of, packages_of

ACTOR_START_S = 60.0
"""For Ray to start a process that an actor runs in."""
TRACING = "OTEL_"
"""Begins the variables of OpenTelemetry."""
Tell = Callable[[str], None]


@asynccontextmanager
async def planned(
    launcher: RayLauncher, settings: FleetSettings, run_dir: RunDirectory, tell: Tell
) -> "AsyncGenerator[RayPlan]":
    """Reserve what a fleet on Ray needs, and plan it; leaving gives it back.

    Args:
        launcher: how.
        settings: of the fleet.
        run_dir: of the fleet, on this node.
        tell: hears what people must know while Ray is waited for.

    Raises:
        SettingsError: there is no cluster, or it cannot be used as asked for.
        DeadlineExceeded: Ray has found no room in time.
    """
    is_ours = await asyncio.to_thread(_joined, launcher)
    group: PlacementGroup | None = None
    reservation: Reservation | None = None
    living: set[RayChild] = set()
    try:
        demand = demand_of(launcher, settings)
        if launcher.placement_group is None:
            group = _new_group(launcher, demand, settings.workers)
        used = group or launcher.placement_group
        await _reserved(used, settings.start_timeout_s, tell)
        seats = _seats(launcher, used, demand, settings.workers)
        reservation = Reservation(launcher, used, demand, seats)
        yield RayPlan(settings, run_dir, reservation, living)
    finally:
        for child in living:
            child.abandon()
        if reservation is not None:
            reservation.close()
        if group is not None:
            ray.util.remove_placement_group(group)
        if is_ours:
            ray.shutdown()


class Reservation:
    """What Ray keeps for the workers: a seat, which is one or more bundles, for each number."""

    def __init__(
        self,
        launcher: RayLauncher,
        group: PlacementGroup,
        demand: Demand,
        seats: Sequence[Sequence[int]],
    ) -> None:
        """Know what is reserved.

        Args:
            launcher: how.
            group: its own, or the one that was made.
            demand: of each worker.
            seats: bundles of that group, of each worker that it has room for.
        """
        self.demand = demand
        self._launcher = launcher
        self._group = group
        self._seats = seats
        self._added: dict[int, PlacementGroup] = {}
        """Of workers that were added: groups do not grow, so each has one of its own."""

    def require(self, numbers: Sequence[int]) -> None:
        """SettingsError unless workers of these numbers can be given a place."""
        n_needed = max(numbers, default=-1) + 1
        if n_needed <= len(self._seats):
            return
        if self._launcher.placement_group is not None:
            raise SettingsError(
                f"placement_group: its bundles have room for {len(self._seats)} workers, not for "
                f"w{n_needed - 1}"
            )
        if self._launcher.strategy.startswith("STRICT_"):
            raise SettingsError(
                f"strategy: {self._launcher.strategy} holds among the {len(self._seats)} workers "
                "that the fleet began with: Ray cannot put another one beside them"
            )

    def choices(self, number: int) -> list[Choice]:
        """Options of the actors of a worker: the first one runs it, the others hold GPUs."""
        group, (first, *others) = self._seat(number)
        share = self.demand.gpu_share
        n_first = self.demand.n_gpus - len(others)
        resources = dict(self.demand.others)
        at_first = {
            "num_cpus": resources.pop("CPU", 0.0),
            "num_gpus": n_first * share,
            "resources": resources,
            "scheduling_strategy": _in_bundle(group, first),
        }
        more = [
            {"num_cpus": 0, "num_gpus": share, "scheduling_strategy": _in_bundle(group, each)}
            for each in others
        ]
        return [at_first, *more]

    def give_back(self, number: int) -> None:
        """The worker is gone: what was reserved for it alone is free for others."""
        if group := self._added.pop(number, None):
            ray.util.remove_placement_group(group)

    def close(self) -> None:
        """Give back all that was reserved for workers that were added."""
        for number in list(self._added):
            self.give_back(number)

    def _seat(self, number: int) -> tuple[PlacementGroup, Sequence[int]]:
        if number < len(self._seats):
            return self._group, self._seats[number]
        if number not in self._added:
            self._added[number] = _new_group(self._launcher, self.demand, 1)
        return self._added[number], [0]


def _in_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, index, placement_group_capture_child_tasks=False)


class RayPlan:
    """Every process of one fleet on Ray: the local plan's settings, each in an actor."""

    ready_timeout_s = READY_TIMEOUT_S + ACTOR_START_S

    def __init__(
        self,
        settings: FleetSettings,
        run_dir: RunDirectory,
        reservation: Reservation,
        living: set[RayChild],
    ) -> None:
        """Plan a fleet.

        Args:
            settings: of the fleet.
            run_dir: on this node.
            reservation: for the workers.
            living: gets the incarnations that have not ended.
        """
        host = ray.util.get_node_ip_address()
        if ":" in host:
            raise SettingsError(f"launcher: this node's address {host} is IPv6: not supported")
        settings = _with_keys_and_threads(settings, reservation.demand, run_dir)
        self._settings = settings
        self._logs = run_dir.logs
        self._local = FleetPlan(settings, run_dir, host)
        self._reservation = reservation
        self._living = living
        self._node = ray.get_runtime_context().get_node_id()
        self.key_file = self._local.key_file
        self.places = self._local.places

    def take_places(
        self, n: int, *, gpus: Sequence[int] = (), env: Mapping[str, str] | None = None
    ) -> list[WorkerPlace]:
        """As `FleetPlan.take_places`; Ray is asked for room when the workers start.

        Raises:
            SettingsError: there can be no room, a variable is none, or GPUs are named.
        """
        if gpus:
            raise SettingsError("gpus: Ray chooses the GPUs of each worker: leave gpus out")
        self._reservation.require(self._local.free_numbers(n))
        return self._local.take_places(n, env=env)

    def give_back(self, name: str) -> None:
        """The worker is gone: its number is free, and its room if it was added later."""
        if place := self.places.get(name):
            self._reservation.give_back(place.number)
        self._local.give_back(name)

    def router(self, endpoints: dict[str, str] | None = None) -> RayProgram:
        """As `FleetPlan.router`."""
        return self._here(self._local.router(endpoints))

    def standby(self, endpoints: dict[str, str] | None = None) -> RayProgram:
        """As `FleetPlan.standby`; `FleetSettings` refuses it on Ray."""
        return self._here(self._local.standby(endpoints))

    def store(self, backend: str, endpoints: dict[str, str] | None = None) -> RayProgram:
        """As `FleetPlan.store`."""
        return self._here(self._local.store(backend, endpoints))

    def recorder(self, router: str) -> RayProgram:
        """As `FleetPlan.recorder`."""
        return self._here(self._local.recorder(router))

    def gateway(self, router: str, endpoints: dict[str, str] | None = None) -> RayProgram:
        """As `FleetPlan.gateway`."""
        return self._here(self._local.gateway(router, endpoints))

    def worker(self, name: str, backend: str) -> RayProgram:
        """One worker, in its bundles of the placement group."""
        place = self.places[name]
        return RayProgram(
            name,
            partial(self._order, place, backend),
            self._logs / f"{name}.log",
            self._reservation.choices(place.number),
            shown(self._reservation.demand.whole),
            self._living,
            grace_s=WORKER_GRACE_S,
            may_leave=True,
        )

    def _order(self, place: WorkerPlace, backend: str) -> WorkerOrder:
        """What a worker that starts now needs: keys may have changed since the fleet began."""
        return WorkerOrder(
            settings=self._local.worker_settings(place.name, backend),
            interpreter=os.fspath(self._settings.python),
            packages=packages_of(self._settings),
            variables={
                **{
                    variable: value
                    for variable, value in os.environ.items()
                    if variable in CHOICES or variable.startswith(TRACING)
                },
                **place.env,
            },
            keys=self._local.key_files(place.name),
        )

    def _here(self, spec: ProcessSpec) -> RayProgram:
        """A process on this node, where its files are; Ray counts no resources for it."""
        choice = {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._node, soft=False),
        }
        return RayProgram(
            spec.name,
            lambda: spec,
            spec.log,
            [choice],
            "this program's node",
            self._living,
            ready_timeout_s=spec.ready_timeout_s + ACTOR_START_S,
            grace_s=spec.grace_s,
            may_leave=spec.may_leave,
        )


def demand_of(launcher: RayLauncher, settings: FleetSettings) -> Demand:
    """What Ray is asked for by one worker."""
    n_gpus = launcher.gpus_per_worker
    if n_gpus is None:
        n_gpus = _gpus_of(settings)
    others = {"CPU": launcher.cpus_per_worker, **launcher.resources_per_worker}
    return Demand(n_gpus, launcher.gpu_share, others)


def _gpus_of(settings: FleetSettings) -> int:
    device = settings.engine_options.get("device", "auto")
    if settings.engine == "fake" or device == "cpu":
        return 0
    if settings.engine == "sglang":
        return n_gpus_of(settings)
    return 1 if device == "cuda" or ray.cluster_resources().get("GPU", 0) else 0


def _joined(launcher: RayLauncher) -> bool:
    """Connect to Ray, unless the program has; returns whether it was not."""
    if ray.is_initialized():
        if ray.util.client.ray.is_connected():  # pyright: ignore[reportAttributeAccessIssue]
            raise SettingsError(
                "launcher: a program of Ray Client (ray://…) is outside of the cluster, where "
                "nothing can reach its router: run it on a node, e.g. by `ray job submit`"
            )
        if launcher.address:
            raise SettingsError("launcher: address: this program has called ray.init: leave it out")
        return False
    address = launcher.address or "auto"
    if address.startswith("ray://"):
        raise SettingsError(
            f"launcher: address: {address} is of Ray Client, which stays outside of the cluster: "
            "run this program on a node, with the address auto"
        )
    try:
        ray.init(address=address, logging_level="error", log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SettingsError(
            f"launcher: no Ray cluster at {address}: {str(error).splitlines()[0]} "
            'Start one with `ray start --head`, or say address="local"'
        ) from error
    return True


def _new_group(launcher: RayLauncher, demand: Demand, n_workers: int) -> PlacementGroup:
    if demand.n_gpus > 1 and demand.gpu_share < 1:
        raise SettingsError(
            "gpu_share: shares of several GPUs need a placement_group with a bundle for each GPU"
        )
    bundles = [demand.whole or {"CPU": 0.001} for _ in range(n_workers)]
    more: dict[str, Any] = {}
    if launcher.node_labels:
        more["bundle_label_selector"] = [dict(launcher.node_labels) for _ in bundles]
    return ray.util.placement_group(bundles, strategy=launcher.strategy, **more)


async def _reserved(group: PlacementGroup, timeout_s: float, tell: Tell) -> None:
    """Wait until Ray has found room for the group.

    Raises:
        DeadlineExceeded: it has not within `timeout_s` seconds.
    """
    ready = asyncio.wrap_future(group.ready().future())
    wanted = "; ".join(shown(bundle) for bundle in group.bundle_specs)
    waited_s = 0.0
    wait_s = min(PLACED_AFTER_S, timeout_s)
    while waited_s < timeout_s:
        done, _ = await asyncio.wait([ready], timeout=wait_s)
        if done:
            await ready
            return
        waited_s += wait_s
        wait_s = min(2 * wait_s, timeout_s - waited_s)
        tell(f"Ray has no room yet for the bundles ({wanted}); free: {_free()}")
    raise DeadlineExceeded(
        f"Ray has found no room within {timeout_s:g} s for bundles of ({wanted}); free: {_free()}"
    )


def _free() -> str:
    names = ("CPU", "GPU")
    free: Mapping[str, float] = ray.available_resources()
    others = sorted(
        name
        for name in free
        if name not in names and not name.startswith(("node:", "memory", "object_store", "bundle"))
    )
    return shown({name: free.get(name, 0.0) for name in (*names, *others) if "_group_" not in name})


def _seats(
    launcher: RayLauncher, group: PlacementGroup, demand: Demand, n_workers: int
) -> Sequence[Sequence[int]]:
    if launcher.placement_group is None:
        return [[index] for index in range(n_workers)]
    specs = dict(enumerate(group.bundle_specs))
    chosen = list(specs) if launcher.bundles is None else launcher.bundles
    if unknown := [index for index in chosen if index not in specs]:
        raise SettingsError(
            f"bundles: the placement group has no bundle {unknown[0]}: it has 0 to {len(specs) - 1}"
        )
    nodes: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return seats_in({index: specs[index] for index in chosen}, nodes, demand, n_workers)


def _with_keys_and_threads(
    settings: FleetSettings, demand: Demand, run_dir: RunDirectory
) -> FleetSettings:
    """The settings, with what a fleet on several machines needs beside what its user said."""
    options = dict(settings.engine_options)
    if settings.engine == "transformers":
        options.setdefault("threads", max(1, int(demand.others["CPU"])))
    secure = settings.secure if settings.secure is not None else run_dir.path / "keys"
    return msgspec.structs.replace(settings, secure=secure, engine_options=options)
