"""One forward pass of the model over rows of different lengths, against the paged KV cache.

Rows are padded on the left, so that the last position of each is its next token's. Any model
works whose attention goes through a transformers `Cache` and takes a ready mask.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch

from rolloutbus.engine_worker.engines.transformers.causal_lm import CausalLm
from rolloutbus.engine_worker.engines.transformers.kv_blocks import N_SPECIAL_BLOCKS, TRASH_BLOCK
from rolloutbus.engine_worker.engines.transformers.lora_layers import LoraLayers, Rows
from rolloutbus.engine_worker.engines.transformers.paged_kv import KvSlots, PagedKv

Grid = np.ndarray[tuple[int, int], np.dtype[np.int64]]
PADDING = -1
"""As a position: this place of the grid holds no token."""


class Forward:
    """Runs a model. Its KV cache has `n_blocks` blocks and the special ones."""

    def __init__(self, lm: CausalLm, n_blocks: int, block_size: int) -> None:
        self._lm = lm
        self._block_size = block_size
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
            positions: int64 [n, q], `PADDING` where padded.
            tables: int64 [n, >= blocks of the longest row], the blocks of each row; `BLANK_BLOCK`
                where it has none.
            adapters: of each row; nothing: no row uses any.

        Returns:
            [n, vocab], dtype of the model.
        """
        n_keys = int(positions.max()) + 1
        n_blocks = -(-n_keys // self._block_size)
        tables = tables[:, :n_blocks]
        # Padding writes to the trash block and sees position 0, so that nothing becomes NaN.
        real = np.maximum(positions, 0)
        blocks = np.take_along_axis(tables, real // self._block_size, axis=1)
        write = blocks * self._block_size + real % self._block_size
        write[positions == PADDING] = TRASH_BLOCK
        self._kv.prepare(
            KvSlots(write=self._send(write).view(-1), read=self._send(tables).view(-1))
        )
        at = self._send(real)
        with self.lora.of_rows(adapters, self._lm.device) if adapters else nullcontext():
            output = self._lm.model(
                input_ids=self._send(ids),
                position_ids=at,
                attention_mask=self._masks(at, n_blocks * self._block_size),
                past_key_values=self._kv,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[:, -1]

    @torch.inference_mode()
    def score(self, ids: Grid) -> torch.Tensor:
        """Logits after the last token of each row, without the KV cache.

        Args:
            ids: int64 [n, q].

        Returns:
            [n, vocab], dtype of the model.
        """
        output = self._lm.model(input_ids=self._send(ids), use_cache=False, logits_to_keep=1)
        return output.logits[:, -1]

    def _probe(self, n_rows: int, n_tokens: int) -> None:
        ids = np.zeros((n_rows, n_tokens), np.int64)
        positions = np.tile(np.arange(n_tokens), (n_rows, 1))
        self.run(ids, positions, np.full((n_rows, n_tokens), TRASH_BLOCK, np.int64))

    def _masks(self, at: torch.Tensor, n_keys: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Which keys each token sees: [n, 1, q, n_keys] per kind of attention layer."""
        key = torch.arange(n_keys, device=self._lm.device)
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
