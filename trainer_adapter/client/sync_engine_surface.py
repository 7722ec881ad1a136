"""What else engines can be asked by plain scripts; blocking."""

from collections.abc import Sequence

from rolloutbus.bus.actor.ref import FLEET
from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.messages.engine import Saved, SaveKind
from rolloutbus.trainer_adapter.client.engine_surface import (
    LONG_S,
    Embeddings,
    ProfileActivity,
    Scores,
)
from rolloutbus.trainer_adapter.client.rollout import FleetResult, Float32s
from rolloutbus.trainer_adapter.client.rollouts import Prompt
from rolloutbus.trainer_adapter.client.sync_control import SyncFleetClient


@strict()
class SyncEngineClient(SyncFleetClient):
    """Blocking; see `EngineClient` for what each method promises."""

    def score(
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
        """How likely each label token follows the query and each item."""
        score = self.async_client.score(
            query,
            items,
            label_token_ids,
            apply_softmax=apply_softmax,
            item_first=item_first,
            worker=worker,
            policy=policy,
            deadline_s=deadline_s,
        )
        return self.run(score)

    def embed(
        self,
        inputs: Sequence[Prompt],
        *,
        dimensions: int = 0,
        worker: str = "",
        policy: str = "default",
        deadline_s: float = 0.0,
    ) -> Embeddings:
        """One vector for each input, token ids int32 [m]."""
        embed = self.async_client.embed(
            inputs, dimensions=dimensions, worker=worker, policy=policy, deadline_s=deadline_s
        )
        return self.run(embed)

    def compute_similarity(
        self,
        first: Prompt,
        second: Prompt,
        *,
        dimensions: int = 0,
        worker: str = "",
        policy: str = "default",
        deadline_s: float = 0.0,
    ) -> float:
        """Cosine of the vectors of two inputs, -1 to 1."""
        similarity = self.async_client.compute_similarity(
            first,
            second,
            dimensions=dimensions,
            worker=worker,
            policy=policy,
            deadline_s=deadline_s,
        )
        return self.run(similarity)

    def rerank(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        worker: str = "",
        policy: str = "default",
        deadline_s: float = 0.0,
    ) -> Float32s:
        """How well the text of each (query, text) fits, float32 [pairs]."""
        rerank = self.async_client.rerank(
            pairs, worker=worker, policy=policy, deadline_s=deadline_s
        )
        return self.run(rerank)

    def load_lora(
        self,
        name: str,
        version: int = 0,
        *,
        path: str = "",
        target: str = FLEET,
        deadline_s: float = LONG_S,
        check: bool = True,
    ) -> FleetResult:
        """Load an adapter."""
        load = self.async_client.load_lora(
            name, version, path=path, target=target, deadline_s=deadline_s, check=check
        )
        return self.run(load)

    def unload_lora(
        self, name: str, *, target: str = FLEET, deadline_s: float = 0.0, check: bool = True
    ) -> FleetResult:
        """Forget an adapter."""
        return self.run(
            self.async_client.unload_lora(name, target=target, deadline_s=deadline_s, check=check)
        )

    def save_weights(
        self,
        place: str,
        name: str,
        *,
        worker: str,
        kind: SaveKind = "safetensors",
        deadline_s: float = LONG_S,
    ) -> Saved:
        """Have a worker write its active weights."""
        save = self.async_client.save_weights(
            place, name, worker=worker, kind=kind, deadline_s=deadline_s
        )
        return self.run(save)

    def start_profile(
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
        """Have engines record what they do."""
        start = self.async_client.start_profile(
            n_steps=n_steps,
            activities=activities,
            with_stack=with_stack,
            record_shapes=record_shapes,
            target=target,
            deadline_s=deadline_s,
            check=check,
        )
        return self.run(start)

    def stop_profile(
        self, *, target: str = FLEET, deadline_s: float = LONG_S, check: bool = True
    ) -> FleetResult:
        """Have them write the record."""
        return self.run(
            self.async_client.stop_profile(target=target, deadline_s=deadline_s, check=check)
        )

    def get_load(
        self, *, target: str = FLEET, deadline_s: float = 0.0, check: bool = True
    ) -> FleetResult:
        """Gauges of engines."""
        return self.run(
            self.async_client.get_load(target=target, deadline_s=deadline_s, check=check)
        )
