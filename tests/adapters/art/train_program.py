"""ART's client trains a toy model on backends of the bus, as a user writes it.

Run by the tests beside it, in an environment with ART. Prints a JSON line for each backend.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# What it imports is installed in the environment that runs it.

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import art
import openai
import torch
from art.pipeline_trainer import PipelineTrainer
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolloutbus import RolloutClient, SamplingParams, Want
from rolloutbus.errors import SettingsError
from rolloutbus.trainer_adapter.frameworks.art import DeviceConfig, SGLangBackend, SGLangConfig
from rolloutbus.trainer_adapter.frameworks.art.settings import (
    TIMEOUT_VARIABLE,
    BackendSettings,
    WeightSyncMethod,
)

TEXTS = ["abc", "hello", "m"]
N_EACH = 6
N_TOKENS = 12
N_ASKED = 60
"""Requests beside the training of one backend, at most."""
LONG = [3 + n % 16 for n in range(64)]
"""Token ids: four blocks of the engine's cache."""
BACKENDS: dict[str, tuple[int, WeightSyncMethod, int]] = {
    "split-lora": (1, "lora", 3),
    "shared-lora": (0, "lora", 2),
    "split-disk": (1, "disk", 3),
    "shared-disk": (0, "disk", 2),
    "split-disk again": (1, "disk", 1),
    "split-restart": (1, "restart", 1),
}
"""Name -> GPU that trains (0 is the engine's own), weight_sync_method, steps.

`again` goes on in the directory of the one before.
"""
Line = dict[str, Any]


async def rollout(model: art.TrainableModel, text: str) -> art.Trajectory:
    """One answer; its reward: how many `a` there are, and a little for the letters up to `m`.

    Without those, answers of a model that has learned nothing would often be worth the same, and
    ART trains on no group of equals.
    """
    messages: art.Messages = [{"role": "user", "content": text}]
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=N_TOKENS
    )
    [choice] = answer.choices
    said = choice.message.content or ""
    reward = said.count("a") + 0.01 * sum("a" <= each <= "m" for each in said)
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward)


def groups_of(model: art.TrainableModel) -> Any:  # noqa: ANN401 - ART's
    """A group of rollouts for each text."""
    return art.gather_trajectory_groups(
        (art.TrajectoryGroup(rollout(model, text) for _ in range(N_EACH)) for text in TEXTS),
        pbar_desc=None,
    )


class Asker:
    """Asks for steps by name, whatever the trainer does, and notes what it gets."""

    def __init__(self, model: art.TrainableModel) -> None:
        self._client = model.openai_client().with_options(max_retries=0)
        self._model = model
        self.answers: list[Line] = []
        self.refusals: list[Line] = []

    @asynccontextmanager
    async def asking(self, step: int) -> AsyncIterator[None]:
        """Inside, this step, the one before and the next one are asked for again and again."""
        steps = [each for each in (step - 1, step, step + 1) if each >= 0]
        tasks = [asyncio.create_task(self._ask_for(each)) for each in steps]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_for(self, step: int) -> None:
        while True:
            await self.ask(step)
            await asyncio.sleep(0.02)  # to leave the trainer some of the processor

    async def ask(self, step: int) -> None:
        """Ask once."""
        try:
            answer = await self._client.chat.completions.create(
                model=f"{self._model.name}@{step}",
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=4,
            )
        except openai.APIConnectionError:
            self.refusals.append({"step": step, "status": 0})
        except openai.APIStatusError as error:
            self.refusals.append({"step": step, "status": error.status_code})
        else:
            [choice] = answer.choices
            told = choice.logprobs.content
            self.answers.append(
                {
                    "step": step,
                    "tokens": [int(each.token.removeprefix("token_id:")) for each in told],
                    "logprobs": [each.logprob for each in told],
                }
            )


def judged(answers: list[Line], base: str, directory: Path) -> list[Line]:
    """How far the logprobs of each answer are from those of its step, and of the nearest other."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompt = tokenizer.encode("hello=", add_special_tokens=False)
    truths = {}
    for checkpoint in sorted(directory.iterdir()):
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        truths[int(checkpoint.name)] = PeftModel.from_pretrained(plain, checkpoint).eval()
    found: list[Line] = []
    for answer in [*answers[: -1 : max(len(answers) // N_ASKED, 1)], answers[-1]]:
        tokens = answer["tokens"]
        gaps: dict[int, float] = {}
        for step, model in truths.items():
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0]
            every = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
            mine = every[range(len(tokens)), tokens]
            gaps[step] = (mine - torch.tensor(answer["logprobs"])).abs().max().item()
        own = gaps.pop(answer["step"])
        found.append({"step": answer["step"], "gap": own, "other": min(gaps.values())})
    return found


async def n_cached(client: RolloutClient, lora: str) -> int:
    """Tokens of a long prompt that the engine finds in its cache for an adapter, or for none."""
    sampling, want = SamplingParams(max_new_tokens=1), Want(cached_tokens=True)
    rollout = await client.generate(LONG, sampling, lora=lora, want=want, deadline_s=60)
    return int(rollout.arrays["cached_tokens"][0])


def directory_of(name: str, given: argparse.Namespace) -> Path:
    """Where a backend keeps what it learns."""
    return Path(given.directory) / name.removesuffix(" again")


def backend_of(name: str, given: argparse.Namespace) -> SGLangBackend:
    """A backend whose engine lives in another environment."""
    device, method, _ = BACKENDS[name]
    return SGLangBackend(
        inference_device=0,
        training_devices=[device],
        sglang_config=SGLangConfig(weight_sync_method=method),
        engine="transformers",
        engine_python=given.engine_python,
        engine_options={"threads": 1},
        path=str(directory_of(name, given)),
    )


def model_of(given: argparse.Namespace) -> art.TrainableModel:
    """The model, of which nothing is known yet."""
    return art.TrainableModel(name="agent", project="toy", base_model=given.model)


async def run(name: str, given: argparse.Namespace) -> Line:
    """Train on one backend; returns what there was to see."""
    model = model_of(given)
    line: Line = {"backend": name, "names": [], "steps": [], "rewards": [], "kls": []}
    async with backend_of(name, given) as backend:
        await model.register(backend)
        asker = Asker(model)
        options: Line = {"kl_penalty_coef": 0.1, "kl_penalty_reference_step": 0}
        if name.endswith("again"):
            options = {"precalculate_logprobs": True}
        for _ in range(BACKENDS[name][2]):
            line["names"].append(model.get_inference_name())
            groups = await groups_of(model)
            async with asker.asking(await model.get_step()):
                result = await backend.train(model, groups, learning_rate=1e-2, **options)
            await model.log(groups, metrics=result.metrics, step=result.step, split="train")
            await asker.ask(result.step)
            each = [trajectory.reward for group in groups for trajectory in group]
            line["rewards"].append(sum(each) / len(each))
            line["steps"].append(result.step)
            line["kls"].append(result.metrics.get("loss/kl_policy_ref"))
        checkpoints = directory_of(name, given) / "toy/models/agent/checkpoints"
        line["answers"] = judged(asker.answers, given.model, checkpoints)
        line["refusals"] = asker.refusals
        loras = {"base": ""}
        if BACKENDS[name][1] == "lora":
            loras["newest"] = f"agent-{line['steps'][-1]}"
        client = backend.client_of(model)
        for lora in loras.values():  # the first time nothing is cached
            await n_cached(client, lora)
        line["cached"] = {each: await n_cached(client, lora) for each, lora in loras.items()}
        # At a rate of 0 nothing changes: what was sampled is what the trainer computes.
        still = await backend.train(model, await groups_of(model), learning_rate=0.0)
        line["gap"] = still.metrics["offpolicy/logprob_gap"]
        line["name"] = model.get_inference_name()
        client = backend.client_of(model)  # engines that start anew are another fleet
        line["cached_after"] = {each: await n_cached(client, lora) for each, lora in loras.items()}
    return line


async def pipeline(given: argparse.Namespace) -> Line:
    """ART's PipelineTrainer: rollouts go on with the step that they began with."""
    turns: list[tuple[str, list[str]]] = []

    async def two_turns(model: art.TrainableModel, text: str, _: None) -> art.TrajectoryGroup:
        asked = model.get_inference_name()
        firsts = await asyncio.gather(*(rollout(model, text) for _ in range(N_EACH)))
        seconds = await asyncio.gather(*(rollout(model, text) for _ in range(N_EACH)))
        loras = [
            str((each.messages_and_choices[-1].model_extra or {})["lora"])
            for each in [*firsts, *seconds]
        ]
        turns.append((asked, loras))
        return art.TrajectoryGroup([*firsts, *seconds])

    model = model_of(given)
    async with backend_of("split-lora", given) as backend:
        await model.register(backend)
        trainer = PipelineTrainer(
            model=model,
            backend=backend,
            rollout_fn=two_turns,
            scenarios=TEXTS * 20,
            config=None,
            num_rollout_workers=3,
            min_batch_size=2,
            max_batch_size=2,
            max_steps_off_policy=2,
            max_steps=3,
            learning_rate=1e-2,
            eval_every_n_steps=0,
            eval_at_start=False,
            resume=False,
        )
        first = await model.get_step()
        await trainer.train(handle_signals=False)
        return {
            "backend": "pipeline",
            "first": first,
            "last": await model.get_step(),
            "turns": turns,
        }


def devices(n_gpus: int, **options: Any) -> list[Any]:  # noqa: ANN401 - of DeviceConfig
    """What engine and trainer get on a machine with so many GPUs, and whether they share it."""
    found = DeviceConfig(**options).resolved(n_gpus, 1)
    return [found.inference_device, list(found.training_devices), found.is_shared]


def engine(*, is_shared: bool = False, **words: Any) -> Line:  # noqa: ANN401 - of SGLangConfig
    """Options of SGLang's engine for a configuration, with its arguments beside them."""
    config = SGLangConfig(**words)
    devices = DeviceConfig(
        training_devices=[0 if is_shared else config.tensor_parallel_size], auto_detect=False
    )
    found = BackendSettings(
        devices=devices.resolved(8, config.tensor_parallel_size),
        has_gpu=True,
        config=config,
        engine="sglang",
        engine_python="",
        workers=1,
    ).options_of_engine(rank=8, modules=["q_proj"])
    return {**found.pop("arguments"), **found}


def changed(**words: Any) -> Line:  # noqa: ANN401 - of `engine`
    """What these words change of the engine's options; None: it has no such option any more."""
    before, after = engine(), engine(**words)
    names = before.keys() | after.keys()
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


async def settings(given: argparse.Namespace) -> Line:
    """What is chosen where nothing is said, and what is refused, with its reason."""

    async def registered(name: str = "agent", **internal: Any) -> None:  # noqa: ANN401 - ART's
        model = art.TrainableModel(
            name=name, project="toy", base_model=given.model, _internal_config={**internal}
        )
        await backend_of("split-lora", given).register(model)

    async def made(**options: Any) -> None:  # noqa: ANN401 - of SGLangBackend
        SGLangBackend(path=given.directory, **{"engine": "transformers", **options})

    async def supervised() -> None:
        model = model_of(given)
        model._backend = backend_of("split-lora", given)
        await model.train_sft([art.Trajectory()])

    async def started(within: str) -> float:
        os.environ[TIMEOUT_VARIABLE] = within
        return SGLangConfig().start_timeout_s

    attempts = {
        "no such method": lambda: made(sglang_config=SGLangConfig(weight_sync_method="ftp")),  # type: ignore[arg-type]
        "flush": lambda: made(sglang_config=SGLangConfig(flush_cache_on_sync=True)),
        "tensor parallel": lambda: made(sglang_config=SGLangConfig(tensor_parallel_size=2)),
        "two trainers": lambda: made(training_devices=[1, 2]),
        "twice": lambda: made(inference_device=0, device_config=DeviceConfig()),
        "fake": lambda: made(engine="fake"),
        "name": lambda: registered("my agent"),
        "vllm": lambda: registered(engine_args={"max_num_seqs": 4}),
        "unsloth": lambda: registered(init_args={"load_in_4bit": True}),
        "merged": lambda: registered(rollout_weights_mode="merged"),
        "timeout": lambda: started("soon"),
        "supervised": supervised,
    }
    refused: dict[str, str] = {}
    for name, attempt in attempts.items():
        try:
            await attempt()
        except SettingsError as error:
            refused[name] = str(error)
    return {
        "backend": "settings",
        "refused": refused,
        "devices": [devices(n) for n in (0, 1, 2, 8)],
        "engine": engine(),
        "changed": {
            "memory": changed(mem_fraction_static=0.5),
            "cache": changed(disable_radix_cache=True),
            "steps": changed(max_loras_per_batch=6),
            "context": changed(context_length=4096),
            "tensor parallel": changed(tensor_parallel_size=2),
            "disk": changed(weight_sync_method="disk"),
            "shared": changed(is_shared=True),
        },
        "timeout": await started("180"),
    }


OTHERS = {"pipeline": pipeline, "settings": settings}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("directory")
    parser.add_argument("engine_python")
    parser.add_argument("backends", nargs="+", choices=[*BACKENDS, *OTHERS])
    given = parser.parse_args()
    for name in given.backends:
        line = await (OTHERS[name](given) if name in OTHERS else run(name, given))
        print("told:" + json.dumps(line), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
