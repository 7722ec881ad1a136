"""Embeddings: OpenAI's body in, one vector for each input out."""

import base64
from typing import Any, Literal

import msgspec

from rolloutbus.trainer_adapter.client.core.results import Embeddings, Float32s
from rolloutbus.trainer_adapter.openai.bodies import Json

EncodingFormat = Literal["float", "base64"]


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """Of a request for embeddings. None: as if it were absent."""

    input: Any
    """Text, token ids, or a list of either."""
    model: str = ""
    """Returned in the answer; `policy` chooses the weights."""
    encoding_format: EncodingFormat | None = None
    """`base64`: of little-endian float32, as OpenAI's package asks for."""
    dimensions: int | None = None
    """Numbers of a vector that are told; models must be made for it."""
    policy: str | None = None
    timeout: float | None = None
    """Seconds from now."""


def embeddings_answer(body: EmbeddingBody, embeddings: Embeddings) -> Json:
    """The response: a `list` of embeddings."""
    form = body.encoding_format or "float"
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _told(row, form)}
            for index, row in enumerate(embeddings.rows)
        ],
        "model": body.model,
        "usage": {
            "prompt_tokens": embeddings.n_prompt_tokens,
            "total_tokens": embeddings.n_prompt_tokens,
        },
    }


def _told(row: Float32s, form: EncodingFormat) -> list[float] | str:
    if form == "float":
        return row.tolist()
    return base64.b64encode(row.astype("<f4").tobytes()).decode()
