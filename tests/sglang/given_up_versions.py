"""An engine that stages versions which are given up meanwhile, and what memory it keeps of them.

`python -m tests.sglang.given_up_versions`: one line of JSON in, the engine's settings; one line
out: what became of each version, and after each the mappings of versions in the scheduler.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file  # pyright: ignore[reportUnknownVariableType] - untyped

from rolloutbus.bus.weights.manifest import Bytes
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.engine_worker.engines.sglang.engine import SglangEngine
from rolloutbus.engine_worker.engines.sglang.settings import SglangSettings
from rolloutbus.launcher.fleet import children_of, command_of
from tests.sglang.processes import SCHEDULER

N_VERSIONS = 12
SIZE_BYTES = 64 << 20
"""Of each version's memory: staging it takes longer than to be told that it is not wanted."""
BETWEEN_S = 0.001


def main() -> None:
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    out, sys.stdout = sys.stdout, sys.stderr  # SGLang prints
    engine = SglangEngine(SglangSettings(**order["settings"]), lambda _: None)
    try:
        (file,) = Path(order["settings"]["model"]).glob("*.safetensors")
        tensors = load_file(file)
        told: list[str] = []
        kept: list[int] = []
        for version in range(1, N_VERSIONS + 1):
            told.append(_give_up(engine, version, tensors))
            kept.append(_n_mapped())
    finally:
        engine.close()
    out.write(json.dumps({"told": told, "kept": kept}) + "\n")


def _give_up(engine: SglangEngine, version: int, tensors: dict[str, np.ndarray[Any, Any]]) -> str:
    """Stage it in fresh memory, and give it up until the engine says what became of it."""
    memory = engine.weights.shared_buffer(SIZE_BYTES)
    raws: dict[str, Bytes] = {}
    end = SIZE_BYTES
    for name, each in tensors.items():
        end -= -(-each.nbytes // 64) * 64
        raws[name] = memory[end : end + each.nbytes]
        raws[name][:] = each.reshape(-1).view(np.uint8)
    told: list[str] = []

    def stage() -> None:
        try:
            engine.weights.stage(version, raws)
            told.append("staged")
        except EngineFailed as error:
            told.append(str(error))

    staging = threading.Thread(target=stage)
    staging.start()
    while staging.is_alive():
        engine.weights.unstage(version)
        staging.join(BETWEEN_S)
    engine.weights.unstage(version)
    return told[0]


def _n_mapped() -> int:
    """Versions whose memory the engine's scheduler has mapped."""
    (scheduler,) = _schedulers()
    lines = Path(f"/proc/{scheduler}/maps").read_text(encoding="utf-8").splitlines()
    found = {line.split()[4] for line in lines if "memfd:rolloutbus" in line}
    return len(found)


def _schedulers() -> list[int]:
    waiting, found = [os.getpid()], list[int]()
    while waiting:
        for pid in children_of(waiting.pop()):
            waiting.append(pid)
            if command_of(pid)[:1] and command_of(pid)[0].startswith(SCHEDULER):
                found.append(pid)
    return found


if __name__ == "__main__":
    main()
