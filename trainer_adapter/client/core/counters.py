"""What a client counts; loss and repetition are visible here and nowhere else."""

from dataclasses import dataclass


@dataclass(slots=True)
class ClientCounters:
    """Since the client started."""

    finished: int = 0
    resends: int = 0
    """Commands sent again because nothing was heard of them."""
    reconnects: int = 0
    lost: int = 0
    """Executions that were declared lost."""
    resumed: int = 0
    """Requests sent again with the tokens that were held."""
    retried: int = 0
    """Requests sent again from the start."""
    deferred: int = 0
    """Requests sent again because no worker was ready for them."""
    stale_endings: int = 0
    """Endings of requests or attempts that had ended for us; acknowledged and dropped."""
    stale_deltas: int = 0
    duplicates: int = 0
    """Stream rows that brought nothing new."""
    gaps: int = 0
    repairs: int = 0
    """Repair commands sent."""
    stream_mismatches: int = 0
    """Requests whose streamed tokens were not those of the result."""
    digest_mismatches: int = 0
    sessions_moved: int = 0
    """Times that a session of ours had to change its worker."""
    sessions_lost: int = 0
    """Sessions whose place was gone when we came back."""
    malformed_in: int = 0
    """Entries whose body broke its type."""
    unexpected_in: int = 0
    """Entries that a client is never sent."""
    fleets_changed: int = 0
    """Another fleet answered at the router's address."""
    held_back: int = 0
    """Requests that waited until the router had named its fleet."""
