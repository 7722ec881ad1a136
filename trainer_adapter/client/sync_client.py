"""The client of the bus for plain scripts: rollouts, streams and sessions, blocking."""

from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Unpack

from rolloutbus.bus.actor.ref import FLEET
from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.messages.generation import DetachedRequest
from rolloutbus.bus.wire.messages.session import DEFAULT_GRACE_S, DEFAULT_LEASE_S
from rolloutbus.trainer_adapter.client.client import WEIGHTS_DEADLINE_S, settings_for
from rolloutbus.trainer_adapter.client.rollout import Delta, Rollout
from rolloutbus.trainer_adapter.client.rollouts import (
    DEFAULT_DEADLINE_S,
    GenerateOptions,
    Prompt,
    SamplingLike,
    ask_of,
)
from rolloutbus.trainer_adapter.client.sync_engine_surface import SyncEngineClient
from rolloutbus.trainer_adapter.client.sync_session import SyncSession, read_blocking
from rolloutbus.trainer_adapter.client.weight_queries import ActiveTensor
from rolloutbus.trainer_adapter.client.weights_report import WeightsReport


@strict(options=ask_of)
class SyncRolloutClient(SyncEngineClient):
    """Blocking rollouts; see `RolloutClient` for what each method promises. A context manager."""

    def generate(
        self, prompt: Prompt, sampling: SamplingLike, **options: Unpack[GenerateOptions]
    ) -> Rollout:
        """Sample one continuation of `prompt`, int32 [n_prompt_tokens]."""
        return self.run(self.async_client.generate(prompt, sampling, **options))

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingLike,
        *,
        n: int = 1,
        **options: Unpack[GenerateOptions],
    ) -> list[list[Rollout]]:
        """Sample `n` continuations of each prompt: one list per prompt."""
        return self.run(self.async_client.generate_batch(prompts, sampling, n=n, **options))

    def stream(
        self, prompt: Prompt, sampling: SamplingLike, **options: Unpack[GenerateOptions]
    ) -> Generator[Delta]:
        """Stream tokens; leaving the iterator early aborts the request."""
        yield from read_blocking(self, self.async_client.stream(prompt, sampling, **options))

    def reattach(self, *, deadline_s: float = 0.0) -> list[DetachedRequest]:
        """Name the detached requests of this client's name."""
        return self.run(self.async_client.reattach(deadline_s=deadline_s))

    def collect(self, rid: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Rollout:
        """Wait for the result of a detached request."""
        return self.run(self.async_client.collect(rid, deadline_s=deadline_s))

    def follow(self, rid: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Generator[Delta]:
        """Stream a detached request from its first token on."""
        yield from read_blocking(self, self.async_client.follow(rid, deadline_s=deadline_s))

    def check_weights(
        self,
        names: Sequence[str] = (),
        *,
        target: str = FLEET,
        deadline_s: float = WEIGHTS_DEADLINE_S,
    ) -> WeightsReport:
        """Compare the active weights of workers by digest."""
        check = self.async_client.check_weights(names, target=target, deadline_s=deadline_s)
        return self.run(check)

    def get_weights(
        self, name: str, worker: str, *, deadline_s: float = WEIGHTS_DEADLINE_S
    ) -> ActiveTensor:
        """The bytes of one tensor as a worker has it active."""
        return self.run(self.async_client.get_weights(name, worker, deadline_s=deadline_s))

    def abort(self, rids: str | Iterable[str] | None = None) -> int:
        """Stop these requests (None: everything this client samples). Returns how many."""
        return self.run(self.async_client.abort(rids))

    def session(
        self,
        name: str,
        *,
        wait_s: float = 0.0,
        policy: str = "default",
        lease_s: float = DEFAULT_LEASE_S,
        grace_s: float = DEFAULT_GRACE_S,
    ) -> SyncSession:
        """A session, open for the length of a `with`; see `RolloutClient.session`."""
        session = self.async_client.session(
            name, wait_s=wait_s, policy=policy, lease_s=lease_s, grace_s=grace_s
        )
        return SyncSession(self, session)


@strict()
def connect_sync(
    address: str, *, name: str = "", key_file: str | Path = "", fleet: str = ""
) -> SyncRolloutClient:
    """Make a blocking client; use it with `with`. Arguments as of `connect`."""
    return SyncRolloutClient(settings_for(address, name, key_file, fleet))
