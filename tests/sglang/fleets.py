"""Fleets whose workers run the real SGLang, on a CPU."""

import os
from pathlib import Path
from typing import Any

from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.engine_worker.settings import HostSettings
from rolloutbus.launcher.settings import UpOptions
from tests.sglang import stand_ins
from tests.sglang.models import MAX_CONTEXT, SLOTS

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Compilation takes longer than what it saves a tiny model.
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Of workers, besides the path of the stand-ins for what only CUDA has."""


PATIENT = LeaseSettings(lease_s=30.0, holder_s=24.0, recovery_s=31.0)
"""Nobody who lives is taken for dead on a busy machine."""


def worker_environment() -> dict[str, str]:
    """What the environment of a fleet must say so that SGLang starts without a GPU."""
    path = os.pathsep.join(filter(None, [str(stand_ins.PATH), os.environ.get("PYTHONPATH", "")]))
    return {**ENVIRONMENT, "PYTHONPATH": path}


def engine_options(*, text: bool = False, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
    """SglangSettings for a tiny model; `arguments` are SGLang's own."""
    return {
        "device": "cpu",
        "dtype": "float32",
        "slots": SLOTS,
        "text": text,
        "arguments": {
            # Room for an endless rollout in each slot.
            "max_total_tokens": SLOTS * MAX_CONTEXT,
            "chunked_prefill_size": 512,
            "random_seed": 0,
            **arguments,
        },
    }


def fleet_of(model: Path, **engine: Any) -> UpOptions:  # noqa: ANN401
    """One worker; `engine` as for `engine_options`. Each worker takes 20 s to start and 1.5 GB."""
    return {
        "model": model,
        "workers": 1,
        "engine": "sglang",
        "engine_options": engine_options(**engine),
        "lease": PATIENT,
        "host": HostSettings(wedged_s=90.0),
    }
