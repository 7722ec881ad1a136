"""OpenAI's bodies and responses for plain scripts; blocking."""

from collections.abc import Generator
from typing import Annotated, Unpack

from rolloutbus.bus.strict_calls import Described, strict
from rolloutbus.trainer_adapter.client.rollouts import GenerateOptions, ask_of
from rolloutbus.trainer_adapter.client.sync_client import SyncRolloutClient
from rolloutbus.trainer_adapter.client.sync_session import read_blocking
from rolloutbus.trainer_adapter.openai.bodies import Json
from rolloutbus.trainer_adapter.openai.client import DEFAULT_MAX_TOKENS, OpenAIClient, Payload
from rolloutbus.trainer_adapter.openai.prompts import ChatTokenizer
from rolloutbus.trainer_adapter.openai.tool_formats import ResponseTemplate

_CLIENT = "a SyncRolloutClient, of connect_sync(); OpenAIClient takes one of connect()"


@strict(options=ask_of)
class SyncOpenAIClient:
    """Blocking; see `OpenAIClient` for what each method promises."""

    def __init__(
        self,
        client: Annotated[SyncRolloutClient, Described(_CLIENT)],
        tokenizer: ChatTokenizer,
        *,
        tool_format: str | ResponseTemplate = "",
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> None:
        self._client = client
        self._openai = OpenAIClient(
            client.async_client,
            tokenizer,
            tool_format=tool_format,
            default_max_tokens=default_max_tokens,
        )

    def chat_completion(self, payload: Payload, **options: Unpack[GenerateOptions]) -> Json:
        """Answer a conversation."""
        return self._client.run(self._openai.chat_completion(payload, **options))

    def chat_completion_stream(
        self, payload: Payload, **options: Unpack[GenerateOptions]
    ) -> Generator[Json]:
        """The same in pieces."""
        chunks = self._openai.chat_completion_stream(payload, **options)
        yield from read_blocking(self._client, chunks)

    def completion(self, payload: Payload, **options: Unpack[GenerateOptions]) -> Json:
        """Continue one prompt or several."""
        return self._client.run(self._openai.completion(payload, **options))

    def completion_stream(
        self, payload: Payload, **options: Unpack[GenerateOptions]
    ) -> Generator[Json]:
        """The same in pieces."""
        yield from read_blocking(self._client, self._openai.completion_stream(payload, **options))
