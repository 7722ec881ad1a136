"""A `generate` as it comes to the engine host, in the engine's terms."""

import numpy as np

from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.ids import RequestId
from rolloutbus.bus.wire.messages.generation import Generate
from rolloutbus.engine_worker.engine import Work


def work_of(entry: Entry, body: Generate) -> Work:
    """What the engine is to do for this execution; `body` is the entry's."""
    place = entry.place
    return Work(
        key=(RequestId(entry.rid), entry.attempt),
        prompt=np.frombuffer(body.prompt, np.int32),
        sampling=body.sampling,
        prefix=body.prefix,
        stream=body.stream,
        lora=body.lora,
        want=body.want,
        grammar=body.grammar,
        processors=body.processors,
        media=body.media,
        priority=place.priority if place is not None else 0,
        session=place.session if place is not None else "",
    )
