"""A step of made-up tokens on a KV cache of its own: shows how a model answers and what a step takes, before any row.

Enters: a loaded model and the lengths of some sequences. Leaves: logits. All sequences are prompts read in one go.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cbgen.engine.attention.base import AttentionContext, AttentionMetadata
from cbgen.engine.kv_cache import KVCache
from cbgen.engine.loader import LoadedModel, forward
from cbgen.engine.model_input import ModelInput
from cbgen.engine.operators.backend import PagedBackend
from cbgen.engine.sampling_input import SamplingInput

_BLOCK_SIZE = 16


class DryRun:
    """Some prompts in one step. The tensors it needs are made here, once; `run` allocates what a step does.

    Args:
        loaded: the model, with the operators it is to run with.
        lengths: tokens of each sequence, at least 1 and at most the model's context.
        num_logits: how many tokens get logits: the first so many of the step; None for the last of each sequence.

    Attributes:
        kv_cache, metadata: for backends of the caller's own.
        backend: the one a step has.
    """

    def __init__(self, loaded: LoadedModel, lengths: list[int], num_logits: int | None = None) -> None:
        self._loaded = loaded
        model_input = _model_input(lengths, loaded.vocab_size, num_logits)
        num_blocks = int(model_input.block_tables.max()) + 1
        self.kv_cache = KVCache(loaded.layers, num_blocks, _BLOCK_SIZE, loaded.dtype, loaded.device)
        self.metadata = AttentionMetadata.from_model_input(model_input, loaded.device)
        self.backend = PagedBackend(loaded.operators, self.kv_cache, self.metadata)
        self._input_ids = torch.from_numpy(model_input.input_ids).to(loaded.device)
        self._positions = torch.from_numpy(model_input.positions).to(loaded.device)
        self._logits_indices = torch.from_numpy(model_input.logits_indices).to(loaded.device)

    def run(self, backend: PagedBackend | None = None) -> Tensor:
        """Logits of the step in the model's dtype, [sequences or `num_logits`, vocab_size]."""
        context = AttentionContext(backend or self.backend, self._loaded.windows)
        return forward(self._loaded.model, self._input_ids, self._positions, self._logits_indices, context)


def _model_input(lengths: list[int], vocab_size: int, num_logits: int | None) -> ModelInput:
    """Each sequence in blocks of its own, one after the other."""
    starts = np.cumsum([0, *lengths])  # [B + 1]
    num_blocks = [-(-length // _BLOCK_SIZE) for length in lengths]
    first_blocks = np.cumsum([0, *num_blocks])[:-1]  # [B]
    positions = np.concatenate([np.arange(length) for length in lengths])  # [T]
    # Past a sequence's own blocks stands a neighbour's, or the last: any that exists.
    tables = np.minimum(first_blocks[:, None] + np.arange(max(num_blocks)), sum(num_blocks) - 1)
    return ModelInput(
        input_ids=(7 * np.arange(len(positions)) + 3) % vocab_size,
        positions=positions,
        slot_mapping=np.repeat(first_blocks, lengths) * _BLOCK_SIZE + positions,
        cu_seqlens_q=starts.astype(np.int32),
        context_lens=np.array(lengths, dtype=np.int32),
        block_tables=tables.astype(np.int32),  # [B, blocks of the longest]
        num_decodes=0,
        logits_indices=starts[1:] - 1 if num_logits is None else np.arange(num_logits),
        sampling=[],
        sampling_input=SamplingInput.from_sequences([]),
    )
