"""Texts that SGLang reads without writing on: scores, embeddings, ranks."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.engine_worker.engine import (
    EmbeddingRows,
    EngineBusy,
    Float32s,
    Float32Table,
    Int32s,
    ScoreRows,
)
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.live import LiveRequests, problem_of
from rolloutbus.engine_worker.engines.sglang.requests import Unfit
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.names import ModelKind

Output = Mapping[str, Any]


class Reading:
    """Implements `Scorer`, `Embedder` and `Reranker`; which it is, is a matter of the model.

    Calls come from any thread but the engine's.
    """

    def __init__(self, thread: EngineThread, live: LiveRequests, kind: ModelKind) -> None:
        self._thread = thread
        self._live = live
        self._kind: ModelKind = kind

    def check_writes(self) -> None:
        """Whether the model generates; others end SGLang when they are asked to.

        Raises:
            Unfit: it does not.
        """
        if self._kind != "generates":
            message = "This worker's model reads only; ask one whose model generates."
            raise Unfit(Problem("unsupported", message, "not_started"))

    def score(
        self,
        query: Int32s,
        items: Sequence[Int32s],
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool,
        item_first: bool,
    ) -> ScoreRows:
        """See `Scorer`. ValueError: no labels are named to a model that generates."""
        first, second = query.tolist(), [item.tolist() for item in items]
        texts = [[*each, *first] if item_first else [*first, *each] for each in second]
        if self._kind == "classifies":
            scores = _rows(self._read(texts, _embedding))
        else:
            scores = self._label_logprobs(texts, label_token_ids)
        return ScoreRows(_softmax(scores) if apply_softmax else scores, sum(map(len, texts)))

    def embed(self, inputs: Sequence[Int32s], dimensions: int) -> EmbeddingRows:
        """See `Embedder`."""
        texts: list[list[int]] = [each.tolist() for each in inputs]
        wanted = {"dimensions": dimensions} if dimensions else {}
        try:
            outputs = self._read(texts, lambda rid, text: _embedding(rid, text, **wanted))
        except ValueError as error:  # of inputs that fit, SGLang can only mind the dimensions
            if not dimensions:
                raise
            raise EngineFailed(bad_request("dimensions", str(error))) from error
        return EmbeddingRows(_rows(outputs), sum(map(len, texts)))

    def rerank(self, pairs: Sequence[tuple[str, str]]) -> Float32s:
        """See `Reranker`."""
        outputs = self._read([list(pair) for pair in pairs], _pair)
        return np.array([output["embedding"] for output in outputs], np.float32).reshape(-1)

    def _label_logprobs(
        self, texts: Sequence[Sequence[int]], labels: Sequence[int]
    ) -> Float32Table:
        """float32 [texts, labels]."""
        if not labels:
            raise ValueError("label_token_ids: a model that generates needs at least one")
        outputs = self._read(texts, lambda rid, text: _one_token(rid, text, labels))
        rows = [_logprobs(output, labels) for output in outputs]
        return np.array(rows, np.float32).reshape(len(texts), len(labels))

    def _read(self, texts: Sequence[Any], make: Callable[[str, Any], object]) -> Sequence[Output]:
        """SGLang's answer to each text; waits for as long as a pause lasts."""
        rids = [self._live.begin_reading() for _ in texts]
        try:
            requests = [make(rid, text) for rid, text in zip(rids, texts, strict=True)]
            return self._thread.call(lambda: self._all(requests), "reading", is_patient=True)
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
        try:
            last = await self._thread.output_of(request)
        except Exception as error:
            status = upstream.http_status(error)
            if status is None:
                raise
            raise EngineFailed(problem_of(str(error), status)) from error
        answer = cast("list[Output]", last)[0] if isinstance(last, list) else cast("Output", last)
        if _was_aborted(answer):
            raise EngineBusy("the engine was told to end everything; ask again")
        return answer


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
    rows = output["meta_info"]["output_token_ids_logprobs"][0]
    by_token = {token: logprob for logprob, token, *_ in rows}
    return [by_token.get(label, -math.inf) for label in labels]


def _rows(outputs: Sequence[Output]) -> Float32Table:
    """float32 [outputs, d]."""
    rows = np.array([output["embedding"] for output in outputs], np.float32)
    return rows.reshape(len(outputs), -1)


def _softmax(scores: Float32Table) -> Float32Table:
    return np.exp(scores - np.logaddexp.reduce(scores, axis=1, keepdims=True))
