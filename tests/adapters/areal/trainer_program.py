"""AReaL's own PPOTrainer on a fleet, as a user writes it: `trainer.yaml` is its configuration.

Prints a JSON line for each step. Run by the tests beside it, in an environment with AReaL.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# What it imports is installed in the environment that runs it.

import json
import sys
from typing import Any

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.trainer import PPOTrainer, rl_trainer
from areal.utils.stats_logger import StatsLogger
from areal.workflow.rlvr import RLVRWorkflow
from datasets import Dataset

from rolloutbus.trainer_adapter.frameworks.areal import use_fleet

TEXTS = ["ab=", "hello=", "xyz=", "a="]


class Words(RLVRWorkflow):
    """AReaL's workflow for plain texts; an answer has its full length."""

    def __init__(self, **of_areal: Any) -> None:  # noqa: ANN401 - AReaL's
        super().__init__(
            n_different,
            get_input_ids_fn=lambda text, tokenizer, _: tokenizer.encode(
                text, add_special_tokens=False
            ),
            data_extract_prompt_fn=lambda data: data["text"],
            **of_areal,
        )
        self.gconfig.stop_token_ids = []  # a tiny model would say one of them at once


class Told(StatsLogger):
    """Prints what the trainer logs."""

    def commit(self, epoch: int, step: int, global_step: int, data: Any) -> None:  # noqa: ANN401
        super().commit(epoch, step, global_step, data)
        print(json.dumps({"step": global_step + 1, **data}), flush=True)


def n_different(_: str, completion: str, *__: object, **___: object) -> float:
    """Reward: how many different characters there are."""
    return float(len(set(completion)))


def main() -> None:
    config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
    rl_trainer.StatsLogger = Told
    use_fleet()
    dataset = Dataset.from_list([{"text": text} for text in TEXTS * 8])
    with PPOTrainer(config, train_dataset=dataset) as trainer:
        trainer.train(
            workflow="tests.adapters.areal.trainer_program.Words",
            workflow_kwargs={"gconfig": config.gconfig, "tokenizer": config.tokenizer_path},
        )


if __name__ == "__main__":
    main()
