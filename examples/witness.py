"""A stranger who listens to the workers and counts the endings that it sees."""

from collections import Counter

from rolloutbus import RolloutClient, StreamSubscriber


class Witness:
    """Start `run` as a task. Knows nothing of what the client asked for or got back."""

    def __init__(self, client: RolloutClient) -> None:
        self.endings: Counter[str] = Counter()
        """Request id -> how often a worker sampled its last token."""
        self._client = client
        self._subscriber = StreamSubscriber(client=client.connection.settings.name)

    @property
    def n_duplicated(self) -> int:
        """Endings beyond the first."""
        return self.endings.total() - len(self.endings)

    def follow(self) -> None:
        """Listen to the workers that are there now."""
        self._subscriber.follow(member.stream for member in self._client.connection.members)

    async def run(self) -> None:
        """Listen until cancelled."""
        self.follow()
        async with self._subscriber:
            async for row in self._subscriber:
                # An ending without tokens samples nothing: it only repeats what is known.
                if row.finish in {"length", "stop"} and len(row.tokens):
                    self.endings[row.rid] += 1
