"""A model that lies on two ranks is published as if it lay on one, and never lies on one twice."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rolloutbus.bus.weights.manifest import digest_of
from rolloutbus.trainer_adapter.publisher.tensor_source import named_tensors
from tests.integration.live_fleet import START_S
from tests.integration.shard_rank import BUCKET_BYTES, MIB, WORLD, large_model, small_model
from tests.integration.store_harness import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(480)]

SEED = 5
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""What is freed goes back to the system at once, so that a peak shows what was held."""

Ranks = list[dict[str, Any]]


def digests_of(model: torch.nn.Module, dtype: torch.dtype | None = None) -> dict[str, int]:
    return {
        name: digest_of(each.to(dtype or each.dtype).view(-1).view(torch.uint8).numpy())
        for name, each in named_tensors(model)
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each rank saw, case by case."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = [start_rank(folder, rank) for rank in range(WORLD)]
    try:
        outputs = [each.communicate(timeout=2 * START_S)[0] for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
    assert [each.returncode for each in processes] == [0] * WORLD
    return [json.loads(output) for output in outputs]


def start_rank(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.integration.shard_rank"]
    return subprocess.Popen(
        [*command, str(folder), str(rank), str(SEED)],
        cwd=ROOT,
        env=os.environ | EXACT_MEMORY,
        stdout=subprocess.PIPE,
    )


def test_a_sharded_module_has_the_digests_of_the_whole_one(ranks: Ranks) -> None:
    assert ranks[0]["fsdp"]["digests"] == digests_of(small_model(SEED))
    assert ranks[0]["large"]["digests"] == digests_of(large_model(SEED))


def test_a_cast_on_the_way_gives_what_a_cast_of_the_whole_gives(ranks: Ranks) -> None:
    assert ranks[0]["cast"]["digests"] == digests_of(small_model(SEED), torch.bfloat16)


def test_stages_on_different_ranks_add_up_under_the_names_they_are_given(ranks: Ranks) -> None:
    whole = {
        name: digest_of(each.detach().reshape(-1).view(torch.uint8).numpy())
        for name, each in small_model(SEED).named_parameters(remove_duplicate=False)
    }
    assert ranks[0]["stages"]["digests"] == whole


def test_parts_that_several_ranks_have_under_one_name_are_merged(ranks: Ranks) -> None:
    assert ranks[0]["columns"]["digests"] == digests_of(small_model(SEED))


def test_no_rank_holds_more_than_two_buckets_beside_its_shards(ranks: Ranks) -> None:
    small = MIB  # what else a process allocates meanwhile
    for seen in ranks:
        assert seen["large"]["gathered_bytes"] <= BUCKET_BYTES
        assert seen["large"]["peak_bytes"] <= 2 * BUCKET_BYTES + small


def test_a_rank_that_is_lost_ends_the_publication(ranks: Ranks) -> None:
    assert ranks[0]["lost"]["outcome"] == "not_started"


def test_other_ranks_hear_of_it_when_rank_0_cannot_publish(ranks: Ranks) -> None:
    assert "require" in ranks[0]["refused"]["error"]
    assert "gave the publication up" in ranks[1]["refused"]["error"]
