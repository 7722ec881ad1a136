"""Images on the real SGLang: as bytes, in the place of a token, and never as an address."""

# pyright: reportUnknownMemberType=false
# transformers' stubs leave parameters untyped.

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio
from transformers import AutoTokenizer

import rolloutbus
from rolloutbus import Media, OpenAIClient, Rollout, RolloutClient, SamplingParams
from rolloutbus.errors import EngineFailed, Refused
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import fleet_of
from tests.sglang.vision_model import BEGIN, END, IMAGE, picture, save_vision_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
PLACE = [BEGIN]
RED, BLUE = picture((255, 0, 0)), picture((0, 0, 255))


CHAT_TEMPLATE = (
    "{% for m in messages %}{% for p in m['content'] %}"
    "{{ p['text'] if p['type'] == 'text' else '<start_of_image>' }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def seeing(vision_model: Path) -> AsyncIterator[RolloutClient]:
    options = fleet_of(
        vision_model,
        text=True,
        enable_multimodal=True,
        disable_fast_image_processor=True,
        max_total_tokens=4096,
    )
    async with rolloutbus.up(**options) as fleet:
        settings = ClientSettings(name="seeing", router=fleet.address, overtime_s=DEADLINE_S)
        async with RolloutClient(settings) as client:
            yield client


async def look(client: RolloutClient, *images: bytes, prompt: list[int] | None = None) -> Rollout:
    media = [Media("image", image) for image in images]
    tokens = prompt or [5, *PLACE, 6, 7]
    return await client.generate(tokens, GREEDY, media=media, deadline_s=DEADLINE_S)


@pytest.mark.shows("image_data")
async def test_what_an_image_shows_changes_what_follows(seeing: RolloutClient) -> None:
    red, blue, again = [await look(seeing, image) for image in (RED, BLUE, RED)]
    assert np.abs(red.logprobs - again.logprobs).max() < 1e-4
    assert red.tokens.tolist() == again.tokens.tolist()
    assert np.abs(red.logprobs - blue.logprobs).max() > 1e-3


@pytest.mark.shows("chat_completion", "image_url")
async def test_the_image_of_a_chat_is_seen(seeing: RolloutClient, vision_model: Path) -> None:
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(vision_model)
    tokenizer.chat_template = CHAT_TEMPLATE
    address = f"data:image/png;base64,{base64.b64encode(RED).decode()}"
    parts = [
        {"type": "text", "text": "This: "},
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "text", "text": " is"},
    ]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": True,
    }

    response = await OpenAIClient(seeing, tokenizer).chat_completion(body, deadline_s=DEADLINE_S)

    [choice] = response["choices"]
    same = await look(seeing, RED, prompt=response["prompt_token_ids"])
    assert BEGIN in response["prompt_token_ids"]
    assert choice["token_ids"] == same.tokens.tolist()
    told = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert np.abs(np.array(told) - same.logprobs).max() < 1e-4


async def test_each_image_stands_in_its_own_place(seeing: RolloutClient) -> None:
    prompt = [5, *PLACE, 6, *PLACE, 7]
    one, other = [
        await look(seeing, *images, prompt=prompt) for images in ((RED, BLUE), (BLUE, RED))
    ]
    assert np.abs(one.logprobs - other.logprobs).max() > 1e-3


@pytest.mark.parametrize(
    "content",
    [b"file:///etc/passwd", b"/etc/passwd", b"http://127.0.0.1:9/x.png", b"", RED[:40]],
    ids=["url of a file", "path", "address", "nothing", "half an image"],
)
async def test_bytes_that_are_no_image_are_refused_and_nothing_is_opened(
    seeing: RolloutClient, content: bytes
) -> None:
    before = await look(seeing, RED)
    with pytest.raises((Refused, EngineFailed)) as caught:
        await look(seeing, content)
    assert caught.value.problem.code == "bad_request"
    after = await look(seeing, RED)
    assert after.tokens.tolist() == before.tokens.tolist()


@pytest.mark.parametrize("prompt", [[5, 6], [5, IMAGE, 6], [5, BEGIN, IMAGE, END, 6]])
async def test_an_image_without_its_place_in_the_prompt_is_not_passed_over(
    seeing: RolloutClient, prompt: list[int]
) -> None:
    with pytest.raises((Refused, EngineFailed)) as caught:
        await look(seeing, RED, prompt=prompt)
    assert (caught.value.problem.code, caught.value.problem.field) == ("bad_request", "media")


async def test_a_model_of_text_says_that_it_sees_nothing(client: RolloutClient) -> None:
    with pytest.raises((Refused, EngineFailed)) as caught:
        await look(client, RED, prompt=[5, 6])
    assert (caught.value.problem.code, caught.value.problem.field) == ("unsupported", "media")
