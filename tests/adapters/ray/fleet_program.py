"""Programs with a fleet on a Ray cluster: `python -m … ADDRESS MODEL`; a test gives the orders."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

import asyncio
import os
import sys
import time
from collections.abc import Awaitable
from pathlib import Path

import ray
import torch
from ray.util.placement_group import placement_group, placement_group_table

import rolloutbus
from rolloutbus import Fleet, RayLauncher, Rollout, RolloutClient, SamplingParams
from rolloutbus.bus.actor.supervisor import ProcessEvent
from rolloutbus.errors import ProcessFailed, SettingsError
from rolloutbus.examples.tiny_model import load_tiny_model
from rolloutbus.types import Ticket
from tests.adapters.ray.orders import Orders
from tests.integration.live_fleet import PACE_S, status_when

DEADLINE_S = 120.0
LONG = SamplingParams(max_new_tokens=100, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=5, sampling_seed=1)
N_ROLLOUTS, SLOTS = 64, 4


class Told:
    """What the supervisor of a fleet has told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_lost = asyncio.Event()

    def hear(self, event: ProcessEvent) -> None:
        self.lines.append(f"{event.name} {event.kind}: {event.what}")
        print(f"{time.monotonic():.1f}", self.lines[-1], file=sys.stderr, flush=True)
        if event.kind == "died":
            self.is_lost.set()


async def lose_a_node(orders: Orders, address: str, model: str) -> None:
    """Rollouts and an update of the weights, while the node of a worker is killed."""
    os.environ["ROLLOUTBUS_LOG"] = "json"
    told = Told()
    launcher = RayLauncher(
        address=address, strategy="STRICT_SPREAD", resources_per_worker={"slot": 2}
    )
    async with (
        rolloutbus.up(
            told.hear,
            model=model,
            workers=2,
            engine_options={"threads": 1, "slots": SLOTS},
            launcher=launcher,
        ) as fleet,
        rolloutbus.connect(**fleet.ticket.connect_options(), name="operator-1") as client,
    ):
        first = fleet.nodes
        rollouts = await sampled_while_a_node_is_lost(orders, fleet, client)
        orders.answer(n_sampled=len(rollouts))
        await asyncio.to_thread(orders.next)
        async with asyncio.timeout(DEADLINE_S):
            await told.is_lost.wait()
        await fleet.wait_ready(DEADLINE_S)
        version, after = await sampled_after_an_update(fleet, client, model)
        orders.answer(
            n_tokens=[len(each.tokens) for each in rollouts],
            rids=[each.rid for each in rollouts],
            n_moved=sum(each.n_attempts > 1 for each in rollouts),
            version=version,
            versions_after=[each.version_runs for each in after],
            first=first,
            nodes=fleet.nodes,
            told=told.lines,
            refused=await refusal(fleet.scale(3)),
            logged={
                name: (fleet.run_dir / "logs" / f"{name}.log").read_text().count("execute generate")
                for name in fleet.worker_names
            },
        )


async def sampled_while_a_node_is_lost(
    orders: Orders, fleet: Fleet, client: RolloutClient
) -> list[Rollout]:
    """Rollouts on all workers; the test is told which node to kill while they are paused."""
    nodes = fleet.nodes
    # All nodes have one address here, and Ray takes any of them for the program's.
    [victim, *_] = [name for name in fleet.worker_names if nodes[name] != nodes["router"]]
    prompts = [[1, 2, 3 + n % 8] for n in range(N_ROLLOUTS)]
    sampling = asyncio.ensure_future(
        client.generate_batch(prompts, LONG, n=1, deadline_s=DEADLINE_S)
    )
    await status_when(client, lambda s: all(each.n_running >= SLOTS for each in s.workers))
    await client.pause(mode="in_place")
    n_running = {each.name: each.n_running for each in (await client.status()).workers}
    orders.answer(victim=victim, node=nodes[victim], n_running=n_running[victim])
    await asyncio.to_thread(orders.next)
    # The worker that is lost cannot answer, and those who join are told.
    await client.resume(check=False)
    return [rollout for [rollout] in await sampling]


async def sampled_after_an_update(
    fleet: Fleet, client: RolloutClient, model: str
) -> tuple[int, list[Rollout]]:
    """The version that was published, and a rollout of each worker with it."""
    trained = load_tiny_model(Path(model))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.01)
    published = await rolloutbus.WeightPublisher(client).publish(trained)
    return published.version, [
        await client.generate([1, 2, 3], SHORT, worker=name, versions="latest", deadline_s=30)
        for name in fleet.worker_names
    ]


@ray.remote(num_cpus=0)
def sample_in_a_task(ticket: Ticket) -> list[int]:
    """On whichever node: an address that pickles is all it has."""
    with rolloutbus.connect_sync(**ticket.connect_options()) as client:
        return client.generate([1, 2, 3], SHORT, deadline_s=30).tokens.tolist()


def share_a_group(orders: Orders, address: str, model: str) -> None:
    """A program of Ray's with a placement group of GPUs, of which a fleet gets some."""
    ray.init(address=address, log_to_driver=False, logging_level="warning")
    group = placement_group([{"CPU": 1, "GPU": 1} for _ in range(4)], strategy="PACK")
    ray.get(group.ready())
    launcher = RayLauncher(placement_group=group, gpus_per_worker=2)
    node_of = placement_group_table(group)["bundles_to_node_id"]
    with rolloutbus.up(engine="fake", workers=2, launcher=launcher) as fleet:
        pids = fleet.pids
        variables = {
            name: dict(
                entry.split("=", 1)
                for entry in Path(f"/proc/{pids[name]}/environ").read_text().split("\0")
                if "=" in entry
            )
            for name in ("w0", "w1")
        }
        orders.answer(
            gpus={name: each["CUDA_VISIBLE_DEVICES"] for name, each in variables.items()},
            nodes=fleet.nodes,
            bundle_nodes=[node_of[index] for index in range(4)],
            tokens=ray.get([sample_in_a_task.remote(fleet.ticket) for _ in range(2)]),
            free_in_group=sum(
                amount
                for name, amount in ray.available_resources().items()
                if name == f"GPU_group_{group.id.hex()}"
            ),
        )
    state = placement_group_table(group)["state"]
    errors: list[str] = []
    for n_workers in (1, 3):
        try:
            with rolloutbus.up(engine="fake", workers=n_workers, launcher=launcher) as fleet:
                fleet.kill("w9")
        except SettingsError as error:
            errors.append(str(error))
    try:
        with rolloutbus.up(model=model, workers=1, launcher=launcher):
            pass
    except ProcessFailed as error:
        errors.append(str(error))
    orders.answer(is_initialized=ray.is_initialized(), state=state, errors=errors)
    orders.next()  # the test has looked at the processes


async def change_workers(orders: Orders, address: str, _: str) -> None:
    """Workers are added and removed, in a placement group of the fleet's and in the program's."""
    ray.init(address=address, log_to_driver=False, logging_level="warning")
    told: list[str] = []
    launcher = RayLauncher(resources_per_worker={"slot": 1})
    async with (
        rolloutbus.up(
            lambda event: told.append(f"{event.name} {event.kind}: {event.what}"),
            engine="fake",
            workers=1,
            launcher=launcher,
            env={"NCCL_DEBUG": "WARN"},
        ) as fleet,
        rolloutbus.connect(**fleet.ticket.connect_options()) as client,
    ):
        n_free = [free_slots()]
        await fleet.scale(3)
        n_free.append(free_slots())
        sampled = [
            len((await client.generate([1, 2, 3], SHORT, worker=name, deadline_s=30)).tokens)
            for name in fleet.worker_names
        ]
        nodes = fleet.nodes
        before = fleet.pids
        await fleet.restart("w2")
        is_another = before["w2"] != fleet.pids["w2"]
        added = await fleet.add_worker(env={"NCCL_DEBUG": "INFO"})
        variables = {name: variable_of(fleet.pids[name], "NCCL_DEBUG") for name in ("w0", added)}
        adding = asyncio.ensure_future(fleet.scale(5))
        async with asyncio.timeout(DEADLINE_S):
            while fleet.waits_for.get("w4") != "waiting for a place on Ray":  # noqa: ASYNC110 - tells nobody
                await asyncio.sleep(PACE_S)
        adding.cancel()
        await asyncio.wait([adding])
        refused = await refusal(fleet.add_worker(gpus=[0]))
        await fleet.scale(1)
        async with asyncio.timeout(DEADLINE_S):
            while free_slots() < n_free[0]:  # noqa: ASYNC110 - Ray takes a moment, and tells nobody
                await asyncio.sleep(PACE_S)
        orders.answer(
            n_free=n_free,
            sampled=sampled,
            nodes=nodes,
            is_another=is_another,
            added=added,
            variables=variables,
            names=fleet.worker_names,
            refused=refused,
            told=told,
        )
    group = placement_group([{"CPU": 1} for _ in range(2)])
    await group.ready()
    launcher = RayLauncher(placement_group=group)
    async with rolloutbus.up(engine="fake", workers=1, launcher=launcher) as fleet:
        await fleet.scale(2)
        refused = await refusal(fleet.scale(3))
        orders.answer(names=fleet.worker_names, refused=refused)


def free_slots() -> float:
    """Of those that Ray keeps for nobody."""
    return ray.available_resources().get("slot", 0.0)


def variable_of(pid: int, name: str) -> str:
    """Of a process on this machine, which all nodes share."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)[name]


async def refusal(change: Awaitable[object]) -> str:
    """Why a change is refused."""
    try:
        await change
    except SettingsError as error:
        return str(error)
    return ""


def main() -> None:
    """Run the program of this name."""
    name, address, model = sys.argv[1:]
    orders = Orders()
    orders.answer(ready=True)
    match name:
        case "lose_a_node":
            asyncio.run(lose_a_node(orders, address, model))
        case "change_workers":
            asyncio.run(change_workers(orders, address, model))
        case _:
            share_a_group(orders, address, model)


if __name__ == "__main__":
    main()
