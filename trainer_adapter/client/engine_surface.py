"""What else engines can be asked through a client: scores, vectors, adapters, files, profiles.

Spec: docs/protocol.md, "More of an engine".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

import msgspec
import numpy as np

from rolloutbus.bus.actor.ref import FLEET
from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.codec import numpy_of
from rolloutbus.bus.wire.errors import Refused, RemoteProtocolError
from rolloutbus.bus.wire.messages.array import Array
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.engine import (
    Embed,
    Embedded,
    GetLoad,
    LoadLora,
    Rerank,
    Reranked,
    Saved,
    SaveKind,
    SaveWeights,
    Score,
    Scored,
    StartProfile,
    StopProfile,
    UnloadLora,
)
from rolloutbus.trainer_adapter.client.asks import Prompt, tokens_of
from rolloutbus.trainer_adapter.client.control import FleetClient
from rolloutbus.trainer_adapter.client.core.results import FleetResult, Float32s

LONG_S = 300.0
"""Deadline of what moves weights or files, unless the caller names one."""

ProfileActivity = Literal["CPU", "GPU"]

ResultT = TypeVar("ResultT", bound=msgspec.Struct)
Float32Table = np.ndarray[tuple[int, int], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Scores:
    """What scoring gave."""

    scores: Float32Table
    """float32 [items, labels]: probabilities, logprobs, or logits of classes."""
    n_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Embeddings:
    """What embedding gave."""

    rows: Float32Table
    """float32 [inputs, d]."""
    n_prompt_tokens: int


@strict()
class EngineClient(FleetClient):
    """A client that asks engines for more than tokens; which of it they can do, they know.

    Raises, all of them: EngineFailed with code `unsupported` if the engine cannot do it; Refused if
    a value is wrong or no worker is ready. Those with a `target` raise FleetCommandFailed instead:
    see `FleetClient`.
    """

    _n_turns = 0
    """Texts that were given to whoever was ready."""

    async def score(
        self,
        query: Sequence[int],
        items: Sequence[Prompt],
        label_token_ids: Sequence[int] = (),
        *,
        apply_softmax: bool = True,
        item_first: bool = False,
        worker: str = "",
        policy: str = "default",
        deadline_s: float = 0.0,
    ) -> Scores:
        """How likely each label token follows the query and each item.

        Args:
            query: token ids, may be empty.
            items: token ids, int32 [m] each.
            label_token_ids: none for models that classify.
            apply_softmax: probabilities over the labels alone. Else logprobs over the whole
                vocabulary, or logits of a model's classes.
            item_first: the item stands before the query.
            worker: name of a worker; if empty, the ready workers of `policy` take turns.
            policy: whose weights read them.
            deadline_s: seconds from now; 0 takes the settings' control deadline.
        """
        body = Score(
            query=tokens_of(query).tobytes() if len(query) else b"",
            items=[tokens_of(each).tobytes() for each in items],
            label_token_ids=list(label_token_ids),
            apply_softmax=apply_softmax,
            item_first=item_first,
        )
        scored = await self._read(Scored, body, worker, policy, deadline_s)
        return Scores(_table(scored.scores), scored.n_prompt_tokens)

    async def embed(
        self,
        inputs: Sequence[Prompt],
        *,
        dimensions: int = 0,
        worker: str = "",
        policy: str = "default",
        deadline_s: float = 0.0,
    ) -> Embeddings:
        """One vector for each input, cut to `dimensions` unless that is 0.

        Args:
            inputs: token ids, int32 [m] each.
            dimensions: numbers of a vector that are told; 0: all.
            worker: name of a worker; if empty, the ready workers of `policy` take turns.
            policy: whose weights read them.
            deadline_s: seconds from now; 0 takes the settings' control deadline.
        """
        body = Embed([tokens_of(each).tobytes() for each in inputs], dimensions)
        embedded = await self._read(Embedded, body, worker, policy, deadline_s)
        return Embeddings(_table(embedded.embeddings), embedded.n_prompt_tokens)

    async def compute_similarity(
        self,
        first: Prompt,
        second: Prompt,
        *,
        dimensions: int = 0,
        worker: str = "",
        policy: str = "default",
        deadline_s: float = 0.0,
    ) -> float:
        """Cosine of the vectors of two inputs, -1 to 1; 0 if one of them is zero.

        Of their first `dimensions` numbers only, unless that is 0. The rest as of `embed`.
        """
        read = await self.embed(
            [first, second],
            dimensions=dimensions,
            worker=worker,
            policy=policy,
            deadline_s=deadline_s,
        )
        rows = read.rows.astype(np.float64)
        lengths = np.linalg.norm(rows, axis=1)
        return float(rows[0] @ rows[1] / lengths.prod()) if lengths.all() else 0.0

    async def rerank(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        worker: str = "",
        policy: str = "default",
        deadline_s: float = 0.0,
    ) -> Float32s:
        """How well the text of each (query, text) fits, float32 [pairs]; higher is better.

        `worker`, `policy` and `deadline_s` as of `embed`.
        """
        reranked = await self._read(Reranked, Rerank(list(pairs)), worker, policy, deadline_s)
        return cast("Float32s", _floats(reranked.scores, 1))

    async def load_lora(
        self,
        name: str,
        version: int = 0,
        *,
        path: str = "",
        target: str = FLEET,
        deadline_s: float = LONG_S,
        check: bool = True,
    ) -> FleetResult:
        """Load an adapter, for requests with `lora=name`. Results are `Adapters`.

        Args:
            name: of the adapter.
            version: with a path, what it is to be called; else that of the policy
                `<policy>.<name>` in the weight store.
            path: directory of a PEFT adapter, relative to the workers' `weights_root`.
            target: `fleet`, or the name of one worker.
            deadline_s: seconds from now.
            check: raise if a target did not do it.
        """
        body = LoadLora(name, version, path, "" if path else self.bulk)
        return await self._to_workers(body, target, deadline_s, check=check)

    async def unload_lora(
        self, name: str, *, target: str = FLEET, deadline_s: float = 0.0, check: bool = True
    ) -> FleetResult:
        """Forget an adapter. Results are `Adapters`."""
        return await self._to_workers(UnloadLora(name), target, deadline_s, check=check)

    async def save_weights(
        self,
        place: str,
        name: str,
        *,
        worker: str,
        kind: SaveKind = "safetensors",
        deadline_s: float = LONG_S,
    ) -> Saved:
        """Have a worker write its active weights.

        Args:
            place: a name that its operator has given to a directory or an address.
            name: of a directory there, which must not hold anything yet.
            worker: whose weights.
            kind: `safetensors` whole tensors, `sharded` as they lie on the ranks, `remote` to an
                address.
            deadline_s: seconds from now.

        Raises:
            EngineFailed: nothing was written.
        """
        result = await self._to_workers(
            SaveWeights(place, name, kind), worker, deadline_s, check=False
        )
        return result.only(Saved)

    async def start_profile(
        self,
        *,
        n_steps: int = 0,
        activities: Sequence[ProfileActivity] = ("CPU", "GPU"),
        with_stack: bool = False,
        record_shapes: bool = False,
        target: str = FLEET,
        deadline_s: float = 0.0,
        check: bool = True,
    ) -> FleetResult:
        """Have engines record what they do. Results are `Done`.

        Args:
            n_steps: stop by itself after so many engine steps; 0: at `stop_profile`.
            activities: what is recorded: `CPU`, `GPU` or both.
            with_stack: also where in the program.
            record_shapes: also the shapes of tensors.
            target: `fleet`, or the name of one worker.
            deadline_s: seconds from now; 0 takes the settings' control deadline.
            check: False: errors stand in the result, see `FleetClient`.
        """
        body = StartProfile(n_steps, list(activities), with_stack, record_shapes)
        return await self._to_workers(body, target, deadline_s, check=check)

    async def stop_profile(
        self, *, target: str = FLEET, deadline_s: float = LONG_S, check: bool = True
    ) -> FleetResult:
        """Have them write the record. Results are `Profiled`: files below their `profile_dir`."""
        return await self._to_workers(StopProfile(), target, deadline_s, check=check)

    async def get_load(
        self, *, target: str = FLEET, deadline_s: float = 0.0, check: bool = True
    ) -> FleetResult:
        """Gauges of engines, by the engines' own names. Results are `Load`."""
        return await self._to_workers(GetLoad(), target, deadline_s, check=check)

    async def _read(
        self,
        expected: type[ResultT],
        body: msgspec.Struct,
        worker: str,
        policy: str,
        deadline_s: float,
    ) -> ResultT:
        name = worker or self._next_ready(policy)
        result = await self._to_workers(body, name, deadline_s, check=False)
        return result.only(expected)

    def _next_ready(self, policy: str) -> str:
        there = [each for each in self.connection.members if each.policy == policy]
        # What is known of their states may be old: with none better, let one judge by itself.
        ready = [each.name for each in there if each.state == "ready"]
        ready = ready or [each.name for each in there]
        if not ready:
            message = f"no worker of policy {policy!r} is there"
            raise Refused(Problem("not_ready", message, "not_started", retry_after_ms=250))
        self._n_turns += 1
        return sorted(ready)[self._n_turns % len(ready)]


def _table(array: Array) -> Float32Table:
    return cast("Float32Table", _floats(array, 2))


def _floats(array: Array, n_dimensions: int) -> np.ndarray:
    """float32 of so many dimensions.

    Raises:
        RemoteProtocolError: it is something else.
    """
    values = numpy_of(array)
    if values.dtype != np.float32 or values.ndim != n_dimensions:
        raise RemoteProtocolError(f"an array {array.dtype} {array.shape} where scores belong")
    return values
