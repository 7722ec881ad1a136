"""OpenAI's bodies and responses for plain scripts; blocking."""

from typing import Annotated

from rolloutbus.bus.strict_calls import Described, strict
from rolloutbus.trainer_adapter.client.asks import ask_of
from rolloutbus.trainer_adapter.client.blocking import Twin, blocking
from rolloutbus.trainer_adapter.client.sync_client import SyncRolloutClient
from rolloutbus.trainer_adapter.openai.answer_reader import ResponseTemplate
from rolloutbus.trainer_adapter.openai.client import DEFAULT_MAX_TOKENS, OpenAIClient
from rolloutbus.trainer_adapter.openai.prompts import ChatTokenizer

_CLIENT = "a SyncRolloutClient, of connect_sync(); OpenAIClient takes one of connect()"


@strict(options=ask_of)
class SyncOpenAIClient(Twin[OpenAIClient]):
    """Blocking; see `OpenAIClient` for what each method promises."""

    def __init__(
        self,
        client: Annotated[SyncRolloutClient, Described(_CLIENT)],
        tokenizer: ChatTokenizer,
        *,
        tool_format: str | ResponseTemplate = "",
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> None:
        """See `OpenAIClient`."""
        openai = OpenAIClient(
            client.async_client,
            tokenizer,
            tool_format=tool_format,
            default_max_tokens=default_max_tokens,
        )
        super().__init__(openai, client.loop)

    chat_completion = blocking(OpenAIClient.chat_completion)
    chat_completion_stream = blocking(OpenAIClient.chat_completion_stream)
    completion = blocking(OpenAIClient.completion)
    completion_stream = blocking(OpenAIClient.completion_stream)
