"""Fleets whose worker runs the real SGLang on a GPU."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import rolloutbus
from rolloutbus import RolloutClient
from rolloutbus.errors import ProcessFailed
from rolloutbus.launcher.settings import UpOptions

DEADLINE_S = 120.0
SLOTS = 48
KV_TOKENS = 32_768


class Served(NamedTuple):
    """A fleet and the model that it serves, in float32."""

    client: RolloutClient
    model: Any


def gpu_fleet(model: Path, *, text: bool = False, **arguments: Any) -> UpOptions:  # noqa: ANN401
    """One worker; `arguments` are SGLang's own."""
    return {
        "model": model,
        "workers": 1,
        "engine": "sglang",
        "engine_options": {
            "dtype": "bfloat16",
            "slots": SLOTS,
            "text": text,
            "arguments": {
                "attention_backend": "triton",
                "sampling_backend": "pytorch",
                "mem_fraction_static": 0.4,
                "max_total_tokens": KV_TOKENS,
                "cuda_graph_max_bs_decode": SLOTS,
                "disable_prefill_cuda_graph": True,
                "random_seed": 0,
                **arguments,
            },
        },
    }


@asynccontextmanager
async def running(options: UpOptions) -> AsyncGenerator[RolloutClient]:
    """A client of a fleet that runs meanwhile; if it does not start, its log is in the error."""
    try:
        async with (
            rolloutbus.up(**options) as fleet,
            rolloutbus.connect(fleet.address, name="tests") as client,
        ):
            yield client
    except ProcessFailed as failed:
        failed.add_note(failed.log)
        raise
