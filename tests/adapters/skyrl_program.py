"""SkyRL's own code on a fleet, told what to do by whoever started it: a line of JSON each way.

    python -m tests.adapters.skyrl_program ADDRESS MODEL NUM_ENGINES RANK WORLD RENDEZVOUS

Run in an environment with SkyRL 0.2.0 or 0.3.0. What SkyRL asks of a GPU is stood in for: there is
none. NUM_ENGINES 0: the fleet is one engine, which stands in the place of SkyRL's client.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# What it imports is installed in the environment that runs it.
# ruff: noqa: E402 - what is stood in for is, before it is looked for

import typing

import typing_extensions

# Before Python 3.12 pydantic wants these, and SkyRL has the others.
typing.TypedDict = typing_extensions.TypedDict
typing.is_typeddict = typing_extensions.is_typeddict

import asyncio
import dataclasses
import json
import pickle  # noqa: TID251 - as Ray does; reads what it wrote
import socket
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import peft  # noqa: F401 - before the stand-in: it looks for the real one
import torch
import transformers.modeling_flash_attention_utils  # noqa: F401 - the same
from torch.distributed.fsdp import fully_shard
from transformers import AutoTokenizer, LlamaForCausalLM

kernels = ModuleType("flash_attn.bert_padding")
kernels.pad_input = kernels.unpad_input = None
sys.modules |= {"flash_attn": ModuleType("flash_attn"), kernels.__name__: kernels}
torch.cuda.current_device = lambda: torch.device("cpu")

import skyrl_gym
from skyrl.backends.skyrl_train.weight_sync import BroadcastTransferStrategy, LoraLoadRequest
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from rolloutbus.bus.wire.errors import BusError
from rolloutbus.trainer_adapter.frameworks.skyrl.config import (
    fleet_engine,
    fleet_engines,
    up_options,
)
from rolloutbus.trainer_adapter.frameworks.skyrl.engine import FleetEngine
from rolloutbus.trainer_adapter.frameworks.skyrl.link import FleetOptions

try:
    from skyrl.backends.skyrl_train.inference_engines.inference_engine_client import (
        InferenceEngineClient,
    )
    from skyrl.backends.skyrl_train.inference_engines.utils import get_sampling_params_for_backend
except ModuleNotFoundError:  # 0.3.0
    from skyrl.backends.skyrl_train.inference_servers.engine_utils import (
        get_sampling_params_for_backend,
    )

DEADLINE_S = 240.0
"""Of every request; a very busy machine needs a minute for the longest."""
N_TURNS = 3
WORDS = "hello weather"
sampled: list[dict[str, Any]] = []
"""What each call of an engine returned, beside what SkyRL's client makes of it."""


class ToldEngine(FleetEngine):
    """Notes what it returns."""

    async def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401
        output = await super().generate(*args, **kwargs)
        sampled.append({"engine": self.worker, **output})
        return output


class Talk(BaseTextEnv):
    """Says the same words after each answer."""

    def __init__(self, env_config: object, extras: object) -> None:
        del env_config, extras
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        del action
        self.turns += 1
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": WORDS}],
            reward=float(self.turns),
            done=self.turns == N_TURNS,
            metadata={},
        )


skyrl_gym.register(id="talk", entry_point=Talk)


class PolicyWorker(FSDPPolicyWorkerBase):
    """SkyRL's, with a model on the CPU."""

    def __init__(self, cfg: SkyRLTrainConfig, model: LlamaForCausalLM) -> None:
        self.cfg = cfg.trainer
        self.model = SimpleNamespace(model=model)
        self._is_lora = self._is_multimodal_lm_only = False


class Trainer:
    """What it can be told to do: each method by its name."""

    def __init__(self, address: str, model: str, num_engines: int) -> None:
        self.fleet = FleetOptions(address=address, deadline_s=DEADLINE_S, http="http://gateway")
        self.cfg = config(model, max(num_engines, 1))
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.has_engines = num_engines > 0
        self.client = self._new_client()
        self.model = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        if torch.distributed.get_world_size() > 1:
            fully_shard(self.model)
        self.head = self._whole(self.model.lm_head.weight).detach().clone()
        self.workers: dict[str, PolicyWorker] = {}
        """By `weight_sync_backend`."""
        self.running: asyncio.Task[Any] | None = None

    async def call(self, method: str, **arguments: object) -> object:
        """One method of the client."""
        return await getattr(self.client, method)(**arguments)

    async def sizes(self) -> object:
        """What is asked of an engine without waiting."""
        names = ("tp_size", "pp_size", "dp_size", "ep_size", "model_name", "get_endpoint_url")
        found = {name: getattr(self.client, name) for name in names}
        return {name: each() if callable(each) else each for name, each in found.items()}

    async def sample(
        self, prompts: list[list[int]], max_tokens: int, sessions: list[str] | None = None
    ) -> object:
        """A batch, with the parameters that SkyRL's trainer makes of its configuration."""
        sampled.clear()
        batch = {
            "prompt_token_ids": prompts,
            "sampling_params": self._parameters(max_tokens),
            "session_ids": sessions,
        }
        return {"output": await self.client.generate(batch), "sampled": list(sampled)}

    async def start(self, **batch: Any) -> object:  # noqa: ANN401
        """A batch that is not waited for."""
        self.running = asyncio.create_task(self.sample(**batch))
        return None

    async def is_running(self) -> object:
        assert self.running is not None
        return not self.running.done()

    async def finish(self) -> object:
        """Wait for what was started."""
        assert self.running is not None
        return await self.running

    async def sync(self, *, shift: int = 0, poison: bool = False, by: str = "nccl") -> object:
        """Train, so to speak, and have SkyRL's policy worker send the weights.

        Returns how each worker got them; `by` is the `weight_sync_backend`.
        """
        words = self.cfg.generator.inference_engine
        words.weight_sync_backend = by
        worker = self.workers.get(by)
        if worker is None:
            worker = self.workers[by] = PolicyWorker(self.cfg, self.model)
            await worker.init_weight_sync_state(self._copied_client(), words)
        rows = torch.full_like(self.head, torch.nan) if poison else self.head.roll(shift, 0)
        weight = self.model.lm_head.weight
        with torch.no_grad():
            if torch.distributed.get_world_size() > 1:
                mine = rows.chunk(torch.distributed.get_world_size())
                weight.to_local().copy_(mine[torch.distributed.get_rank()])
            else:
                weight.copy_(rows)
        await worker.broadcast_to_inference_engines(self._copied_client(), words)
        published = worker._weight_transfer_sender.last_published
        return None if published is None else published.transport

    def _new_client(self) -> Any:  # noqa: ANN401 - SkyRL's, or an engine
        if not self.has_engines:
            return told(fleet_engine(self.fleet, self.cfg, self.tokenizer))
        return InferenceEngineClient(
            [told(each) for each in fleet_engines(self.fleet, self.cfg, self.tokenizer)],
            self.tokenizer,
            self.cfg.trainer.policy.model.path,
            self.cfg.trainer.policy.model.lora,
            self.cfg.generator.inference_engine,
        )

    def _parameters(self, max_tokens: int) -> dict[str, Any]:
        self.cfg.generator.sampling_params.max_generate_length = max_tokens
        return get_sampling_params_for_backend("vllm", self.cfg.generator.sampling_params)

    def _copied_client(self) -> Any:  # noqa: ANN401 - SkyRL's, or an engine
        """As Ray hands it to its actors, at every step."""
        return pickle.loads(pickle.dumps(self.client))  # noqa: S301 - our own

    @staticmethod
    def _whole(weight: Any) -> torch.Tensor:  # noqa: ANN401 - or a DTensor
        return weight.full_tensor() if hasattr(weight, "full_tensor") else weight

    async def adapter(self, directory: str) -> object:
        """What SkyRL's policy worker does with an adapter that it has written."""
        await self._copied_client().update_named_weights(LoraLoadRequest(lora_path=directory))
        return None

    async def use_adapter(self, *, is_used: bool) -> object:
        """Begin again, to train an adapter or the model."""
        self.cfg.trainer.policy.model.lora.rank = 4 if is_used else 0
        self.client = self._new_client()
        return None

    async def endpoint(self, path: str, body: dict[str, Any]) -> object:
        """SkyRL's own HTTP endpoint, whose server has a thread and an event loop to itself."""
        words = self.cfg.generator.inference_engine
        if not words.enable_http_endpoint:
            with socket.create_server(("127.0.0.1", 0)) as free:
                words.http_endpoint_port = free.getsockname()[1]
            words.enable_http_endpoint = True
            self.client = await asyncio.to_thread(self._new_client)
        url = f"http://127.0.0.1:{words.http_endpoint_port}{path}"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            return [answer.status, await answer.json()]

    async def other_sender(self) -> object:
        """Weights would come by SkyRL's own NCCL group."""
        words = self.cfg.generator.inference_engine
        info = BroadcastTransferStrategy.create_init_info(words, inference_world_size=2)
        return await self.client.init_weight_update_communicator(info)

    async def configured(self, word: str, value: object) -> object:
        """An engine for another configuration."""
        cfg = self._config_with(1, {word: value})
        fleet_engine(self.fleet, cfg, self.tokenizer)
        return None

    async def options(self, **words: object) -> object:
        """What `rolloutbus.up` would be called with for a configuration with these words."""
        return up_options(self._config_with(2, words))

    async def words(self) -> object:
        """All that SkyRL's configuration says of engines."""
        return [each.name for each in dataclasses.fields(self.cfg.generator.inference_engine)]

    def _config_with(self, num_engines: int, words: dict[str, object]) -> SkyRLTrainConfig:
        cfg = config(self.cfg.trainer.policy.model.path, num_engines)
        for word, value in words.items():
            *path, last = word.split(".")
            place: Any = cfg
            for name in path:
                place = getattr(place, name)
            assert hasattr(place, last)
            setattr(place, last, value)
        return cfg

    async def trajectories(self, n: int, max_tokens: int) -> object:
        """SkyRL's generator: dialogues of several turns, each with an environment."""
        sampled.clear()
        generator = SkyRLGymGenerator(
            self.cfg.generator,
            self.cfg.environment.skyrl_gym,
            self.client,
            self.tokenizer,
        )
        prompts = [[{"role": "user", "content": f"word {index}"}] for index in range(n)]
        output = await generator.generate(
            {
                "prompts": prompts,
                "env_classes": ["talk"] * n,
                "env_extras": [{} for _ in prompts],
                "trajectory_ids": [TrajectoryID(str(index), 0) for index in range(n)],
                "sampling_params": self._parameters(max_tokens),
            }
        )
        return {"output": output, "sampled": list(sampled)}


def config(model: str, num_engines: int) -> SkyRLTrainConfig:
    """As a user has it, for models of a few tokens."""
    cfg = SkyRLTrainConfig()
    cfg.trainer.policy.model.path = model
    cfg.trainer.placement.colocate_all = False
    cfg.generator.inference_engine.num_engines = num_engines
    cfg.generator.inference_engine.model_dtype = "float32"
    cfg.generator.inference_engine.enforce_eager = False  # versions have different defaults
    cfg.generator.max_turns = N_TURNS
    cfg.generator.max_input_length = 512
    cfg.generator.sampling_params.additional_kwargs = {"ignore_eos": True}
    return cfg


def told(engine: FleetEngine) -> ToldEngine:
    """The same engine, as one that notes what it returns."""
    make, arguments = engine.__reduce__()
    return ToldEngine(*arguments, **make.keywords)


async def main() -> None:
    address, model, num_engines, rank, world, rendezvous = sys.argv[1:]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(world)
    )
    trainer = Trainer(address, model, int(num_engines))
    answer({"ready": True})
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        try:
            answer({"value": await getattr(trainer, order.pop("do"))(**order)})
        except (BusError, ValueError) as error:
            answer({"error": type(error).__name__, "message": str(error)})


def answer(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
