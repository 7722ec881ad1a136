"""A session for plain scripts; blocking."""

from collections.abc import AsyncGenerator, Generator
from typing import NoReturn, Self, TypeVar, Unpack

from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import cannot_be_pickled
from rolloutbus.trainer_adapter.client.rollout import Delta, Rollout
from rolloutbus.trainer_adapter.client.rollouts import Prompt, SamplingLike, TurnOptions, ask_of
from rolloutbus.trainer_adapter.client.session import Session
from rolloutbus.trainer_adapter.client.sync_control import SyncFleetClient
from rolloutbus.trainer_adapter.client.transcript import Transcript

T = TypeVar("T")


@strict(options=ask_of)
class SyncSession:
    """Blocking turns of one session; see `Session`, which is behind it as `session`.

    A context manager that opens it and closes it.
    """

    def __init__(self, client: SyncFleetClient, session: Session) -> None:
        self._client = client
        self.session = session
        """Where it is, and how often it moved."""

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(
            self, f"the router's address and the name {self.session.name!r}, and open it there"
        )

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> Self:
        """Take a place, for whom a `with` is too short; `close` gives it back."""
        self._client.run(self.session.open())
        return self

    def close(self) -> None:
        """Give the place back; what runs goes on."""
        self._client.run(self.session.__aexit__(None, None, None))

    @property
    def transcript(self) -> Transcript:
        """Its turns so far."""
        return self.session.transcript

    def generate(
        self, prompt: Prompt, sampling: SamplingLike, **options: Unpack[TurnOptions]
    ) -> Rollout:
        """A request of the session."""
        return self._client.run(self.session.generate(prompt, sampling, **options))

    def append(self, tokens: Prompt) -> int:
        """Add tokens that no model chose."""
        return self.session.append(tokens)

    def sample(self, sampling: SamplingLike, **options: Unpack[TurnOptions]) -> Rollout:
        """Sample the next turn after the whole transcript, and add it."""
        return self._client.run(self.session.sample(sampling, **options))

    def sample_stream(
        self, sampling: SamplingLike, **options: Unpack[TurnOptions]
    ) -> Generator[Delta]:
        """Sample the next turn, streamed; it is added with the last delta."""
        yield from read_blocking(self._client, self.session.sample_stream(sampling, **options))

    def replace(self, turn: int, sampling: SamplingLike, **options: Unpack[TurnOptions]) -> Rollout:
        """Sample a turn anew; it and all after it are forgotten."""
        return self._client.run(self.session.replace(turn, sampling, **options))

    def rewind(self, turn: int) -> None:
        """Forget a turn and all after it."""
        self.session.rewind(turn)

    def branch(
        self,
        name: str,
        *,
        before: int | None = None,
        wait_s: float = 0.0,
        lease_s: float | None = None,
        grace_s: float | None = None,
    ) -> "SyncSession":
        """Another session with a copy of the transcript; use it with `with`."""
        branch = self.session.branch(
            name, before=before, wait_s=wait_s, lease_s=lease_s, grace_s=grace_s
        )
        return SyncSession(self._client, branch)

    def renew(self) -> None:
        """Let lease and grace begin anew."""
        self._client.run(self.session.renew())


def read_blocking(client: SyncFleetClient, stream: AsyncGenerator[T]) -> Generator[T]:
    """Each item as it comes; leaving early aborts the request."""
    try:
        while (item := client.run(anext(stream, None))) is not None:
            yield item
    finally:
        client.run(stream.aclose())
