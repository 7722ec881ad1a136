"""An image as bytes, through the whole path, to a model that sees on a GPU."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from rolloutbus import Media, Rollout, RolloutClient, SamplingParams, Want
from rolloutbus.errors import EngineFailed, Refused
from tests.gpu.gpu_fleets import DEADLINE_S, gpu_fleet, running
from tests.sglang.vision_model import BEGIN, picture, save_vision_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEAD_SIZE = 64
"""What kernels of a GPU are made for."""
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = [5, BEGIN, 6, 7]
COLORS = [(255, 0, 0), (0, 0, 255), (0, 255, 0), (250, 250, 250)]
SAME, OTHER = 0.03, 0.1
"""Mean difference of logprobs: what bfloat16 makes at most, and another image at least."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RolloutClient]:
    path = save_vision_model(tmp_path_factory.mktemp("vision"), head_size=HEAD_SIZE)
    options = gpu_fleet(
        path,
        text=True,
        enable_multimodal=True,
        disable_fast_image_processor=True,
        mm_attention_backend="sdpa",
    )
    async with running(options) as connected:
        yield connected


async def look(client: RolloutClient, *images: bytes, prompt: list[int] = PROMPT) -> Rollout:
    media = [Media("image", image) for image in images]
    want = Want(logprobs_of=[*range(0, 500, 5)])
    return await client.generate(prompt, GREEDY, media=media, want=want, deadline_s=DEADLINE_S)


def apart(one: Rollout, other: Rollout) -> float:
    """Mean difference of what two images make of the first token."""
    return float(np.abs(one.arrays["logprobs_of"][0] - other.arrays["logprobs_of"][0]).mean())


@pytest.mark.shows("image_data")
async def test_what_an_image_shows_changes_what_follows(client: RolloutClient) -> None:
    images = [picture(color) for color in COLORS]
    first = [await look(client, image) for image in images]
    # Side by side, and from the cache of what was seen before.
    again = await asyncio.gather(*(look(client, image) for image in images * 4))

    others = [apart(one, other) for one, other in itertools.combinations(first, 2)]
    same = [apart(first[number % len(images)], each) for number, each in enumerate(again)]
    print("same image", max(same), "other images", min(others))
    assert max(same) < SAME
    assert min(others) > OTHER


async def test_images_stand_each_in_its_own_place(client: RolloutClient) -> None:
    red, blue = picture(COLORS[0]), picture(COLORS[1])
    prompt = [5, BEGIN, 6, BEGIN, 7]
    one = await look(client, red, blue, prompt=prompt)
    other = await look(client, blue, red, prompt=prompt)
    assert apart(one, other) > OTHER


async def test_bytes_that_are_no_image_end_their_request_alone(client: RolloutClient) -> None:
    neighbour = asyncio.create_task(look(client, picture(COLORS[0])))
    with pytest.raises((Refused, EngineFailed)) as caught:
        await look(client, b"file:///etc/passwd")
    assert caught.value.problem.code == "bad_request"
    assert len((await neighbour).tokens) == GREEDY.max_new_tokens
