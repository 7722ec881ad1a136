"""Conversations that go on: what was sampled stays, whatever a chat template does to its text."""

# pyright: reportUnknownMemberType=false
# transformers' stubs leave parameters untyped.

import random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.trainer_adapter.openai.bodies import ChatBody, body_of
from rolloutbus.trainer_adapter.openai.history import Transcripts
from rolloutbus.trainer_adapter.openai.prompts import ChatPrompt, chat_prompt
from tests.chat_templates import EARLY, QWEN, TEMPLATES, tokenizer_of

# Numbers its messages from the end, so that every earlier turn changes.
COUNTING = "{%- for m in messages -%}{{- loop.revindex ~ m.content|length -}}{%- endfor -%}"


def asked(
    tokenizer: Any,  # noqa: ANN401 - of transformers
    kept: Transcripts,
    messages: list[dict[str, Any]],
    **more: Any,  # noqa: ANN401 - fields of a body
) -> ChatPrompt:
    body = body_of({"messages": messages, "session_id": "s", **more}, ChatBody)
    return chat_prompt(body, tokenizer, kept)


def answer(
    kept: Transcripts, prompt: ChatPrompt, message: dict[str, Any], sampled: list[int]
) -> None:
    key = prompt.conversation.key_after(message)
    assert key is not None
    before = prompt.continued
    kept.keep(key, [*prompt.tokens, *sampled], before.parent, before.n_kept if before.parent else 0)


def odd_tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Another tokenisation of a text than its own: letter by letter."""
    return [token for letter in text for token in tokenizer.encode(letter)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("template", "end"), TEMPLATES.values(), ids=TEMPLATES)
def test_each_prompt_begins_with_the_tokens_before_it(template: str, end: str, seed: int) -> None:
    chance = random.Random(seed)
    tokenizer, kept = tokenizer_of(template, end), Transcripts()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "banana"}]
    before: list[int] = []
    for turn in range(16):
        prompt = asked(tokenizer, kept, messages)
        assert prompt.tokens[: len(before)] == before
        assert prompt.continued.n_kept == len(before)
        new = tokenizer.decode(prompt.tokens[len(before) :], skip_special_tokens=False)
        assert messages[-1]["content"] in new
        assert new.count(messages[-1]["content"]) == 1 or turn == 0
        is_ended, calls = chance.random() < 0.6, chance.random() < 0.5
        text = chance.choice(["banana", "ok aa", "abab"]) + f" {turn}"
        said = f"<think>aa</think>{text}" if template == QWEN else text
        sampled = odd_tokens(tokenizer, said)
        sampled += tokenizer.encode(end) if is_ended else []
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            function = {"name": "look", "arguments": '{"at": "aa"}'}
            message["tool_calls"] = [{"id": f"c{turn}", "type": "function", "function": function}]
        answer(kept, prompt, message, sampled)
        before = [*prompt.tokens, *sampled]
        after = {"role": "tool" if calls else "user", "content": f"aa result {turn} ab"}
        messages += [message, after]


def test_tokens_in_a_message_are_gone_on_with_wherever_it_was_answered() -> None:
    tokenizer = tokenizer_of(QWEN, "<|im_end|>")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "banana"}]
    before: list[int] = []
    for _ in range(4):
        prompt = asked(tokenizer, Transcripts(), messages, session_id=None)
        assert prompt.tokens[: len(before)] == before
        sampled = odd_tokens(tokenizer, "banana")
        before = [*prompt.tokens, *sampled]
        messages.append({"role": "assistant", "content": "banana", "token_ids": sampled})
        messages.append({"role": "user", "content": "aa"})
    wrong = ({"role": "assistant", "token_ids": ["a"]}, {"role": "user", "token_ids": [1]})
    for message in wrong:
        with pytest.raises(Refused) as caught:
            asked(tokenizer, Transcripts(), [message])
        assert caught.value.field == "messages[0].token_ids"


@pytest.mark.parametrize(
    "more",
    [
        {"session_id": "other"},
        {"session_id": None},
        {"tools": [{"function": {"name": "f"}}]},
        {"chat_template_kwargs": {"x": 1}},
    ],
)
def test_another_conversation_is_rendered_from_its_text(more: dict[str, Any]) -> None:
    tokenizer, kept = tokenizer_of(QWEN, "<|im_end|>"), Transcripts()
    hello = [{"role": "user", "content": "banana"}]
    said = {"role": "assistant", "content": "banana"}
    answer(kept, asked(tokenizer, kept, hello), said, odd_tokens(tokenizer, "banana"))
    on = [*hello, said, {"role": "user", "content": "aa"}]
    assert asked(tokenizer, kept, on).continued.n_kept > 0
    assert asked(tokenizer, kept, on, **more).continued.n_kept == 0
    changed = [{"role": "user", "content": "bananas"}, *on[1:]]
    assert asked(tokenizer, kept, changed).continued.n_kept == 0


def test_branch_goes_on_from_its_own_turn() -> None:
    tokenizer, kept = tokenizer_of(QWEN, "<|im_end|>"), Transcripts()
    hello = [{"role": "user", "content": "banana"}]
    first = asked(tokenizer, kept, hello)
    texts = ["ab", "ba"]
    for text in texts:
        said = {"role": "assistant", "content": text}
        answer(kept, first, said, odd_tokens(tokenizer, text))
    for text in texts:
        on = [*hello, {"role": "assistant", "content": text}, {"role": "user", "content": "aa"}]
        sampled = odd_tokens(tokenizer, text)
        assert asked(tokenizer, kept, on).tokens[len(first.tokens) :][: len(sampled)] == sampled


@pytest.mark.parametrize("is_answered_before", [True, False])
def test_turn_that_is_answered_again_alike_leaves_what_went_on_from_it(
    *, is_answered_before: bool
) -> None:
    tokenizer, kept = tokenizer_of(QWEN, "<|im_end|>"), Transcripts()
    hello: list[dict[str, Any]] = [{"role": "user", "content": "banana"}]
    said = {"role": "assistant", "content": "banana"}
    then = {"role": "user", "content": "aa"}
    tokens, others = odd_tokens(tokenizer, "banana"), tokenizer.encode("banana")
    assert tokens != others
    first = asked(tokenizer, kept, hello)
    answer(kept, first, said, tokens)
    second = asked(tokenizer, kept, [*hello, said, then])
    if is_answered_before:
        answer(kept, second, said, tokens)
    answer(kept, first, said, others)
    if not is_answered_before:
        answer(kept, second, said, tokens)
    third = asked(tokenizer, kept, [*hello, said, then, said, then])
    before = [*second.tokens, *tokens]
    assert (third.tokens[: len(before)], third.continued.n_kept) == (before, len(before))
    again = asked(tokenizer, kept, [*hello, said, then])
    assert again.tokens[: again.continued.n_kept] == [*first.tokens, *others]


@pytest.mark.parametrize(
    ("template", "role"),
    [(COUNTING, "user"), (EARLY, "tool")],
    ids=["nothing is where it was", "a result is where the answer was"],
)
def test_template_that_changes_what_was_said_is_refused(template: str, role: str) -> None:
    tokenizer, kept = tokenizer_of(template, "</s>"), Transcripts()
    hello = [{"role": "user", "content": "banana"}]
    said = {"role": "assistant", "content": "ab"}
    answer(kept, asked(tokenizer, kept, hello), said, odd_tokens(tokenizer, "ab"))
    with pytest.raises(Refused) as caught:
        asked(tokenizer, kept, [*hello, said, {"role": role, "content": "aa"}])
    assert (caught.value.code, caught.value.field) == ("unsupported", "session_id")


def test_least_recently_used_conversation_is_forgotten_first() -> None:
    kept = Transcripts(max_tokens=10)
    kept.keep(b"a", [1, 2, 3], None, 0)
    kept.keep(b"b", [4, 5, 6], None, 0)
    kept.keep(b"a2", [1, 2, 3, 7], b"a", 3)
    assert kept.find(b"a2") == [1, 2, 3, 7]
    kept.keep(b"c", [8, 9, 10, 11], None, 0)
    assert kept.find(b"b") is None
    assert kept.find(b"a2") == [1, 2, 3, 7]
    assert kept.find(b"c") == [8, 9, 10, 11]


def test_conversation_is_forgotten_before_what_it_goes_on_from() -> None:
    kept = Transcripts(max_tokens=10)
    kept.keep(b"a", [1, 2, 3], None, 0)
    kept.keep(b"a2", [1, 2, 3, 4, 5], b"a", 3)
    kept.keep(b"b", [6, 7, 8, 9, 10, 11], None, 0)
    assert kept.find(b"a") == [1, 2, 3]
    kept.keep(b"a", [9, 9, 9], None, 0)
    assert kept.find(b"a2") is None
