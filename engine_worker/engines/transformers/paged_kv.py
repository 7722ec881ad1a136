"""The KV cache as tensors of blocks, in the shape of a transformers `Cache`.

Per layer, keys and values are one tensor of blocks each. A forward pass writes the KV of its
tokens to their places and reads, for each row, the blocks of that row, padded to the longest
row. Which block belongs to whom is decided elsewhere (`kv_blocks`).

Places that the mask hides are read too, and attention multiplies their values by zero. 0 x NaN is
NaN, and weights or adapters that overflow do write NaN and infinity. So places that their row has
not written yet are zeros: blocks are cleared when a request takes them. Hiding foreign places in
what each pass gathers cost a CPU 5 to 10 % of a decode step; clearing costs at most 0.2 % of the
steps of a request, on a CPU and on an H200.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache


@dataclass(frozen=True, slots=True)
class KvSlots:
    """Where one forward pass of n rows, q tokens each, writes and reads."""

    write: torch.Tensor
    """int64 [n * q]: place of each token, block * block_size + offset."""
    read: torch.Tensor
    """int64 [n * b]: the blocks of each row, in token order."""


class PagedKv(Cache):
    """Blocks for all layers; allocated when first used, since only the model knows the shapes."""

    def __init__(self, n_layers: int, n_blocks: int, block_size: int) -> None:
        super().__init__(layers=[])
        self._n_blocks = n_blocks
        self._block_size = block_size
        self._keys: list[torch.Tensor | None] = [None] * n_layers
        self._values: list[torch.Tensor | None] = [None] * n_layers
        self._places: KvSlots | None = None

    @property
    def size_bytes(self) -> int:
        """Memory held now."""
        return sum(t.nbytes for t in [*self._keys, *self._values] if t is not None)

    def prepare(self, places: KvSlots) -> None:
        """Say where the next forward pass writes and reads."""
        self._places = places

    def clear(self, blocks: torch.Tensor) -> None:
        """Fill blocks, int64 [k], with zeros, in all layers that have any."""
        for held in [*self._keys, *self._values]:
            if held is not None:
                held.view(self._n_blocks, -1).index_fill_(0, blocks, 0)

    def drop(self) -> int:
        """Free all blocks, contents included; returns the bytes. The next pass allocates anew."""
        size_bytes = self.size_bytes
        self._keys = [None] * len(self._keys)
        self._values = [None] * len(self._values)
        return size_bytes

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_args: Any,  # noqa: ANN401 - the signature is transformers'
        **_kwargs: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this layer's KV [n, heads, q, dim]; return that of all rows [n, heads, L, dim]."""
        keys = self._store(self._keys, layer_idx, key_states)
        values = self._store(self._values, layer_idx, value_states)
        n_rows = key_states.shape[0]
        return self._gather(keys, n_rows), self._gather(values, n_rows)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unknown here and of no use: every pass brings its own positions and mask."""
        del layer_idx
        return 0

    def _store(
        self, blocks: list[torch.Tensor | None], layer: int, states: torch.Tensor
    ) -> torch.Tensor:
        assert self._places is not None
        n_rows, heads, q, dim = states.shape
        held = blocks[layer]
        if held is None:
            shape = (self._n_blocks * self._block_size, heads, dim)
            held = torch.zeros(shape, dtype=states.dtype, device=states.device)
            blocks[layer] = held
        held.index_copy_(
            0, self._places.write, states.transpose(1, 2).reshape(n_rows * q, heads, dim)
        )
        return held

    def _gather(self, held: torch.Tensor, n_rows: int) -> torch.Tensor:
        assert self._places is not None
        _, heads, dim = held.shape
        blocks = held.view(self._n_blocks, -1).index_select(0, self._places.read)
        return blocks.view(n_rows, -1, heads, dim).transpose(1, 2)
