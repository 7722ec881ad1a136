"""Bodies as prompts of token ids, by the model's own tokenizer and chat template."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from rolloutbus.bus.wire.messages.generation import Media
from rolloutbus.trainer_adapter.client.text import Tokenizer
from rolloutbus.trainer_adapter.openai.bodies import ChatBody, CompletionBody, Json
from rolloutbus.trainer_adapter.openai.conversation import Conversation, conversation_of
from rolloutbus.trainer_adapter.openai.refusals import refusal, unsupported

OURS = frozenset({"add_generation_prompt", "continue_final_message"})
TEMPLATE_ARGUMENTS = frozenset(
    {"conversation", "messages", "chat_template", "tools", "documents", "tokenize", "padding"}
    | {"truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
    | {"return_assistant_tokens_mask"}
    | OURS
)
"""Not a request's to say: a chat template, for one, is a program."""


class ChatTokenizer(Tokenizer, Protocol):
    """The part of a transformers tokenizer that is used."""

    @property
    def all_special_ids(self) -> list[int]:
        """Token ids that are no text."""
        ...


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, ready to be answered."""

    tokens: list[int]
    text: str
    media: list[Media] = field(default_factory=list[Media])
    tools: list[Json] = field(default_factory=list[Json])
    """That may be called."""


def chat_prompt(body: ChatBody, tokenizer: ChatTokenizer) -> ChatPrompt:
    """The prompt of a chat completion.

    Raises:
        Refused: `.field` names what cannot be rendered.
    """
    conversation = conversation_of(body.messages)
    tools = _tools(body)
    text = _rendered(body, conversation, tools, tokenizer)
    # The template has written the special tokens already.
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return ChatPrompt(tokens, text, conversation.media, tools)


def prompts_of(body: CompletionBody, tokenizer: Tokenizer) -> list[list[int]]:
    """The prompts of a completion, at least one.

    Raises:
        Refused: they are neither texts nor token ids.
    """
    given = body.prompt
    if isinstance(given, str):
        return [tokenizer.encode(given, add_special_tokens=True)]
    if isinstance(given, list) and given:
        several = cast("list[Any]", given)
        if all(_is_token(each) for each in several):
            return [several]
        if all(isinstance(each, str) for each in several):
            return [tokenizer.encode(each, add_special_tokens=True) for each in several]
        if all(isinstance(each, list) for each in several):
            lists = cast("list[list[Any]]", several)
            if all(_is_token(token) for tokens in lists for token in tokens):
                return lists
    raise refusal("prompt", "a prompt is a text, token ids, or a list of either")


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tools(body: ChatBody) -> list[Json]:
    if body.tool_choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", "a call cannot be forced; it is `auto` or `none`")
    if body.parallel_tool_calls is False:
        raise unsupported("parallel_tool_calls", "a model calls as many tools as it likes")
    tools = body.tools or []
    for index, tool in enumerate(tools):
        function = tool.get("function")
        named = cast("Json", function).get("name") if isinstance(function, dict) else None
        if not isinstance(named, str):
            raise refusal(f"tools[{index}].function.name", "a tool is a function with a name")
    return [] if body.tool_choice == "none" else tools


def _rendered(
    body: ChatBody, conversation: Conversation, tools: Sequence[Json], tokenizer: ChatTokenizer
) -> str:
    more = body.chat_template_kwargs or {}
    for name in more.keys() & TEMPLATE_ARGUMENTS:
        raise unsupported(f"chat_template_kwargs.{name}", "this is not for a request to say")
    try:
        return str(
            tokenizer.apply_chat_template(
                conversation.messages,
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                **more,
            )
        )
    # A template is a program of the model's maker: it raises what it likes.
    except Exception as error:
        raise refusal("messages", f"the model's chat template says: {error}") from error
