"""What must be said beside a timeline: how it was measured, and what its recording lacks. Pure."""

from collections.abc import Iterable, Mapping

from rolloutbus.replay.timeline.lanes import WorkerLane

_LOST = {
    "tap": "messages of the router's tap",
    "stream": "tokens of streams",
    "memory": "messages for want of room",
}


def notes_of(
    lanes: Iterable[WorkerLane],
    *,
    has_tap: bool,
    chosen: str,
    lost: Mapping[str, int],
    n_malformed: int,
) -> list[str]:
    """Sentences.

    Args:
        lanes: what is shown.
        has_tap: whether the router was heard.
        chosen: filter of the recording; empty: everything was recorded.
        lost: source -> how much of it the recorder missed.
        n_malformed: entries that could not be read.
    """
    notes = ["Times are those at which the recorder heard of something."]
    if has_tap:
        notes.append(
            "Prefill is what lies between a worker's word that it has accepted a request and the "
            "first token; waiting for a place in the engine's batch is part of it."
        )
        notes.append(
            "A stall is as long as the worker measured; it is drawn to end where the worker's "
            "word of the commit was heard."
        )
    else:
        notes.append(
            "Recorded without the router's tap: queue, prefill, pauses, updates and losses are not "
            "in it, and states and versions of workers only as far as clients are told."
        )
    if chosen:
        notes.append(
            f"Recorded with the filter {chosen}: other requests, and heartbeats with states, "
            "are not in it."
        )
    executions = [each for lane in lanes for each in lane.executions]
    n_unsplit = sum(span.kind == "unsplit" for each in executions for span in each.spans)
    if n_unsplit:
        notes.append(f"Prefill and decode cannot be told apart in {n_unsplit} executions.")
    n_open = sum(each.outcome == "open" for each in executions)
    if n_open:
        notes.append(f"The end of {n_open} executions was not heard.")
    notes += [f"Not recorded: {n:,} {_LOST.get(source, source)}." for source, n in lost.items()]
    if n_malformed:
        notes.append(f"{n_malformed} entries could not be read.")
    return notes
