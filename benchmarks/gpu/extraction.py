"""How fast do weights leave a GPU: copied, cast, checked and digested, against a bare copy?

python benchmarks/gpu/extraction.py --json
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from rolloutbus.bus.weights.manifest import Bytes, lay_out, total_bytes
from rolloutbus.trainer_adapter.publisher.tensor_source import HeldTensors
from rolloutbus.trainer_adapter.publisher.weight_writer import CopyWatch, copy_all

ROUNDS = 5


def seconds(work: Callable[[], object]) -> float:
    """The best of some rounds, after one to warm up."""
    work()
    took: list[float] = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return min(took)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="GPU to host, as a publisher does it")
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    options = parser.parse_args()
    model = {
        f"layers.{i}": torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for i in range(options.gib * 8)
    }
    source = HeldTensors(model)
    layout = lay_out((each.name, "BF16", each.shape) for each in source.tensors)
    content: Bytes = np.ones(total_bytes(layout), np.uint8)
    first = next(iter(model.values()))
    pinned = torch.empty_like(first, device="cpu", pin_memory=True)
    pageable = torch.empty_like(first, device="cpu")
    report = {
        "gib": options.gib,
        "pinned_copy_gb_per_s": first.nbytes / seconds(partial(pinned.copy_, first)) / 1e9,
        "pageable_copy_gb_per_s": first.nbytes / seconds(partial(pageable.copy_, first)) / 1e9,
    }
    for n_copiers in (1, 2, 4):
        work = partial(copy_all, content, layout, source, CopyWatch(lambda _: None), n_copiers)
        report[f"extract_{n_copiers}_gb_per_s"] = len(content) / seconds(work) / 1e9
    print(json.dumps({name: round(value, 2) for name, value in report.items()}))


if __name__ == "__main__":
    main()
