"""One forward pass of the model over rows of different lengths, against the paged KV cache.

Rows are padded on the left, so that the last position of each is its next token's. Any model
works whose attention goes through a transformers `Cache` and takes a ready mask.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from rolloutbus.engine_worker.engines.transformers.causal_lm import CausalLm
from rolloutbus.engine_worker.engines.transformers.kv_blocks import N_SPECIAL_BLOCKS, TRASH_BLOCK
from rolloutbus.engine_worker.engines.transformers.lora_layers import LoraLayers, Rows


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
        """Set where the next forward pass writes and reads."""
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


Grid = np.ndarray[tuple[int, int], np.dtype[np.int64]]
PADDING = -1
"""As a position: this place of the grid holds no token."""


class Forward:
    """Runs a model. Its KV cache has `n_blocks` blocks and the special ones."""

    def __init__(self, lm: CausalLm, n_blocks: int, block_size: int) -> None:
        self._lm = lm
        self._block_size = block_size
        n_places = -(-lm.max_context // block_size) * block_size
        self._places = torch.arange(n_places, device=lm.device)
        self._kv = PagedKv(lm.n_layers, n_blocks + N_SPECIAL_BLOCKS, block_size)
        # The first use of the cache allocates it, and shows early what the model cannot do.
        self.allocate()
        self.lora = LoraLayers(lm.model, self._probe)

    def allocate(self) -> int:
        """Take the memory of the KV cache if it was dropped; returns the bytes taken."""
        before = self._kv.size_bytes
        nowhere = np.full((1, 1), TRASH_BLOCK, np.int64)
        self.run(np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64), nowhere)
        return self._kv.size_bytes - before

    @torch.inference_mode()
    def clear(self, blocks: Sequence[int]) -> None:
        """Make new owners' blocks harmless, whatever they hold."""
        self._kv.clear(torch.as_tensor(blocks, dtype=torch.int64, device=self._lm.device))

    def drop(self) -> int:
        """Free the KV cache; returns the bytes freed."""
        return self._kv.drop()

    @torch.inference_mode()
    def run(self, ids: Grid, positions: Grid, tables: Grid, adapters: Rows = ()) -> torch.Tensor:
        """Write the KV of these tokens and return the logits after each row's last one.

        Args:
            ids: int64 [n, q], padded on the left with any valid id.
            positions: int64 [n, q], `PADDING` where padded; a grid of one column is not.
            tables: int64 [n, >= blocks of the longest row], the blocks of each row; `BLANK_BLOCK`
                where it has none.
            adapters: of each row; nothing: no row uses any.

        Returns:
            [n, vocab], dtype of the model.
        """
        size = self._block_size
        n_blocks = int(positions.max()) // size + 1
        tables = tables[:, :n_blocks]
        real = positions
        if positions.shape[1] > 1:
            # Padding writes to the trash block and sees position 0, so that nothing becomes NaN.
            real = np.maximum(positions, 0)
        blocks = tables[np.arange(len(tables))[:, None], real // size]
        write = blocks * size + real % size
        if real is not positions:
            write[positions == PADDING] = TRASH_BLOCK
        self._kv.prepare(
            KvSlots(write=self._send(write).view(-1), read=self._send(tables).view(-1))
        )
        at = self._send(real)
        with self.lora.of_rows(adapters, self._lm.device) if adapters else nullcontext():
            output = self._lm.model(
                input_ids=self._send(ids),
                position_ids=at,
                attention_mask=self._masks(at, n_blocks * size),
                past_key_values=self._kv,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[:, -1]

    @torch.inference_mode()
    def score(self, ids: Grid) -> torch.Tensor:
        """Logits [n, vocab] after the last token of each row, int64 [n, q]; uses no KV cache."""
        output = self._lm.model(input_ids=self._send(ids), use_cache=False, logits_to_keep=1)
        return output.logits[:, -1]

    def _probe(self, n_rows: int, n_tokens: int) -> None:
        ids = np.zeros((n_rows, n_tokens), np.int64)
        positions = np.tile(np.arange(n_tokens), (n_rows, 1))
        self.run(ids, positions, np.full((n_rows, n_tokens), TRASH_BLOCK, np.int64))

    def _masks(self, at: torch.Tensor, n_keys: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Which keys each token sees: [n, 1, q, n_keys] per kind of attention layer."""
        key = self._places[:n_keys]
        query = at[:, None, :, None]
        causal = key <= query
        masks = {
            kind: self._as_mask(causal if window is None else causal & (key > query - window))
            for kind, window in self._lm.windows.items()
        }
        return masks.get("all", masks)

    def _as_mask(self, visible: torch.Tensor) -> torch.Tensor:
        if not self._lm.is_mask_additive:
            return visible
        lowest = torch.finfo(self._lm.dtype).min
        return torch.zeros_like(visible, dtype=self._lm.dtype).masked_fill_(~visible, lowest)

    def _send(self, grid: Grid) -> torch.Tensor:
        return torch.as_tensor(np.ascontiguousarray(grid), device=self._lm.device)
