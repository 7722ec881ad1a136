"""What a plain forward pass says about the fleet that all tests share."""

from tests.integration.reference import Reference


class SameWeights(Reference):
    """Of a fleet whose versions all hold the weights that it began with."""

    def _load(self, version: int) -> None:
        del version
