"""The colours of weight versions and of phases, and the script that paints spans in a browser."""

from importlib.resources import files
from typing import Final

# The palette of Okabe and Ito, in an order in which neighbours differ in lightness, too.
VERSIONS: Final = ("#0072B2", "#E69F00", "#009E73", "#F0B6D5", "#D55E00", "#56B4E9")
"""Version v has number v modulo their count: which one it is stands beside it."""
PREFILL: Final = "#4D4D4D"
UNSPLIT: Final = "#A6A6A6"
PULL: Final = "#C9C9C9"
COMMIT: Final = "#8A8A8A"
STALL: Final = "#000000"


def of_version(version: int) -> str:
    """`#rrggbb`."""
    return VERSIONS[version % len(VERSIONS)]


def ink_on(colour: str) -> str:
    """Black or white, whichever can be read on it."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    is_light = 0.299 * red + 0.587 * green + 0.114 * blue > 140  # noqa: PLR2004 - of 255
    return "#000000" if is_light else "#FFFFFF"


def lanes_script() -> str:
    """JavaScript for pages: `ofVersion`, `inkOn`, `hatch`, `paintSpan`.

    The page defines `colours`, an object with the list `versions` and a colour for each phase.
    """
    return files(__package__ or "bus").joinpath("lanes.js").read_text(encoding="utf-8")
