"""TRL's AsyncGRPOTrainer on a fleet, as a user writes it.

Prints a JSON line for each step, each update and each sample that the trainer takes. Run by the
tests beside it, in an environment with TRL. The kernels that TRL packs rows for exist on GPUs only;
`plain_attention` does the same with PyTorch's own.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# What it imports is installed in the environment that runs it.

import argparse
import json
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from poison import Poison
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback, TrainerState
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)

from rolloutbus.trainer_adapter.frameworks.trl import FleetOptions, FleetRolloutWorker

TEXTS = ["ab", "hello", "xyz", "a"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
N_STALE = 4


def n_different(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """Reward: how many different characters there are."""
    return [float(len(set(turns[0]["content"]))) for turns in completions]


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    *_: int,
    softmax_scale: float,
    **__: object,
) -> torch.Tensor:
    """Causal attention within each part of a row: [tokens, heads, width] as flash-attention's."""
    out = torch.empty_like(query)
    bounds = zip(*(pair for ends in (ends_q, ends_k) for pair in (ends, ends[1:])), strict=False)
    for q, q_end, k, k_end in (map(int, each) for each in bounds):
        if q_end > q:
            mine, keys, values = (
                each.transpose(0, 1) for each in (query[q:q_end], key[k:k_end], value[k:k_end])
            )
            seen = torch.ones(q_end - q, k_end - k, dtype=torch.bool)
            part = torch.nn.functional.scaled_dot_product_attention(
                mine,
                keys,
                values,
                attn_mask=seen.tril(k_end - k - (q_end - q)),
                scale=softmax_scale,
                enable_gqa=True,
            )
            out[q:q_end] = part.transpose(0, 1)
    return out


def tell(**told: Any) -> None:  # noqa: ANN401 - JSON
    print(json.dumps(told), flush=True)


class Told(TrainerCallback):
    """Prints what the trainer logs, and what became of its updates."""

    def __init__(self, worker: FleetRolloutWorker) -> None:
        self._worker = worker

    def on_log(self, _args: object, state: TrainerState, _: object, **more: Any) -> None:  # noqa: ANN401
        tell(step=state.global_step, **more["logs"])

    def on_train_begin(self, *_: object, **__: object) -> None:
        """After TRL's own, which has sent weights."""
        client = self._worker.weight_transfer._client
        assert client is not None
        assert client.last_published is not None
        tell(update=self._worker.model_version, version=client.last_published.version)

    on_step_end = on_train_begin


class Taken:
    """The queue of samples, which prints each one that the trainer takes."""

    def __init__(self, samples: Any, tokenizer: Any) -> None:  # noqa: ANN401 - TRL's
        self._samples = samples
        self._tokenizer = tokenizer

    def get(self, timeout: float) -> Any:  # noqa: ANN401 - TRL's
        sample = self._samples.get(timeout=timeout)
        tokens = sample.input_ids.tolist()
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        tell(group=sample.group_id, tokens=tokens, text=text, of=sample.model_version)
        return sample

    def qsize(self) -> int:
        return self._samples.qsize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("model")
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--poison", type=int, default=0, help="the step whose update fails")
    parser.add_argument("--regex", help="what each completion must match")
    given = parser.parse_args()

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=plain_attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it knows GPUs only

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.eos_token = tokenizer.pad_token
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = qwen3_template
    dataset = Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": text}] for text in TEXTS * 16]}
    )
    args = AsyncGRPOConfig(
        output_dir=given.directory,
        max_steps=given.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        max_inflight_tasks=8,
        queue_maxsize=16,
        max_staleness=N_STALE,
        weight_sync_steps=1,
        token_budget=256,
        learning_rate=1e-3,
        dtype="float32",
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
        report_to=[],
    )
    worker = FleetRolloutWorker.of(
        FleetOptions(address=given.address, deadline_s=240),
        args,
        model=given.model,
        train_dataset=dataset,
        processing_class=tokenizer,
        reward_funcs=[n_different],
        sampling={} if given.regex is None else {"regex": given.regex},
    )
    trainer = AsyncGRPOTrainer(
        model=given.model,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        reward_funcs=[n_different],
        rollout_worker=worker,
        weight_transfer=worker.weight_transfer,
        callbacks=[Poison(given.poison)],
    )
    trainer.rollout_queue = Taken(trainer.rollout_queue, tokenizer)
    trainer.add_callback(Told(worker))  # after TRL's own
    trainer.remove_callback(PrinterCallback)  # it prints, too
    trainer.train()


if __name__ == "__main__":
    main()
