"""Texts that SGLang reads without writing on: scores, embeddings, ranks."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

import numpy as np

from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.engine_worker.capabilities import Embeddings, Scores
from rolloutbus.engine_worker.engine import Float32s, Int32s
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.live import LiveRequests, problem_of
from rolloutbus.engine_worker.engines.sglang.requests import Unfit
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.names import ModelKind
from rolloutbus.engine_worker.engines.shared.step_loop import EngineBusy

Output = Mapping[str, Any]


class Reading:
    """Of one engine; calls come from any thread but the engine's."""

    def __init__(
        self, thread: EngineThread, live: LiveRequests, kind: ModelKind, *, has_text: bool
    ) -> None:
        self._thread = thread
        self._manager = thread.engine.tokenizer_manager
        self._live = live
        self._kind: ModelKind = kind
        self._has_text = has_text

    def check_writes(self) -> None:
        """Whether the model generates; others end SGLang when they are asked to.

        Raises:
            Unfit: it does not.
        """
        if self._kind != "generates":
            message = "This worker's model reads only; ask one whose model generates."
            raise Unfit(Problem("unsupported", message, "not_started"))

    def score(self, texts: Sequence[Sequence[int]], labels: Sequence[int]) -> Scores:
        """Logprobs of the labels, or logits of the model's classes, after each text.

        Raises:
            ValueError: no labels are named to a model that generates.
            EngineFailed: not by this model.
        """
        n_tokens = sum(map(len, texts))
        if self._kind == "classifies":
            return Scores(_rows(self._read(texts, _embedding)), n_tokens)
        if self._kind != "generates":
            raise _unsupported("score", "a model that generates or classifies")
        if not labels:
            raise ValueError("label_token_ids: a model that generates needs at least one")
        outputs = self._read(texts, lambda rid, text: _one_token(rid, text, labels))
        rows = [_logprobs(output, labels) for output in outputs]
        return Scores(np.array(rows, np.float32).reshape(len(texts), len(labels)), n_tokens)

    def embed(self, texts: Sequence[Sequence[int]], dimensions: int) -> Embeddings:
        """Vectors.

        Raises:
            EngineFailed: not by this model.
        """
        if self._kind != "embeds":
            raise _unsupported("embed", "`is_embedding`, and a model made for it")
        wanted = {"dimensions": dimensions} if dimensions else {}
        outputs = self._read(texts, lambda rid, text: _embedding(rid, text, **wanted))
        return Embeddings(_rows(outputs), sum(map(len, texts)))

    def rerank(self, pairs: Sequence[tuple[str, str]]) -> Float32s:
        """Scores.

        Raises:
            EngineFailed: not by this model.
        """
        if self._kind != "ranks" or not self._has_text:
            raise _unsupported("rerank", "a cross-encoder, `is_embedding` and `text`")
        outputs = self._read([list(pair) for pair in pairs], _pair)
        return np.array([output["embedding"] for output in outputs], np.float32).reshape(-1)

    def _read(self, texts: Sequence[Any], make: Callable[[str, Any], object]) -> Sequence[Output]:
        """SGLang's answer to each text; waits for as long as a pause lasts."""
        rids = [self._live.begin_reading() for _ in texts]
        try:
            requests = [make(rid, text) for rid, text in zip(rids, texts, strict=True)]
            return self._thread.call(lambda: self._all(requests), None, "reading")
        finally:
            self._live.end_reading(rids)

    async def _all(self, requests: Sequence[object]) -> Sequence[Output]:
        found = await asyncio.gather(*map(self._one, requests), return_exceptions=True)
        outputs: list[Output] = []
        for each in found:
            if isinstance(each, BaseException):
                raise each
            outputs.append(each)
        return outputs

    async def _one(self, request: object) -> Output:
        last: Any = {}  # one output, or a list of one
        try:
            async with aclosing(self._manager.generate_request(request, None)) as outputs:
                async for output in outputs:
                    last = output
        except Exception as error:
            status = upstream.http_status(error)
            if status is None:
                raise
            raise EngineFailed(problem_of(str(error), status)) from error
        answer = cast("list[Output]", last)[0] if isinstance(last, list) else cast("Output", last)
        if _was_aborted(answer):
            raise EngineBusy("the engine was told to end everything; ask again")
        return answer


class Reads:
    """Implements `Scorer`, `Embedder` and `Reranker` for an engine that has `_reading`."""

    _reading: Reading

    def score(
        self,
        query: Int32s,
        items: Sequence[Int32s],
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool,
        item_first: bool,
    ) -> Scores:
        """See `Scorer`."""
        first, second = query.tolist(), [item.tolist() for item in items]
        texts = [[*each, *first] if item_first else [*first, *each] for each in second]
        found = self._reading.score(texts, label_token_ids)
        return found._replace(scores=_softmax(found.scores)) if apply_softmax else found

    def embed(self, inputs: Sequence[Int32s], dimensions: int) -> Embeddings:
        """See `Embedder`."""
        return self._reading.embed([each.tolist() for each in inputs], dimensions)

    def rerank(self, pairs: Sequence[tuple[str, str]]) -> Float32s:
        """See `Reranker`."""
        return self._reading.rerank(pairs)


def _was_aborted(output: Output) -> bool:
    meta: Mapping[str, Any] = output.get("meta_info") or {}
    reason: Mapping[str, Any] = meta.get("finish_reason") or {}
    return reason.get("type") == "abort"


def _one_token(rid: str, text: Sequence[int], labels: Sequence[int]) -> object:
    return upstream.request(
        "GenerateReqInput",
        rid=rid,
        input_ids=text,
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=-1,
        token_ids_logprob=list(labels),
    )


def _embedding(rid: str, text: Sequence[int], **wanted: int) -> object:
    return upstream.request("EmbeddingReqInput", rid=rid, input_ids=text, **wanted)


def _pair(rid: str, pair: Sequence[str]) -> object:
    return upstream.request(
        "EmbeddingReqInput", rid=[rid], text=[list(pair)], is_cross_encoder_request=True
    )


def _logprobs(output: Output, labels: Sequence[int]) -> list[float]:
    told = output["meta_info"]["output_token_ids_logprobs"][0]
    by_token = {token: logprob for logprob, token, *_ in told}
    return [by_token.get(label, -math.inf) for label in labels]


def _rows(outputs: Sequence[Output]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """float32 [outputs, d]."""
    rows = np.array([output["embedding"] for output in outputs], np.float32)
    return rows.reshape(len(outputs), -1)


def _softmax(
    scores: np.ndarray[tuple[int, int], np.dtype[np.float32]],
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.exp(scores - np.logaddexp.reduce(scores, axis=1, keepdims=True))


def _unsupported(what: str, needs: str) -> EngineFailed:
    message = f"This SGLang cannot {what}: that takes {needs}."
    return EngineFailed(Problem("unsupported", message, "not_started"))
