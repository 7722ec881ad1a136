"""Names for what an engine's memory holds, as `sleep` and `wake_up` take them."""

from typing import ClassVar, Final

from rolloutbus.bus.wire.messages import control


class MemoryTag:
    """Tags, and the lists of them that trainers use."""

    WEIGHTS: Final = "weights"
    KV_CACHE: Final = "kv_cache"
    CUDA_GRAPH: Final = "cuda_graph"
    """Captured graphs."""
    ALL: ClassVar[list[control.MemoryTag]] = [WEIGHTS, KV_CACHE, CUDA_GRAPH]
    TRAINING_DEFAULT: ClassVar[list[control.MemoryTag]] = [WEIGHTS]
    """What a trainer on the same GPU can do without while it brings new weights."""
