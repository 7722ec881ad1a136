"""Text, chat and the blocking client, with a transformers tokenizer and a real engine."""

# pyright: reportUnknownMemberType=false
# transformers' stubs leave parameters untyped.

import asyncio

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import rolloutbus
from rolloutbus import RolloutClient, SamplingParams, TextClient
from rolloutbus.launcher.settings import UpOptions
from tests.integration.conftest import VOCAB_SIZE

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {"workers": 1, "engine_options": {"threads": 1}}
SAMPLING = SamplingParams(max_new_tokens=12, sampling_seed=7, ignore_eos=True)
UNKNOWN = "<unk>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = [UNKNOWN, "user", "assistant", *(f"w{n}" for n in range(VOCAB_SIZE - 3))]
    core = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment] - a property of the binding
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token=UNKNOWN, chat_template=CHAT_TEMPLATE
    )


@pytest.mark.shows("prompts", "responses", "decode")
async def test_text_is_what_its_tokens_say(
    client: RolloutClient, tokenizer: PreTrainedTokenizerFast
) -> None:
    said = await TextClient(client, tokenizer).generate("w1 w2 w3", SAMPLING)

    words = tokenizer.convert_ids_to_tokens(said.rollout.tokens.tolist())
    assert said.text.split() == [word for word in words if word != UNKNOWN]
    prompt = tokenizer.encode("w1 w2 w3")
    assert (await client.generate(prompt, SAMPLING)).tokens.tolist() == said.rollout.tokens.tolist()


async def test_a_conversation_is_answered_after_its_template(
    client: RolloutClient, tokenizer: PreTrainedTokenizerFast
) -> None:
    messages = [{"role": "user", "content": "w5 w6"}]

    said = await TextClient(client, tokenizer).chat(messages, SAMPLING)

    prompt = tokenizer.encode("user w5 w6 assistant")
    assert said.rollout.n_prompt_tokens == len(prompt)
    assert (await client.generate(prompt, SAMPLING)).tokens.tolist() == said.rollout.tokens.tolist()


@pytest.mark.shows("StreamingChunk.text")
async def test_streamed_text_joins_to_the_whole(
    client: RolloutClient, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = TextClient(client, tokenizer)

    pieces = [piece async for piece in texts.stream("w1 w2", SAMPLING)]

    assert "".join(pieces) == (await texts.generate("w1 w2", SAMPLING)).text


@pytest.mark.shows("a call from another thread")
async def test_the_blocking_client_says_the_same(
    fleet: rolloutbus.Fleet, client: RolloutClient
) -> None:
    def blocking() -> list[int]:
        with rolloutbus.connect_sync(fleet.address, name="plain") as plain:
            whole = plain.generate([4, 5, 6], SAMPLING).tokens.tolist()
            streamed = [t for d in plain.stream([4, 5, 6], SAMPLING) for t in d.tokens.tolist()]
            assert streamed == whole
            assert plain.status().workers[0].name == "w0"
            return whole

    whole = await asyncio.to_thread(blocking)

    assert whole == (await client.generate([4, 5, 6], SAMPLING)).tokens.tolist()
