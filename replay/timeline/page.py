"""A timeline as one HTML file that asks nothing of the network: its data and its few scripts."""

from importlib.resources import files

import msgspec

from rolloutbus.replay.timeline import colours
from rolloutbus.replay.timeline.lanes import Timeline

_TEMPLATE = "page.html"
_PLACE = "/*DATA*/"


def page_of(timeline: Timeline) -> str:
    """The whole file."""
    palette = {
        "versions": colours.VERSIONS,
        "prefill": colours.PREFILL,
        "unsplit": colours.UNSPLIT,
        "pull": colours.PULL,
        "commit": colours.COMMIT,
        "stall": colours.STALL,
    }
    content = msgspec.json.encode({"timeline": timeline, "colours": palette}).decode()
    # Names come from peers: none of them may end the element that they are in.
    safe = content.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    template = files(__package__ or "replay").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    before, _, after = template.partition(_PLACE)
    return before + safe + after
