"""Chats, completions, embeddings: OpenAI's bodies in, its responses out; with a blocking twin."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar, Unpack

import msgspec

from rolloutbus.bus.strict_calls import Described, strict
from rolloutbus.bus.wire.errors import EngineFailed, Refused
from rolloutbus.bus.wire.messages.generation import SamplingParams, Want
from rolloutbus.trainer_adapter.client.asks import GenerateOptions, ask_of, row_seed
from rolloutbus.trainer_adapter.client.blocking import Twin, blocking
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import Delta, Rollout, RolloutCancelled
from rolloutbus.trainer_adapter.client.sync_client import SyncRolloutClient
from rolloutbus.trainer_adapter.client.text import require_tokenizer
from rolloutbus.trainer_adapter.openai.answer_reader import ResponseTemplate
from rolloutbus.trainer_adapter.openai.answers import (
    Answers,
    ChatAnswers,
    CompletionAnswers,
    token_texts,
    usage_of,
)
from rolloutbus.trainer_adapter.openai.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    Json,
    body_of,
    by_body,
    options_of,
    refusal,
    sampling_of,
    unsupported,
)
from rolloutbus.trainer_adapter.openai.embeddings import EmbeddingBody, embeddings_answer
from rolloutbus.trainer_adapter.openai.formats import Reader, answer_format
from rolloutbus.trainer_adapter.openai.forms import ForcedCalls, Form, form_of, grammar_of
from rolloutbus.trainer_adapter.openai.history import Key, Transcripts
from rolloutbus.trainer_adapter.openai.prompts import (
    ChatPrompt,
    ChatTokenizer,
    chat_prompt,
    prompts_of,
    token_lists,
)
from rolloutbus.trainer_adapter.openai.sglang_reader import SglangParsers

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """(index of its stream, item) of each, as they come; leaving early closes all streams.

    Raises:
        Exception: what a stream raised; the others are closed.
    """
    waiting = {asyncio.create_task(_next(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                item = task.result()
                index = waiting.pop(task)
                if item is not None:
                    yield index, item
                    waiting[asyncio.create_task(_next(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T]) -> T | None:
    return await anext(stream, None)


Payload = Mapping[str, Any]
"""A request's body, or `{"json": body, "headers": …}`; headers are left alone."""

DEFAULT_MAX_TOKENS = 1024
_CLIENT = "a RolloutClient, of connect(); SyncOpenAIClient takes one of connect_sync()"


@dataclass(frozen=True, slots=True)
class _Asked:
    body: Body
    prompts: list[list[int]]
    sampling: SamplingParams
    options: GenerateOptions
    answers: Answers
    form: Form | None
    chat: ChatPrompt | None = None
    """None: a completion."""

    @property
    def n(self) -> int:
        return self.body.n or 1


@strict(options=ask_of)
class OpenAIClient:
    """Answers request bodies through a RolloutClient, with the tokenizer of the model.

    Bodies may also say `session_id`, `policy`, `versions`, `lora_path`, `top_k`, `min_p`,
    `min_tokens`, `ignore_eos`, `stop_token_ids`, `stop_regex`, `regex`, `ebnf`, `priority`,
    `timeout`, `chat_template_kwargs` and `return_token_ids`. Choices also tell `weight_versions`,
    [version, tokens] runs.

    Chats with a `session_id` go on token by token: where messages repeat what was answered before,
    the prompt has the tokens that were sampled, and `kept_prompt_tokens` tells how many of the
    prompt's tokens are those of an earlier answer and its prompt. Of choices that read alike the
    first is gone on with, unless the message has the `token_ids` of its choice.

    What is aborted answers what was sampled of it, with `finish_reason` `abort`.

    Raises, all of its methods: what else `RolloutClient.generate` raises; Refused also for whatever
    is wrong with a body, `.field` being the body's name of it.
    """

    def __init__(
        self,
        client: Annotated[RolloutClient, Described(_CLIENT)],
        tokenizer: ChatTokenizer,
        *,
        tool_format: str | ResponseTemplate = "",
        reasoning_format: str = "",
        parsers: SglangParsers | None = None,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> None:
        """Nothing is sent yet.

        Args:
            client: connected.
            tokenizer: of transformers, with a chat template if there are to be chats.
            tool_format: how the model writes tool calls: one of `TOOL_FORMATS`, a response template
                of transformers, or `none`. Empty: the tokenizer's `response_template`, or what is
                recognised from its chat template; what is not recognised stays in the content.
            reasoning_format: the same for reasoning: one of `REASONING_FORMATS`, or `none`.
            parsers: of SGLang, from `sglang_parsers()`, with its formats; None: transformers reads.
            default_max_tokens: for bodies that do not say it.

        Raises:
            SettingsError: there is no such format, or it is no tokenizer.
        """
        require_tokenizer(tokenizer, ("encode", "decode", "all_special_ids"))
        self._client = client
        self._tokenizer = tokenizer
        self._format = answer_format(tool_format, reasoning_format, tokenizer, parsers)
        self._transcripts = Transcripts()
        self._default_max_tokens = default_max_tokens

    async def chat_completion(self, payload: Payload, **options: Unpack[GenerateOptions]) -> Json:
        """Answer a conversation: a `chat.completion`.

        Args:
            payload: messages, tools and so on. Media are `data:` addresses.
            options: what the body does not say.
        """
        with _named_by_body():
            asked = self._chat(payload, options)
            _check_whole(asked.body)
        return await self._whole(asked)

    def chat_completion_stream(
        self, payload: Payload, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Json]:
        """The same in pieces, `chat.completion.chunk`s. Logprobs come with a choice's last one."""
        with _named_by_body():
            asked = self._chat(payload, options)
        return self._pieces(asked)

    async def completion(self, payload: Payload, **options: Unpack[GenerateOptions]) -> Json:
        """Continue one prompt or several: a `text_completion`, `n` choices for each."""
        with _named_by_body():
            asked = self._completion(payload, options)
            _check_whole(asked.body)
        return await self._whole(asked)

    def completion_stream(
        self, payload: Payload, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Json]:
        """The same in pieces. Logprobs come with a choice's last one."""
        with _named_by_body():
            asked = self._completion(payload, options)
        return self._pieces(asked)

    async def embeddings(self, payload: Payload) -> Json:
        """Tell the vector of one text or several: a `list` of `embedding`s."""
        with _named_by_body():
            body = body_of(payload, EmbeddingBody)
            inputs = token_lists("input", body.input, self._tokenizer)
            for index, each in enumerate(inputs):
                if not each:
                    field = f"input[{index}]" if len(inputs) > 1 else "input"
                    raise refusal(field, "it has no tokens")
            if body.dimensions is not None and body.dimensions < 1:
                raise refusal("dimensions", f"{body.dimensions} numbers are no vector")
            if body.timeout is not None and not body.timeout > 0:
                raise refusal("timeout", f"{body.timeout} is not above 0")
            embeddings = await self._client.embed(
                inputs,
                dimensions=body.dimensions or 0,
                policy=body.policy or "default",
                deadline_s=body.timeout or 0.0,
            )
        return embeddings_answer(body, embeddings)

    def _chat(self, payload: Payload, options: GenerateOptions) -> _Asked:
        body = body_of(payload, ChatBody)
        prompt = chat_prompt(body, self._tokenizer, self._transcripts)
        form = form_of(body)

        def new_reader() -> Reader | None:
            if form is not None:
                return ForcedCalls() if form.is_calls else None
            return self._format.reader(prompt.text, prompt.tools)

        texts = token_texts(body, self._tokenizer, self._tokenizer.all_special_ids)
        if new_reader() is not None:  # what marks a call may be a special token
            texts = replace(texts, skip_special=False)
        if body.top_logprobs and not body.logprobs:
            raise refusal("top_logprobs", "top_logprobs are told with `logprobs`: true alone")
        want = _want(options, body.top_logprobs, "top_logprobs")
        own: GenerateOptions = {**options, **options_of(body), **grammar_of(form), **want}
        if prompt.media:
            own["media"] = prompt.media
        answers = ChatAnswers(body, texts, new_reader)
        sampling = sampling_of(body, self._default_max_tokens)
        if body.parallel_tool_calls is False and form is None and prompt.tools:
            sampling = self._ended_by_a_call(sampling)
        return _Asked(body, [prompt.tokens], sampling, own, answers, form, prompt)

    def _ended_by_a_call(self, sampling: SamplingParams) -> SamplingParams:
        """The same, but nothing is sampled after a call."""
        end = self._format.call_end
        if not end:
            message = (
                "calls of this model's format have no end by which a second one is kept from "
                "coming; take tool_choice `required` or a function, or leave it out"
            )
            raise unsupported("parallel_tool_calls", message)
        tokens = self._tokenizer.encode(end, add_special_tokens=False)
        if len(tokens) == 1:  # engines do not see special tokens in texts
            stop_ids = [*sampling.stop_token_ids, *tokens]
            return msgspec.structs.replace(sampling, stop_token_ids=stop_ids)
        return msgspec.structs.replace(sampling, stop=[*sampling.stop, end])

    def _completion(self, payload: Payload, options: GenerateOptions) -> _Asked:
        body = body_of(payload, CompletionBody)
        if body.suffix:
            raise unsupported("suffix", "nothing can be put before a suffix")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise unsupported("best_of", "all samples are told: ask for `n`")
        if body.echo and body.logprobs is not None:
            raise unsupported("echo", "logprobs of a prompt are not told here; leave one out")
        prompts = prompts_of(body, self._tokenizer)
        texts = token_texts(body, self._tokenizer, self._tokenizer.all_special_ids)
        echoed = [texts.of(prompt) if body.echo else "" for prompt in prompts]
        want = _want(options, body.logprobs, "logprobs")
        form = form_of(body)
        own: GenerateOptions = {**options, **options_of(body), **grammar_of(form), **want}
        sampling = sampling_of(body, self._default_max_tokens)
        return _Asked(body, prompts, sampling, own, CompletionAnswers(body, texts, echoed), form)

    async def _whole(self, asked: _Asked) -> Json:
        with _named_by_body(asked.form):
            groups = await self._client.generate_batch(
                asked.prompts, asked.sampling, n=asked.n, on_abort="partial", **asked.options
            )
        rollouts = [rollout for group in groups for rollout in group]
        choices = [asked.answers.choice(i, each) for i, each in enumerate(rollouts)]
        kept: dict[Key, int] = {}
        for index, (choice, rollout) in enumerate(zip(choices, rollouts, strict=True)):
            self._keep(asked, rollout, choice, index, kept)
        response = {
            **_head(asked, asked.answers.name),
            "choices": choices,
            "usage": usage_of(rollouts, len(groups)),
        }
        return response | _prompt_ids(asked)

    def _keep(
        self, asked: _Asked, rollout: Rollout, choice: Json, index: int, kept: dict[Key, int]
    ) -> None:
        """Remember the tokens of an answer, for the next turn of its session.

        Args:
            asked: what was asked.
            rollout: the answer.
            choice: the same as it is told.
            index: of the choice.
            kept: index of the choices that were kept; of those that read alike the first is.
        """
        key = asked.chat.conversation.key_after(choice["message"]) if asked.chat else None
        if asked.chat is None or key is None or kept.get(key, index) < index:
            return
        kept[key] = index
        before = asked.chat.continued
        tokens = [*before.tokens, *rollout.tokens.tolist()]
        n_parent = before.n_kept if before.parent is not None else 0
        self._transcripts.keep(key, tokens, before.parent, n_parent)

    async def _pieces(self, asked: _Asked) -> AsyncGenerator[Json]:
        head = _head(asked, asked.answers.chunk_name)
        streams = [
            _with_partial(
                self._client.stream(
                    prompt, _seeded(asked.sampling, number * asked.n + i), **options
                )
            )
            for number, (prompt, options) in enumerate(_grouped(asked))
            for i in range(asked.n)
        ]
        choices = [asked.answers.stream(index) for index in range(len(streams))]
        opened: set[int] = set()
        rollouts: dict[int, Rollout] = {}
        kept: dict[Key, int] = {}
        with _named_by_body(asked.form):
            async with aclosing(merged(streams)) as deltas:
                async for index, delta in deltas:
                    if index not in opened:  # what is refused has no first chunk
                        opened.add(index)
                        yield {**head, "choices": [choices[index].opening()]}
                    is_last = delta.rollout is not None
                    tokens = delta.tokens.tolist()
                    for told in choices[index].add(delta.start, tokens, is_last=is_last):
                        yield {**head, "choices": [told]}
                    if delta.rollout is not None:
                        rollouts[index] = delta.rollout
                        last = choices[index].closing(delta.rollout)
                        if asked.body.session_id is not None:
                            whole = asked.answers.choice(index, delta.rollout)
                            self._keep(asked, delta.rollout, whole, index, kept)
                        yield {**head, "choices": [last], **_prompt_ids(asked)}
        if asked.body.stream_options is not None and asked.body.stream_options.include_usage:
            whole = [rollouts[index] for index in sorted(rollouts)]
            yield {**head, "choices": [], "usage": usage_of(whole, len(asked.prompts))}


async def _with_partial(deltas: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
    """The deltas of a stream; what was sampled of an aborted one ends it, in place of an error."""
    n_told = 0
    async with aclosing(deltas):
        try:
            async for delta in deltas:
                n_told = delta.start + len(delta.tokens)
                yield delta
        except RolloutCancelled as error:
            whole = error.partial
            start = min(n_told, len(whole.tokens))
            yield Delta(
                whole.rid,
                start,
                whole.tokens[start:],
                whole.logprobs[start:],
                whole.version_runs[-1][0] if whole.version_runs else 0,
                whole.finish_reason,
                whole.worker,
                whole,
            )


def _want(options: GenerateOptions, n_top: int | None, field: str) -> GenerateOptions:
    if not n_top:
        return {}
    if n_top < 0:
        raise refusal(field, f"{n_top} tokens cannot be told")
    return {"want": msgspec.structs.replace(options.get("want", Want()), top_logprobs=n_top)}


def _check_whole(body: Body) -> None:
    if body.stream:
        raise unsupported("stream", "this answers at once; the stream is a method of its own")


def _head(asked: _Asked, name: str) -> Json:
    return {
        "id": f"{asked.answers.id_prefix}-{secrets.token_hex(12)}",
        "object": name,
        "created": int(time.time()),
        "model": asked.body.model,
    }


def _prompt_ids(asked: _Asked) -> Json:
    told: Json = {}
    if asked.chat is not None and asked.body.session_id is not None:
        told["kept_prompt_tokens"] = asked.chat.continued.n_kept
    if asked.body.return_token_ids:
        prompts: Sequence[list[int]] = asked.prompts
        told["prompt_token_ids"] = prompts[0] if len(prompts) == 1 else prompts
    return told


def _grouped(asked: _Asked) -> Iterator[tuple[list[int], GenerateOptions]]:
    """Each prompt and its options: its samples share a worker's prefix cache."""
    for prompt in asked.prompts:
        group = asked.options.get("group") or (f"g-{secrets.token_hex(8)}" if asked.n > 1 else "")
        yield prompt, {**asked.options, "group": group}


def _seeded(sampling: SamplingParams, row: int) -> SamplingParams:
    """As `RolloutClient.generate_batch` has it."""
    if sampling.sampling_seed is None:
        return sampling
    return msgspec.structs.replace(sampling, sampling_seed=row_seed(sampling.sampling_seed, row))


@contextmanager
def _named_by_body(form: Form | None = None) -> Generator[None]:
    """A field that is wrong is named as the body names it."""
    try:
        yield
    except (Refused, EngineFailed) as error:
        problem = by_body(error.problem, form.field if form is not None else "")
        if problem.field == error.field:
            raise
        raise type(error)(problem, rid=error.rid) from error


_SYNC_CLIENT = "a SyncRolloutClient, of connect_sync(); OpenAIClient takes one of connect()"


@strict(options=ask_of)
class SyncOpenAIClient(Twin[OpenAIClient]):
    """Blocking; see `OpenAIClient` for what each method promises."""

    def __init__(
        self,
        client: Annotated[SyncRolloutClient, Described(_SYNC_CLIENT)],
        tokenizer: ChatTokenizer,
        *,
        tool_format: str | ResponseTemplate = "",
        reasoning_format: str = "",
        parsers: SglangParsers | None = None,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> None:
        """See `OpenAIClient`."""
        openai = OpenAIClient(
            client.async_client,
            tokenizer,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            parsers=parsers,
            default_max_tokens=default_max_tokens,
        )
        super().__init__(openai, client.loop)

    chat_completion = blocking(OpenAIClient.chat_completion)
    chat_completion_stream = blocking(OpenAIClient.chat_completion_stream)
    completion = blocking(OpenAIClient.completion)
    completion_stream = blocking(OpenAIClient.completion_stream)
    embeddings = blocking(OpenAIClient.embeddings)
