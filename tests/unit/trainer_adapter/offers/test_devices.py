"""Whose GPU the tensors are on."""

import torch

from rolloutbus.bus.wire.messages.membership import Member
from rolloutbus.trainer_adapter.publisher.offering import gpus_of, is_shared


def _worker(policy: str, *gpus: str) -> Member:
    return Member("w0", "b.1", "ipc:///s", "ready", 0, policy, list(gpus))


def test_only_a_worker_of_the_policy_that_attests_the_gpu_shares_it() -> None:
    workers = [_worker("default", "GPU-1", "GPU-2"), _worker("critic", "GPU-3")]
    assert is_shared({"GPU-2"}, workers, "default")
    assert not is_shared({"GPU-3"}, workers, "default")
    assert not is_shared({"GPU-2"}, [], "default")


def test_tensors_in_host_memory_share_no_gpu() -> None:
    held = [torch.zeros(2)]
    assert gpus_of(held) == set()
    assert not is_shared(gpus_of(held), [_worker("default", "GPU-1")], "default")
