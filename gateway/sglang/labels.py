"""What trainers call the weight versions that they publish here: SGLang's `weight_version`."""

MAX_LABELS = 1024
"""Of all policies; the oldest are forgotten."""


class WeightLabels:
    """A trainer's own names of versions. The fleet's numbers are what requests ask for."""

    def __init__(self) -> None:
        self._labels: dict[tuple[str, int], str] = {}

    def note(self, policy: str, version: int, label: str) -> None:
        """A trainer calls this version so."""
        self._labels[policy, version] = label
        if len(self._labels) > MAX_LABELS:
            del self._labels[next(iter(self._labels))]

    def label_of(self, policy: str, version: int) -> str:
        """What its trainer calls a version; one without a name is called by its number."""
        return self._labels.get((policy, version), str(version))
