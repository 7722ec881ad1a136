"""Where on this machine an operator lets commands read and write."""

from collections.abc import Mapping
from typing import NamedTuple, Self

from rolloutbus.engine_worker.settings import WorkerSettings

NOWHERE: Mapping[str, str] = {}


class OperatorPaths(NamedTuple):
    """From the worker's settings; peers name what lies below these, never anything else."""

    weights_root: str = ""
    """Versions and adapters are read from files here; empty: none are."""
    save_targets: Mapping[str, str] = NOWHERE
    """Name -> directory or address that weights may be written to."""
    profile_dir: str = ""
    """Profiles are written here; empty: none are."""

    @classmethod
    def of(cls, settings: WorkerSettings) -> Self:
        """Those of a worker."""
        return cls(settings.weights_root, settings.save_targets, settings.profile_dir)
