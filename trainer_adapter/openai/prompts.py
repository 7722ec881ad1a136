"""Bodies as prompts of token ids, by the model's own tokenizer and chat template."""

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.generation import Media, MediaKind
from rolloutbus.trainer_adapter.client.text import Tokenizer
from rolloutbus.trainer_adapter.openai.bodies import (
    ChatBody,
    CompletionBody,
    Json,
    refusal,
    unsupported,
)
from rolloutbus.trainer_adapter.openai.formats import NO_TEMPLATE, lacks_template
from rolloutbus.trainer_adapter.openai.history import Continued, ExactConversation, Transcripts

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
ADDRESSES: dict[str, MediaKind] = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
}
"""Type of a part -> what its address holds."""


@dataclass(slots=True)
class Conversation:
    """Ready for a chat template."""

    messages: list[Json] = field(default_factory=list[Json])
    media: list[Media] = field(default_factory=list[Media])
    """In the order of their places."""


def conversation_of(messages: Sequence[Json]) -> Conversation:
    """Check messages and take their media out; each leaves a part `{"type": kind}` in its place.

    Raises:
        Refused: `.field` names the part, e.g. `messages[1].content[0].image_url.url`.
    """
    if not messages:
        raise refusal("messages", "a conversation has at least one message")
    found = Conversation()
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise refusal(f"{path}.role", f"a role is one of {', '.join(sorted(ROLES))}")
        told = dict(message)
        content = message.get("content")
        if isinstance(content, list):
            parts = cast("list[Any]", content)
            told["content"] = _parts(parts, f"{path}.content", found.media)
        elif not isinstance(content, str | None):
            raise refusal(f"{path}.content", "content is a text or a list of parts")
        elif content is None:
            told["content"] = ""
        if message.get("tool_calls"):
            told["tool_calls"] = _calls(message["tool_calls"], f"{path}.tool_calls")
        found.messages.append(told)
    return found


def _parts(parts: list[Any], path: str, media: list[Media]) -> str | list[Json]:
    """Parts with places instead of media; a plain text, which any template takes, if all are."""
    found: list[Json] = []
    for index, part in enumerate(parts):
        here = f"{path}[{index}]"
        if not isinstance(part, dict):
            raise refusal(here, "a part is an object with a type")
        known = cast("Json", part)
        kind = known.get("type")
        if kind == "text" and isinstance(known.get("text"), str):
            found.append({"type": "text", "text": known["text"]})
        elif isinstance(kind, str) and kind in ADDRESSES:
            media.append(Media(ADDRESSES[kind], _held(known.get(kind), f"{here}.{kind}")))
            found.append({"type": ADDRESSES[kind]})
        elif kind == "input_audio":
            data = _field(known.get(kind), "data", f"{here}.{kind}")
            media.append(Media("audio", _decoded(data, f"{here}.{kind}.data")))
            found.append({"type": "audio"})
        else:
            kinds = ", ".join(["text", *ADDRESSES, "input_audio"])
            raise refusal(f"{here}.type", f"a part is one of {kinds}, with what it names")
    if all(part["type"] == "text" for part in found):
        return "".join(part["text"] for part in found)
    return found


def _held(value: object, path: str) -> bytes:
    """The bytes of a `data:` address; nothing is ever fetched."""
    address = value if isinstance(value, str) else _field(value, "url", path)
    where = path if isinstance(value, str) else f"{path}.url"
    head, comma, data = address.partition(",")
    if not head.startswith("data:") or not comma:
        raise unsupported(where, "nothing is fetched here: send `data:TYPE;base64,…`")
    if not head.endswith(";base64"):
        raise refusal(where, "data is in base64: `data:TYPE;base64,…`")
    return _decoded(data, where)


def _field(value: object, name: str, path: str) -> str:
    held = cast("Json", value).get(name) if isinstance(value, dict) else None
    if not isinstance(held, str):
        raise refusal(f"{path}.{name}", "a text is missing")
    return held


def _decoded(data: str, path: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise refusal(path, f"this is no base64: {error}") from error


def _calls(calls: object, path: str) -> list[Json]:
    """Calls of earlier turns; templates want arguments as objects, OpenAI has them as text."""
    if not isinstance(calls, list):
        raise refusal(path, "tool calls are a list")
    found: list[Json] = []
    for index, call in enumerate(cast("list[Any]", calls)):
        here = f"{path}[{index}].function"
        function = cast("Json", call).get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise refusal(here, "a tool call names a function")
        told = dict(cast("Json", function))
        if isinstance(told.get("arguments"), str):
            try:
                told["arguments"] = json.loads(told["arguments"] or "{}")
            except json.JSONDecodeError as error:
                raise refusal(f"{here}.arguments", f"this is no JSON: {error}") from error
        found.append({**call, "function": told})
    return found


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

    text: str
    continued: Continued
    conversation: ExactConversation
    media: list[Media]
    tools: list[Json]
    """That may be called."""

    @property
    def tokens(self) -> list[int]:
        """Token ids."""
        return self.continued.tokens


def chat_prompt(
    body: ChatBody, tokenizer: ChatTokenizer, transcripts: Transcripts | None = None
) -> ChatPrompt:
    """The prompt of a chat completion.

    Args:
        body: of the request.
        tokenizer: of the model.
        transcripts: of the sessions' earlier answers; None: there were none.

    Raises:
        Refused: `.field` names what cannot be rendered.
    """
    found = conversation_of(body.messages)
    tools = _tools(body)
    more = body.chat_template_kwargs or {}
    for name in more.keys() & TEMPLATE_ARGUMENTS:
        raise unsupported(f"chat_template_kwargs.{name}", "this is not for a request to say")

    takes_parts = _takes_parts(tokenizer)

    def render(messages: Sequence[Json], **flags: bool) -> str:
        said: Json = {"tools": tools or None, **flags, **more}
        if takes_parts:
            messages = [_with_parts(each) for each in messages]
        try:
            return _rendered(tokenizer, messages, **said)
        except Refused:
            if not any(each.get("tool_calls") for each in messages):
                raise
        # Most templates take arguments as objects, some as the text that the model wrote.
        return _rendered(tokenizer, [_with_texts(each) for each in messages], **said)

    def render_all(messages: Sequence[Json]) -> str:
        return render(
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )

    conversation = ExactConversation(
        body, found.messages, tokenizer, tokenizer.all_special_ids, render
    )
    text = render_all(found.messages)
    continued = conversation.prompt(text, render_all, transcripts or Transcripts())
    return ChatPrompt(text, continued, conversation, found.media, tools)


def prompts_of(body: CompletionBody, tokenizer: Tokenizer) -> list[list[int]]:
    """The prompts of a completion, at least one.

    Raises:
        Refused: they are neither texts nor token ids.
    """
    return token_lists("prompt", body.prompt, tokenizer)


def token_lists(field: str, given: Any, tokenizer: Tokenizer) -> list[list[int]]:  # noqa: ANN401 - JSON
    """One list of token ids for each text or list of ids in a field.

    Raises:
        Refused: it holds something else, or nothing.
    """
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
    raise refusal(field, "it is a text, token ids, or a list of either")


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tools(body: ChatBody) -> list[Json]:
    tools = body.tools or []
    for index, tool in enumerate(tools):
        function = tool.get("function")
        named = cast("Json", function).get("name") if isinstance(function, dict) else None
        if not isinstance(named, str):
            raise refusal(f"tools[{index}].function.name", "a tool is a function with a name")
    return [] if body.tool_choice == "none" else tools


def _takes_parts(tokenizer: ChatTokenizer) -> bool:
    """Whether the template loses a content that is a text, and not one that is a list of parts."""
    hello: Json = {"role": "user", "content": _HELLO}
    for message, is_part in ((hello, False), (_with_parts(hello), True)):
        try:
            told = _rendered(tokenizer, [message], tools=None, add_generation_prompt=False)
        except Refused:
            continue
        if _HELLO in told:
            return is_part
    return False


_HELLO = "rolloutbus-3c9f41d2"


def _with_parts(message: Json) -> Json:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _with_texts(message: Json) -> Json:
    """A message whose calls have their arguments as text."""
    calls = cast("list[Any]", message.get("tool_calls") or [])
    if not calls:
        return message
    told: list[Json] = []
    for call in calls:
        function = dict(call["function"])
        if not isinstance(function.get("arguments", ""), str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        told.append({**call, "function": function})
    return {**message, "tool_calls": told}


def _rendered(tokenizer: ChatTokenizer, messages: Sequence[Json], **more: Any) -> str:  # noqa: ANN401
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **more))
    # A template is a program of the model's maker: it raises what it likes.
    except Exception as error:
        if lacks_template(tokenizer):
            raise unsupported("messages", NO_TEMPLATE) from error
        raise refusal("messages", f"the model's chat template says: {error}") from error
