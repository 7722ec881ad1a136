"""A stranger who listens to the workers and counts what it sees sampled again."""

import rolloutbus
from rolloutbus.events import Finished


class Witness:
    """Start `run` as a task. Knows nothing of what the client asked for or got back."""

    def __init__(self, address: str, client: str) -> None:
        self._ended: dict[str, list[int]] = {}
        """Request id -> its tokens, as a worker first ended it."""
        self._subscriber = rolloutbus.subscribe(address, clients=[client])
        self.n_duplicated = 0
        """Endings with other tokens than the first one of the request."""

    @property
    def n_seen(self) -> int:
        """Requests that a worker has ended."""
        return len(self._ended)

    async def run(self) -> None:
        """Listen until cancelled."""
        async with self._subscriber:
            async for event in self._subscriber:
                match event:
                    case Finished(rid=rid, finish_reason="length" | "stop", n_missing=0):
                        tokens = event.tokens.tolist()
                        # A worker that is given all tokens ends the request and samples nothing.
                        self.n_duplicated += self._ended.setdefault(rid, tokens) != tokens
                    case _:
                        pass
