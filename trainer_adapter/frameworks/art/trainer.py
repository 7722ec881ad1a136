"""A plain trainer of low-rank adapters: ART's packed trajectories and loss, PEFT and torch.

ART's own trainer is Unsloth's, which needs a GPU. This one computes the same loss, one trajectory
at a time, on any device.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# ART and PEFT are not installed where types are checked.

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from art import dev
from art.loss import loss_fn, shift_tensor
from art.preprocessing.inputs import create_train_inputs
from art.preprocessing.pack import DiskPackedTensors, packed_tensors_from_dir
from art.types import TrainConfig
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.frameworks.art.settings import PEFT_DEFAULTS, TRAINER_DEFAULTS

Metrics = dict[str, float]
REFERENCE = "reference"
"""Name of an adapter that a KL penalty is measured against."""
PADDING = -1
"""ART's group of the tokens behind a trajectory."""


class LoraTrainer:
    """One model with one adapter, and its optimizer."""

    def __init__(
        self,
        base_model: str,
        checkpoint: str | None,
        given: Mapping[str, Mapping[str, Any]],
        device: str,
    ) -> None:
        """Load the model, and the adapter of a checkpoint or a new one.

        Args:
            base_model: directory or name.
            checkpoint: directory of a PEFT adapter; None: a new one, which changes nothing yet.
            given: `peft_args` and `trainer_args` of ART's `InternalModelConfig`, where they differ
                from the defaults.
            device: as torch names it.
        """
        self._device = torch.device(device)
        self._base_model = base_model
        self._args = {**TRAINER_DEFAULTS, **given.get("trainer_args", {})}
        peft_args = {**PEFT_DEFAULTS, **given.get("peft_args", {})}
        torch.manual_seed(peft_args.pop("random_state"))
        is_frugal = bool(peft_args.pop("use_gradient_checkpointing"))
        dtype = torch.float32 if self._device.type == "cpu" else "auto"
        base = AutoModelForCausalLM.from_pretrained(base_model, dtype=dtype)
        if checkpoint is None:
            model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **peft_args))
        else:
            model = PeftModel.from_pretrained(base, checkpoint, is_trainable=True)
        self.model: Any = model.to(self._device)
        if is_frugal and self._device.type != "cpu":
            self.model.enable_input_require_grads()
            self.model.gradient_checkpointing_enable()
        self._optimizer = torch.optim.AdamW(
            [each for each in self.model.parameters() if each.requires_grad],
            betas=(self._args["adam_beta1"], self._args["adam_beta2"]),
            eps=self._args["adam_epsilon"],
            weight_decay=self._args["weight_decay"],
        )

    @property
    def rank(self) -> int:
        """Of the adapter."""
        return self._adapter.r

    @property
    def alpha(self) -> float:
        """The product of the adapter's factors is scaled by alpha / rank."""
        return self._adapter.lora_alpha

    @property
    def uses_rslora(self) -> bool:
        """It is scaled by alpha / sqrt(rank) instead."""
        return self._adapter.use_rslora

    @property
    def modules(self) -> list[str]:
        """Names of the modules that the adapter is for, or `all-linear`."""
        modules = self._adapter.target_modules
        return [modules] if isinstance(modules, str) else sorted(modules)

    @property
    def _adapter(self) -> Any:  # noqa: ANN401 - PEFT's
        return self.model.peft_config["default"]

    def save(self, directory: str) -> None:
        """Write the adapter in PEFT's layout."""
        self.model.save_pretrained(directory, selected_adapters=["default"])

    def merged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's tensors under their own names, the adapter merged into them.

        Nothing is changed: the sum is made for each tensor when it is its turn.
        """
        for name, tensor in self.model.get_base_model().named_parameters():
            if ".lora_" in name:
                continue
            owner, is_adapted, weight = name.partition(".base_layer.")
            if not is_adapted:
                yield name, tensor.detach()
                continue
            layer = self.model.get_base_model().get_submodule(owner)
            with torch.no_grad():
                change = layer.get_delta_weight("default") if weight == "weight" else 0
                yield f"{owner}.{weight}", tensor + change

    def save_merged(self, directory: str) -> None:
        """Write the whole model, the adapter merged into it, and the base model's tokenizer."""
        self.model.get_base_model().save_pretrained(
            directory, state_dict={name: each.contiguous() for name, each in self.merged()}
        )
        AutoTokenizer.from_pretrained(self._base_model).save_pretrained(directory)

    def move(self, *, is_aside: bool) -> None:
        """Bring model and optimizer to host memory, or back to the device."""
        device = torch.device("cpu") if is_aside else self._device
        self.model.to(device)
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to(device)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    async def train(
        self, packed: DiskPackedTensors, config: TrainConfig, dev_config: dev.TrainConfig
    ) -> AsyncIterator[Metrics]:
        """Train on ART's packed trajectories; tells of each step of the optimizer.

        Raises:
            SettingsError: they hold images.
        """
        tensors = packed_tensors_from_dir(**packed)
        if any(each is not None for each in tensors["pixel_values"]):
            raise SettingsError("trajectories with images: this trainer has no use for them")
        n_sequences = tensors["tokens"].shape[0]
        if dev_config.get("precalculate_logprobs", False):
            await asyncio.to_thread(self._replace_logprobs, tensors)
        n_together = config.grad_accumulation_sequences or 1
        for first in range(0, n_sequences, n_together):
            offsets = range(first, min(first + n_together, n_sequences))
            inputs = [
                _trimmed(create_train_inputs(tensors, each, config, dev_config, warmup=False))
                for each in offsets
            ]
            yield await asyncio.to_thread(self._step, inputs, config, dev_config)

    def _step(
        self, batch: list[dict[str, Any]], config: TrainConfig, dev_config: dev.TrainConfig
    ) -> Metrics:
        self.model.train()
        told: list[Metrics] = []
        power = dev_config.get("num_trajectories_learning_rate_multiplier_power", 0.0)
        n_trajectories = 0
        for held in batch:
            inputs: Any = {name: each.to(self._device) for name, each in held.items()}
            n_trajectories += len(inputs["group_ids"].unique()) - len(inputs["parent_ids"].unique())
            logprobs, entropies = self._logprobs(inputs["tokens"])
            reference = None
            if config.kl_penalty_coef > 0:
                with self._as_reference(dev_config.get("kl_ref_adapter_path")), torch.no_grad():
                    reference, _ = self._logprobs(inputs["tokens"])
            loss = loss_fn(inputs, logprobs, reference, entropies, dev_config)
            (loss.policy_loss / len(batch)).backward()
            metrics = {
                "loss/train": loss.policy_loss,
                "loss/entropy": loss.entropy,
                "offpolicy/logprob_gap": _gap(inputs, logprobs),
            }
            if loss.kl_policy_ref is not None:
                metrics["loss/kl_policy_ref"] = loss.kl_policy_ref
            told.append({name: each.item() for name, each in metrics.items()})
        rate = config.learning_rate * max(n_trajectories, 1) ** power
        norm = self._update(rate)
        means = {name: sum(each[name] for each in told) / len(told) for name in told[0]}
        return {**means, "loss/learning_rate": rate, "loss/grad_norm": norm}

    def _update(self, rate: float) -> float:
        """One step of the optimizer; returns the gradient's norm before it was clipped."""
        [group] = self._optimizer.param_groups
        norm = torch.nn.utils.clip_grad_norm_(group["params"], self._args["max_grad_norm"])
        group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def _logprobs(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob of each token's successor, and the entropy there: float32 [1, n_tokens] both."""
        every = torch.log_softmax(self.model(input_ids=tokens).logits.float(), dim=-1)
        successors = shift_tensor(tokens, 0).unsqueeze(-1)
        entropies = -(every.exp() * every).sum(dim=-1)
        return every.gather(-1, successors).squeeze(-1), entropies

    def _replace_logprobs(self, tensors: Any) -> None:  # noqa: ANN401 - ART's
        """What the model says of the tokens now stands for what was said when they were sampled."""
        tensors["original_logprobs"] = tensors["logprobs"].clone()
        computed = torch.zeros_like(tensors["logprobs"])
        self.model.eval()
        with torch.no_grad():
            for row, tokens in enumerate(tensors["tokens"]):
                n_tokens = int((tensors["group_ids"][row] != PADDING).sum())
                held = tokens[None, :n_tokens].to(self._device)
                logprobs, _ = self._logprobs(held)
                computed[row, 1:n_tokens] = logprobs[0, :-1].cpu()
        tensors["logprobs"] = computed

    @contextmanager
    def _as_reference(self, adapter: str | None) -> Iterator[None]:
        """The model with another adapter, a directory's, or with none."""
        if adapter is None:
            with self.model.disable_adapter():
                yield
            return
        self.model.load_adapter(adapter, adapter_name=REFERENCE)
        self.model.set_adapter(REFERENCE)
        try:
            yield
        finally:
            self.model.set_adapter("default")
            self.model.delete_adapter(REFERENCE)


def _gap(inputs: Mapping[str, torch.Tensor], logprobs: torch.Tensor) -> torch.Tensor:
    """Mean distance of the trainer's logprobs from the engine's: 0 with the same weights."""
    told = shift_tensor(inputs["logprobs"], float("nan"))
    return (logprobs.detach() - told).abs().nanmean()


def _trimmed(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """One row without its padding, [1, n_tokens] each; ART pads to thousands of tokens."""
    n_tokens = int((inputs["group_ids"] != PADDING).sum())
    tensors = {name: each for name, each in inputs.items() if isinstance(each, torch.Tensor)}
    return {name: each[:, :n_tokens] for name, each in tensors.items()}
