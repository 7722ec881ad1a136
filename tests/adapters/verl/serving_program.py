"""verl's own clients, balancer, replicas, trainer's worker and checkpoint engine on a fleet.

Run by the tests beside it, in an environment with verl. Prints a JSON line for each part. After
the one named `running` a worker is killed from outside.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# What it imports is installed in the environment that runs it.

import argparse
import asyncio
import json
import math
from collections.abc import Coroutine, Sequence
from typing import Any
from uuid import uuid4

import ray
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.llm_server import (
    FullyAsyncLLMServerClient,
    LLMServerClient,
    LLMServerManager,
)

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.frameworks.verl import FleetReplica

N_SERVERS = 2
PROMPT = [1, 5, 6, 7]
N_LONG, N_MANY, LONG = 32, 256, 100
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
GREEDY = {**SAMPLED, "temperature": 0, "max_tokens": 8}
STEP, NEXT_STEP = 7, 8
REFUSED = {
    "tensor_model_parallel_size": 2,
    "gpu_memory_utilization": 0.8,
    "free_cache_engine": True,
    "full_determinism": True,
    "logprobs_mode": "raw_logprobs",
    "enforce_eager": True,
    "prometheus.enable": True,
    "engine_kwargs.vllm": {"enable_expert_parallel": True},
    "engine_kwargs.rolloutbus.adress": "tcp://127.0.0.1:1",
}
"""Words of `rollout`, with a value that means nothing on a fleet."""


def say(part: str, value: object) -> None:
    print(json.dumps({"part": part, "value": value}), flush=True)


def configured(address: str, model: str, router: str) -> DictConfig:
    """What a user says, and what a CPU needs."""
    fleet = {"address": address, "dtype": "float32"}
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                "actor_rollout_ref.rollout.name=rolloutbus",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
                "actor_rollout_ref.rollout.free_cache_engine=False",
                f"actor_rollout_ref.rollout.router_config_path={router}",
                "actor_rollout_ref.rollout.checkpoint_engine.backend=rolloutbus",
                "actor_rollout_ref.rollout.nnodes=1",
                f"actor_rollout_ref.rollout.n_gpus_per_node={N_SERVERS}",
                f"actor_rollout_ref.model.path={model}",
                "actor_rollout_ref.actor.strategy=fsdp2",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
                "+actor_rollout_ref.model.override_config={attn_implementation: eager}",
                "data.max_prompt_length=16",
                f"data.max_response_length={LONG}",
                "trainer.device=cpu",
            ],
        )
    rollout = config.actor_rollout_ref.rollout
    OmegaConf.update(rollout, "engine_kwargs.rolloutbus", fleet, force_add=True)
    OmegaConf.update(rollout.checkpoint_engine, "engine_kwargs.rolloutbus", fleet, force_add=True)
    return config


def refusals(config: DictConfig) -> dict[str, str]:
    """Word -> what is said of it when a replica is made."""
    said: dict[str, str] = {}
    for word, value in REFUSED.items():
        mistaken = config.actor_rollout_ref.copy()
        OmegaConf.update(mistaken.rollout, word, value, force_add=True)
        try:
            FleetReplica(0, mistaken.rollout, mistaken.model, 1)
        except SettingsError as error:
            said[word] = str(error)
    return said


async def sampled(
    client: LLMServerClient, trajectory: str, prompt: Sequence[int] = PROMPT, **sampling: object
) -> dict[str, Any]:
    output = await client.generate(
        trajectory, prompt_ids=list(prompt), sampling_params={**SAMPLED, **sampling}
    )
    return output.model_dump()


async def turns(client: LLMServerClient) -> list[str]:
    """The workers of a trajectory's turns; each prompt goes on from the last answer."""
    trajectory, prompt, workers = uuid4().hex, list(PROMPT), []
    for _ in range(4):
        output = await sampled(client, trajectory, prompt, max_tokens=6)
        workers.append(output["extra_fields"]["worker"])
        prompt += [*output["token_ids"], 5]
    return workers


async def in_flight(balancer: Any, n_wanted: int) -> dict[str, int]:  # noqa: ANN401 - Ray's
    """How many turns each server has, once there are so many in all."""
    async with asyncio.timeout(60):
        while True:
            status = await balancer.get_status.remote()
            if status["total_inflight"] == n_wanted:
                return status["servers"]


def long_turns(client: LLMServerClient, n: int) -> list[asyncio.Task[dict[str, Any]]]:
    asked = [sampled(client, uuid4().hex, max_tokens=LONG) for _ in range(n)]
    return [asyncio.create_task(each) for each in asked]


async def under_way(client: LLMServerClient) -> list[asyncio.Task[dict[str, Any]]]:
    """Many turns, of which the first one is over: others are amidst, or wait at a worker."""
    turns = long_turns(client, N_MANY)
    await asyncio.wait(turns, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    return turns


async def failure_of(call: Coroutine[Any, Any, object]) -> str:
    try:
        await call
    except Exception as error:  # noqa: BLE001 - Ray wraps the adapter's
        return str(error)
    return ""


async def serve(manager: LLMServerManager) -> None:
    """Parts without new weights."""
    client, balancer = manager.get_client(), manager.global_load_balancer
    say("turns", await asyncio.gather(*(turns(client) for _ in range(8))))
    first = await asyncio.gather(*(sampled(client, uuid4().hex) for _ in range(16)))
    say("first turns", [each["extra_fields"]["worker"] for each in first])
    say("output", await sampled(client, uuid4().hex, max_tokens=6))
    say("greedy", await sampled(client, uuid4().hex, **GREEDY))

    at_once = long_turns(client, N_LONG)
    say("in flight", await in_flight(balancer, N_LONG))
    await asyncio.gather(*at_once)
    begun = await under_way(client)
    for replica in manager.get_replicas():
        await replica.abort_all_requests(reject_request=True)
    say("aborted", await asyncio.gather(*begun))
    say("rejected", await sampled(client, uuid4().hex))
    for replica in manager.get_replicas():
        await replica.resume_generation()
    say("idle", await in_flight(balancer, 0))

    strange = sampled(client, uuid4().hex, prompt_logprobs=5)
    say("strange word", await failure_of(strange))
    bare = manager.server_handles[0].generate.remote(PROMPT, {}, "r1")
    say("no session", await failure_of(asyncio.wait_for(bare, 60)))


async def update(manager: LLMServerManager, config: DictConfig) -> None:
    """Parts with weights of verl's own FSDP worker."""
    client = manager.get_client()
    trainer = RayWorkerGroup(
        resource_pool=RayResourcePool([1], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(
            cls=ray.remote(ActorRolloutRefWorker), config=config.actor_rollout_ref, role="actor"
        ),
        use_gpu=False,
        device_name="cpu",
    )
    trainer.init_model()
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    weights = CheckpointEngineManager(engine, trainer, manager.get_replicas())
    say("metrics", await weights.update_weights(global_steps=STEP))
    greedy = [sampled(client, uuid4().hex, **GREEDY) for _ in range(8)]
    say("greedy after", await asyncio.gather(*greedy))

    worker = trainer.workers[0]
    kept = await worker.__ray_call__.remote(poison)
    say("failed update", await failure_of(weights.update_weights(global_steps=NEXT_STEP)))
    await weights.resume_generation_replicas()
    say("greedy after failure", await sampled(client, uuid4().hex, **GREEDY))
    await worker.__ray_call__.remote(poison, kept)

    patient = manager.get_client(client_cls=FullyAsyncLLMServerClient)
    begun = await under_way(patient)
    await weights.update_weights(global_steps=NEXT_STEP)
    say("across an update", await asyncio.gather(*begun))


def poison(worker: Any, value: float = math.nan) -> float:  # noqa: ANN401 - verl's
    """Overwrite one number of the trainer's weights; returns the old one."""
    with torch.no_grad():
        weight = next(worker.actor.engine.module.parameters()).to_local()
        old = float(weight[0, 0])
        weight[0, 0] = value
    return old


async def main(config: DictConfig) -> None:
    manager = await LLMServerManager.create(config=config)
    await serve(manager)
    await update(manager, config)
    client = manager.get_client()
    begun = await under_way(client)
    say("running", len(begun))
    say("killed", await asyncio.gather(*begun))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("address", "model", "router"):
        parser.add_argument(name)
    given = configured(**vars(parser.parse_args()))
    say("words", sorted(RolloutConfig.__dataclass_fields__))
    say("refused", refusals(given))
    ray.init(num_cpus=2 * N_SERVERS, include_dashboard=False, log_to_driver=False)
    try:
        asyncio.run(main(given))
    finally:
        ray.shutdown()
