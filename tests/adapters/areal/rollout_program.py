"""AReaL's rollout engine on a fleet, with weight updates as its trainers send them.

Prints a JSON line for each step. Run by the tests beside it, in an environment with AReaL.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# What it imports is installed in the environment that runs it.

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
import torch
from areal.api import InferenceEngine, WeightUpdateMeta
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.trainer import rl_trainer
from areal.utils import name_resolve, names
from areal.workflow.rlvr import RLVRWorkflow
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolloutbus.trainer_adapter.frameworks.areal import use_fleet
from tests.lora_adapters import random_lora

PROMPTS = [{"text": text} for text in ("ab=", "hello=", "xyz=", "a=")]
GROUP = 2
N_TOKENS = 96
DEADLINE_S = 60.0
WHO = {"experiment_name": "fleet", "trial_name": "tiny"}


def n_different(prompt: str, completion: str, *_: object, **__: object) -> float:
    """Reward: how many different characters there are."""
    del prompt
    return float(len(set(completion)))


def input_ids_of(prompt: str, tokenizer: Any, _: bool) -> list[int]:  # noqa: ANN401 - untyped, as are models
    return tokenizer.encode(prompt, add_special_tokens=False)


def config_of(*, use_lora: bool) -> InferenceEngineConfig:
    return InferenceEngineConfig(
        **WHO,
        backend="sglang:d1",
        consumer_batch_size=len(PROMPTS),
        max_concurrent_rollouts=2 * len(PROMPTS),
        max_head_offpolicyness=2,
        request_timeout=60,
        setup_timeout=60,
        pause_grace_period=0,
        use_lora=use_lora,
    )


def trained(model: Any, seed: int) -> None:  # noqa: ANN401
    """What a step does to weights."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn(each.shape, generator=chance), alpha=0.02)


def publish(engine: InferenceEngine, model: Any, meta: WeightUpdateMeta) -> None:  # noqa: ANN401
    """As AReaL's FSDP engine does it, and the trainer around it."""
    engine.pause()
    engine.pause_generation()
    future = engine.update_weights_from_disk(meta)
    assert meta.path is not None
    if meta.use_lora:
        random_lora(model, seed=meta.version or 0).save(Path(meta.path))
    else:
        model.save_pretrained(meta.path)
    name = names.update_weights_from_disk(*WHO.values(), engine.get_version())
    name_resolve.add(name, str(time.time()))
    future.result()
    engine.continue_generation()
    engine.set_version(meta.version)
    engine.resume()


def until_running(gateway: str) -> None:
    """Wait until engines sample."""
    give_up_at = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up_at:
        reply = requests.get(f"http://{gateway}/list_workers", timeout=DEADLINE_S)
        if any(each["n_running"] for each in reply.json()["workers"]):
            return
    raise TimeoutError("no engine samples")


def logprobs_of(model: Callable[..., Any], row: dict[str, torch.Tensor]) -> torch.Tensor:
    """float32 [tokens]: of a sequence's tokens under these weights; of the first one 0."""
    with torch.no_grad():
        logits = model(row["input_ids"].long().unsqueeze(0)).logits[0]
    told = logits.log_softmax(-1)[:-1].gather(-1, row["input_ids"][1:, None].long()).squeeze(-1)
    return torch.cat([torch.zeros(1), told])


def worst_ratio(rows: list[dict[str, torch.Tensor]], model_of: Callable[[int], Any]) -> float:
    """How far a sampled token's probability is from that under the version that it names."""
    worst = 0.0
    for row in rows:
        for version in set(row["versions"].tolist()) - {-1}:
            chosen = row["versions"] == version
            truth = logprobs_of(model_of(version), row)[chosen]
            worst = max(worst, float((truth - row["logprobs"][chosen]).exp().sub(1).abs().max()))
    return worst


def rows_of(batch: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Sequences without padding."""
    return [
        {name: each[i][mask.bool()] for name, each in group.items() if each.dim() > 1}
        for group in batch
        for i, mask in enumerate(group["attention_mask"])
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gateway")
    parser.add_argument("model")
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lora", action="store_true")
    given = parser.parse_args()

    name_resolve.reconfigure(NameResolveConfig(nfs_record_root=f"{given.directory}/names"))
    use_fleet()
    engine = rl_trainer.RemoteSGLangEngine(config_of(use_lora=given.lora))
    engine.initialize(engine_id="0", addr=given.gateway, train_data_parallel_size=1)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.eos_token_id = tokenizer.bos_token_id  # RLVRWorkflow wants one
    meta = WeightUpdateMeta.from_disk(
        *WHO.values(),
        given.directory,
        use_lora=given.lora,
        lora_name="math",
        lora_keep_versions=2,
        clear_checkpoint_after_load=False,
    )
    paths: dict[int, Path] = {0: Path(given.model)}

    def model_of(version: int) -> Any:  # noqa: ANN401 - transformers is untyped
        if given.lora:
            return random_lora(model, seed=version).merged(model)
        return AutoModelForCausalLM.from_pretrained(paths[version], dtype=torch.float32)

    workflow = RLVRWorkflow(
        n_different,
        GenerationHyperparameters(max_new_tokens=N_TOKENS, max_tokens=120, lora_name="math"),
        tokenizer,
        get_input_ids_fn=input_ids_of,
        data_extract_prompt_fn=lambda data: data["text"],
    )
    workflow.gconfig.stop_token_ids = []  # a tiny model would say one of them at once
    if given.lora:  # AReaL has a server begin with its version 0
        first = random_lora(model, seed=0).save(Path(given.directory) / "first")
        body = {"lora_name": "math-v0", "lora_path": str(first)}
        url = f"http://{given.gateway}/load_lora_adapter"
        requests.post(url, json=body, timeout=DEADLINE_S).raise_for_status()
    loader = StatefulDataLoader(PROMPTS, batch_size=len(PROMPTS), collate_fn=list)
    for step in range(1, given.steps + 1):
        new = meta.with_version(step)
        paths[step] = Path(str(new.path))
        if given.lora:
            batch = engine.prepare_batch(loader, workflow, group_size=GROUP)
            publish(engine, model, new)
        else:
            for data in PROMPTS:
                engine.submit(data, workflow, group_size=GROUP)
            until_running(given.gateway)
            print(json.dumps({"running": step}), flush=True)
            trained(model, seed=step)
            publish(engine, model, new)
            batch = engine.wait(len(PROMPTS), timeout=DEADLINE_S)
        rows = rows_of(batch)
        told = {
            "step": step,
            "lengths": [len(row["input_ids"]) for row in rows],
            "versions": [sorted(set(row["versions"].tolist()) - {-1}) for row in rows],
            "ratio_error": worst_ratio(rows, model_of),
        }
        print(json.dumps(told), flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
