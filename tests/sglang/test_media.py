"""Pictures, films and sounds on the real SGLang, with the logprobs that transformers computes."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
# torch's and transformers' stubs leave parameters untyped.

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import Media, Rollout, RolloutClient, SamplingParams
from rolloutbus.errors import EngineFailed, Refused
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import fleet_of
from tests.sglang.media_models import (
    AUDIO,
    AUDIO_BEGIN,
    AUDIO_END,
    IMAGE,
    SIDE,
    VIDEO,
    VISION_BEGIN,
    VISION_END,
    MediaReference,
    film,
    picture,
    recording,
    save_hearing_model,
    save_seeing_model,
    tone,
)
from tests.sglang.models import FIRST_BYTE

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    # transformers hands torch's tensors to numpy, which wants another signature of them.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
WARM = SamplingParams(max_new_tokens=8, temperature=1.0, ignore_eos=True)
RED, BLUE = (255, 0, 0), (0, 0, 255)
PICTURE = [VISION_BEGIN, IMAGE, VISION_END]
FILM = [VISION_BEGIN, VIDEO, VISION_END]
SOUND = [AUDIO_BEGIN, AUDIO, AUDIO_END]
LETTERS = [FIRST_BYTE + byte for byte in b"abcdefgh"]
AS_IT_IS = {"video": {"min_pixels": SIDE * SIDE, "max_pixels": SIDE * SIDE}}
"""SGLang would make films larger before the model's processor sees them."""


@pytest.fixture(scope="module", autouse=True)
def nightly(request: pytest.FixtureRequest) -> None:
    if not request.config.option.exhaustive:
        pytest.skip("two engines have to start: `make nightly`, or --exhaustive")


def image_of(color: tuple[int, int, int]) -> Media:
    return Media("image", picture(color))


def video_of(*colors: tuple[int, int, int]) -> Media:
    return Media("video", film(colors))


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def hearing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hearing_model(tmp_path_factory.mktemp("hearing"))


async def _client_of(model: Path, **engine: object) -> AsyncIterator[RolloutClient]:
    options = fleet_of(model, text=True, enable_multimodal=True, max_total_tokens=4096, **engine)
    async with rolloutbus.up(**options) as fleet:
        settings = ClientSettings(name="of-media", router=fleet.address, overtime_s=DEADLINE_S)
        async with RolloutClient(settings) as client:
            yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def seeing(seeing_model: Path) -> AsyncIterator[RolloutClient]:
    async for client in _client_of(seeing_model, mm_process_config=AS_IT_IS):
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hearing(hearing_model: Path) -> AsyncIterator[RolloutClient]:
    async for client in _client_of(hearing_model):
        yield client


async def ask(client: RolloutClient, prompt: list[int], *media: Media) -> Rollout:
    return await client.generate(prompt, GREEDY, media=media, deadline_s=DEADLINE_S)


def assert_true(
    rollout: Rollout, reference: MediaReference, prompt: list[int], *media: Media
) -> None:
    told = reference.logprobs(prompt, media, rollout.tokens.tolist())
    assert np.abs(rollout.logprobs - told).max() < 2e-4


@pytest.mark.shows("image_data", "video_data")
async def test_what_is_seen_counts_as_with_transformers(
    seeing: RolloutClient, seeing_model: Path
) -> None:
    reference = MediaReference(seeing_model)
    cases = [
        ([5, *PICTURE, 6, 7], [image_of(RED)]),
        ([5, *PICTURE, 6, *PICTURE, 7], [image_of(BLUE), image_of(RED)]),
        ([5, *FILM, 6, 7], [video_of(RED, RED, BLUE, BLUE)]),
        ([5, *FILM, 6, 7], [video_of(BLUE, BLUE, RED, RED)]),
        ([5, *PICTURE, 6, *FILM, 7], [image_of(RED), video_of(RED, RED, BLUE, BLUE)]),
    ]
    rollouts = [await ask(seeing, prompt, *media) for prompt, media in cases]
    for rollout, (prompt, media) in zip(rollouts, cases, strict=True):
        assert_true(rollout, reference, prompt, *media)
    one, other = rollouts[2:4]
    assert np.abs(one.logprobs - other.logprobs).max() > 1e-3


async def test_each_row_of_a_batch_sees_its_own(seeing: RolloutClient, seeing_model: Path) -> None:
    reference = MediaReference(seeing_model)
    prompts = [[5, *PICTURE, 6], [5, *FILM, 6], [5, 6]]
    media = [[image_of(RED)], [video_of(RED, RED, BLUE, BLUE)], []]
    groups = await seeing.generate_batch(prompts, WARM, n=2, media=media, deadline_s=DEADLINE_S)
    for group, prompt, seen in zip(groups, prompts, media, strict=True):
        for rollout in group:
            assert_true(rollout, reference, prompt, *seen)


async def test_a_session_keeps_what_it_saw(seeing: RolloutClient, seeing_model: Path) -> None:
    """Each turn sends the tokens of the turns before, and so it brings their media again."""
    reference = MediaReference(seeing_model)
    first, second = image_of(RED), image_of(BLUE)
    async with seeing.session("looks-twice", wait_s=DEADLINE_S) as session:
        session.append([5, *PICTURE, 6])
        await session.sample(GREEDY, media=[first], deadline_s=DEADLINE_S)
        session.append([7, *PICTURE, 8])
        prompt = session.transcript.tokens.tolist()
        two = await session.sample(GREEDY, media=[first, second], deadline_s=DEADLINE_S)
        assert_true(two, reference, prompt, first, second)


async def test_a_film_after_tokens_that_are_no_text_is_refused_or_right(
    seeing: RolloutClient, seeing_model: Path
) -> None:
    """SGLang makes text of the prompt, and tokens of the text, where there are films."""
    shown = video_of(BLUE, BLUE, RED, RED)
    lone = FIRST_BYTE + 0xFF  # no text has this byte
    with pytest.raises(EngineFailed, match="tokens would change"):
        await ask(seeing, [5, lone, *FILM, 6], shown)
    prompt = [5, *LETTERS, *FILM, 6]
    assert_true(await ask(seeing, prompt, shown), MediaReference(seeing_model), prompt, shown)


@pytest.mark.shows("audio_data")
async def test_what_is_heard_counts_as_with_transformers(
    hearing: RolloutClient, hearing_model: Path
) -> None:
    reference = MediaReference(hearing_model)
    prompt = [5, *SOUND, 6, 7]
    low, high = (Media("audio", recording(tone(hertz))) for hertz in (200, 2000))
    one, other = [await ask(hearing, prompt, sound) for sound in (low, high)]
    assert_true(one, reference, prompt, low)
    assert_true(other, reference, prompt, high)
    assert np.abs(one.logprobs - other.logprobs).max() > 1e-3
    [group] = await hearing.generate_batch(
        [[5, *SOUND, 6, *SOUND, 7]], WARM, n=2, media=[low, high], deadline_s=DEADLINE_S
    )
    for rollout in group:
        assert_true(rollout, reference, [5, *SOUND, 6, *SOUND, 7], low, high)


@pytest.mark.parametrize("content", [b"file:///etc/passwd", b"http://127.0.0.1:9/x.mp4", b""])
async def test_bytes_that_are_no_film_are_refused_and_nothing_is_opened(
    seeing: RolloutClient, content: bytes
) -> None:
    with pytest.raises((Refused, EngineFailed)) as caught:
        await ask(seeing, [5, *FILM, 6], Media("video", content))
    assert caught.value.problem.code == "bad_request"


@pytest.mark.parametrize("prompt", [[5, 6], [5, *PICTURE, 6]])
async def test_a_film_without_its_place_is_not_passed_over(
    seeing: RolloutClient, prompt: list[int]
) -> None:
    with pytest.raises((Refused, EngineFailed)) as caught:
        await ask(seeing, prompt, video_of(RED, RED, BLUE, BLUE))
    assert (caught.value.problem.code, caught.value.problem.field) == ("bad_request", "media")


async def test_a_missing_package_is_no_fault_of_the_request(hearing: RolloutClient) -> None:
    """SGLang reads a WAV with soundfile, which these tests' environment has not."""
    wav = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(24)
    with pytest.raises(EngineFailed, match="soundfile") as caught:
        await ask(hearing, [5, *SOUND, 6], Media("audio", wav))
    assert (caught.value.problem.code, caught.value.problem.field) == ("unsupported", "media")
