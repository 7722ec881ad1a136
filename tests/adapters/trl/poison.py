"""An update that fails once, for the programs beside it."""

# pyright: basic
# TRL's environment runs it.

import json
import logging

import torch
from transformers import TrainerCallback, TrainerState

ADAPTER = "rolloutbus.trainer_adapter.frameworks.trl"


class Poison(TrainerCallback):
    """Spoils a weight after some step, and mends it when the adapter logs that an update failed.

    Prints what it logs. Given to the trainer when it is made, so that it comes before TRL's own
    callback, which sends weights.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._weight: torch.Tensor | None = None
        self._kept = torch.zeros(())
        logging.getLogger(ADAPTER).addHandler(_Heard(self))

    def on_step_end(
        self,
        _args: object,
        state: TrainerState,
        _: object,
        model: torch.nn.Module,
        **__: object,
    ) -> None:
        if state.global_step == self._step:
            self._weight = next(model.parameters()).data[0, :1]
            self._kept = self._weight.clone()
            self._weight.fill_(torch.nan)

    def mend(self) -> None:
        """Bring the weight back."""
        if self._weight is not None:
            self._weight.copy_(self._kept)


class _Heard(logging.Handler):
    def __init__(self, poison: Poison) -> None:
        super().__init__()
        self._poison = poison

    def emit(self, record: logging.LogRecord) -> None:
        print(json.dumps({"warned": record.getMessage()}), flush=True)
        self._poison.mend()
