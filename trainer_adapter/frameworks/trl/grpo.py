"""`GRPOTrainer` on a fleet: as with a vLLM server, or through a `rollout_func`."""

# pyright: basic, reportMissingImports=false
# TRL is not installed where types are checked, and leaves much untyped.

import functools
import logging
from typing import Any

from accelerate.utils import broadcast_object_list
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from rolloutbus.bus.wire.errors import BusError, SettingsError
from rolloutbus.trainer_adapter.frameworks.fleet import FleetOptions
from rolloutbus.trainer_adapter.frameworks.trl.fleet_client import FleetClient

_log = logging.getLogger(__name__)

N_TRIES = 3
"""Of an update that fails, before a synchronous trainer is told."""


class FleetGeneration(VLLMGeneration):
    """Samples for `GRPOTrainer` on a fleet: TRL's `VLLMGeneration` in server mode, over the bus.

    All ranks make one. The first is the fleet's client: it samples the prompts of all ranks, and
    publishes what TRL gathers from them (FSDP, DeepSpeed, merged PEFT adapters).
    """

    def __init__(self, fleet: FleetOptions, **of_trl: Any) -> None:  # noqa: ANN401 - as TRL has them
        self._fleet = fleet
        super().__init__(**of_trl)

    def _init_vllm(self) -> None:
        if self.mode != "server":
            message = f"vllm_mode={self.mode!r} runs vLLM in the trainer; a fleet wants 'server'"
            raise SettingsError(message)
        self.vllm_client = FleetClient(self._fleet) if self.accelerator.is_main_process else None
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Publish the model's weights; called by all ranks.

        Raises:
            BusError: `N_TRIES` times the workers did not take them. All ranks raise it.
        """
        problem: BusError | None = None
        for n_failed in range(1, N_TRIES + 1):
            problem = self._publish()
            # All ranks gather again, or none.
            problem = broadcast_object_list([problem], from_process=0)[0]
            if problem is None:
                return
            _log.warning("update %d of %d failed: %s", n_failed, N_TRIES, problem)
        assert problem is not None
        raise problem

    def _publish(self) -> BusError | None:
        params = self._iter_named_params()
        if self.vllm_client is None:
            for _ in params:  # to gather them takes all ranks
                pass
            return None
        try:
            self.vllm_client.publish(params)
        except BusError as error:
            return error
        return None


def use_fleet(fleet: FleetOptions) -> None:
    """Have `GRPOTrainer`s with `use_vllm=True, vllm_mode="server"` sample there from now on.

    vLLM need not be installed, and `vllm_server_base_url` and its like mean nothing then.

    Raises:
        SettingsError: this TRL has no such place; see the supported version above.
    """
    if not hasattr(grpo_trainer, "VLLMGeneration"):
        raise SettingsError("this TRL's GRPOTrainer makes no VLLMGeneration: install trl==1.16.*")
    grpo_trainer.VLLMGeneration = functools.partial(FleetGeneration, fleet)


class RolloutFunc:
    """`rollout_func` of a `GRPOTrainer`: samples on a fleet, and publishes after each step.

    Reward functions get `weight_versions`, for each completion its [version, tokens] runs.
    """

    def __init__(self, fleet: FleetOptions) -> None:
        self._fleet = fleet
        self._generation: FleetGeneration | None = None
        self._published_step = -1

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:  # noqa: ANN401
        """Sample; called by TRL on every rank with that one's prompts."""
        generation = self._generation = self._generation or self._generation_of(trainer)
        if trainer.state.global_step != self._published_step:
            generation.sync_weights()
            self._published_step = trainer.state.global_step
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)  # noqa: SLF001 - as TRL does
        n = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        prompt_ids, completion_ids, logprobs, _ = generation.generate(prompt_ids, images, n)
        client = generation.vllm_client
        runs = [] if client is None else [each.version_runs for each in client.last_rollouts]
        runs = broadcast_object_list([runs], from_process=0)[0]
        first = trainer.accelerator.process_index * len(prompts)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": [[value for (value,) in row] for row in logprobs],
            "weight_versions": runs[first : first + len(prompts)],
        }

    def _generation_of(self, trainer: Any) -> FleetGeneration:  # noqa: ANN401 - TRL's
        return FleetGeneration(
            self._fleet,
            mode="server",
            logprobs=0,
            structured_outputs_regex=trainer.args.vllm_structured_outputs_regex,
            generation_kwargs=trainer.args.generation_kwargs,
            **{
                name: getattr(trainer, name)
                for name in (
                    *("model", "accelerator", "processing_class", "repetition_penalty"),
                    *("temperature", "top_p", "top_k", "min_p", "max_completion_length"),
                )
            },
        )
