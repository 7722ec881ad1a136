"""TRL's GRPOTrainer on a fleet, as a user writes it. Prints a JSON line for each step.

Run by the tests beside it, in an environment with TRL.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# What it imports is installed in the environment that runs it.

import argparse
import json
import os
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # `rollout_func` says that it is experimental

from datasets import Dataset
from peft import LoraConfig
from poison import Poison
from transformers import PrinterCallback, TrainerCallback, TrainerState
from trl import GRPOConfig, GRPOTrainer

from rolloutbus.trainer_adapter.frameworks.trl import FleetOptions, RolloutFunc, use_fleet

PROMPTS = ["ab=", "hello=", "xyz=", "a="]
runs: list[list[tuple[int, int]]] = []
texts: list[str] = []


def n_different(completions: list[str], **columns: Any) -> list[float]:  # noqa: ANN401
    """Reward: how many different characters there are."""
    runs.extend(columns.get("weight_versions", []))
    texts.extend(completions)
    return [float(len(set(text))) for text in completions]


class Told(TrainerCallback):
    """Prints what the trainer logs."""

    def on_log(self, _args: object, state: TrainerState, _: object, **more: Any) -> None:  # noqa: ANN401
        if state.is_world_process_zero:
            sampled = {"runs": runs, "texts": texts}
            print(json.dumps({"step": state.global_step, **more["logs"], **sampled}), flush=True)
            runs.clear()
            texts.clear()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("model")
    parser.add_argument("directory")
    parser.add_argument("--how", choices=["server", "function"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--poison", type=int, default=0, help="the step whose update fails")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--regex", help="what each completion must match")
    given = parser.parse_args()

    fleet = FleetOptions(address=given.address, deadline_s=240)
    is_server = given.how == "server"
    if is_server:
        use_fleet(fleet)
    trainer = GRPOTrainer(
        model=given.model,
        reward_funcs=n_different,
        rollout_func=None if is_server else RolloutFunc(fleet),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if given.lora else None,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 16}),
        callbacks=[Poison(given.poison), Told()],
        args=GRPOConfig(
            output_dir=given.directory,
            max_steps=given.steps,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=12,
            learning_rate=1e-2,
            use_vllm=is_server,
            vllm_mode="server",
            vllm_structured_outputs_regex=given.regex,
            use_cpu=True,
            bf16=False,
            logging_steps=1,
            disable_tqdm=True,
            save_strategy="no",
            report_to=[],
        ),
    )
    trainer.remove_callback(PrinterCallback)  # it prints, too
    trainer.train()


if __name__ == "__main__":
    main()
