"""Building blocks of lanes: a value that changes with time, and numbers counted into bins."""

from rolloutbus.replay.timeline.lanes import Span, SpanKind

FINE_S = 0.05
"""Width of the bins that are counted into, before it is known how long a recording is."""
MAX_BINS = 240


class Track:
    """A value, and since when; what it was before becomes spans."""

    def __init__(self) -> None:
        self._value: tuple[SpanKind, int] | None = None
        self._since_s = 0.0
        self._note = ""
        self.spans: list[Span] = []

    @property
    def kind(self) -> SpanKind | None:
        """The value now; None while there is none to be shown."""
        return self._value[0] if self._value is not None else None

    def change(
        self, kind: SpanKind | None, at_s: float, version: int = -1, *, note: str = ""
    ) -> None:
        """From `at_s` on it is this; saying the same again changes nothing."""
        value = None if kind is None else (kind, version)
        if value == self._value:
            return
        self.close(at_s)
        self._value, self._note = value, note
        # What was said late may reach back into the span before it, which `close` has cut.
        self._since_s = at_s

    def close(self, at_s: float) -> None:
        """It is nothing any more."""
        if self._value is not None and at_s > self._since_s:
            kind, version = self._value
            self.spans.append(Span(kind, self._since_s, at_s, version, note=self._note))
        self._value = None


class Sums:
    """Amounts, summed up in bins of time."""

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}

    def add(self, at_s: float, amount: int) -> None:
        """Count this much at this time."""
        bin_ = int(at_s / FINE_S)
        self._bins[bin_] = self._bins.get(bin_, 0) + amount

    def rates(self, n_bins: int, width: int) -> list[float]:
        """Amounts per second, in bins that are `width` fine ones wide."""
        sums = [0] * n_bins
        for bin_, amount in self._bins.items():
            sums[min(bin_ // width, n_bins - 1)] += amount
        return [round(each / (width * FINE_S), 3) for each in sums]


class Highs:
    """A number that changes now and then: the highest in each bin."""

    def __init__(self) -> None:
        self._bins: dict[int, tuple[int, int]] = {}
        """Bin -> the highest and the last in it."""

    def note(self, at_s: float, value: int) -> None:
        """It is this from now on."""
        bin_ = int(at_s / FINE_S)
        high, _ = self._bins.get(bin_, (0, 0))
        self._bins[bin_] = max(high, value), value

    def highest(self, n_bins: int, width: int) -> list[int]:
        """In bins that are `width` fine ones wide."""
        found = [0] * n_bins
        last = at = 0
        for bin_, (high, value) in sorted(self._bins.items()):
            here = min(bin_ // width, n_bins - 1)
            for between in range(at, here + 1):
                found[between] = max(found[between], last)
            found[here] = max(found[here], high)
            last, at = value, here
        for rest in range(at, n_bins):
            found[rest] = max(found[rest], last)
        return found


def bins_of(duration_s: float) -> tuple[int, int]:
    """How many bins, and how many fine ones each is wide, for a recording of this length."""
    n_fine = int(duration_s / FINE_S) + 1
    width = -(-n_fine // MAX_BINS)
    return -(-n_fine // width), width
