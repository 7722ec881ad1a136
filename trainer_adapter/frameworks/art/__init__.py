"""OpenPipe ART on a fleet: a backend that trains here, and samples where the bus's workers are.

Written for ART 0.5.18. `SGLangBackend` takes the place of `art.LocalBackend`; trajectories, their
tokens, advantages and loss, checkpoints and logs stay ART's own code.
"""

from rolloutbus.trainer_adapter.frameworks.art.backend import SGLangBackend
from rolloutbus.trainer_adapter.frameworks.art.settings import DeviceConfig, SGLangConfig

__all__ = ["DeviceConfig", "SGLangBackend", "SGLangConfig"]
