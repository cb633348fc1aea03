"""The device side of a step: move the input over, run the model, sample. The only caller of the model's forward."""

from __future__ import annotations

import gc

import torch

from cbgen.engine.attention.base import AttentionContext, AttentionMetadata
from cbgen.engine.kv_cache import KVCache
from cbgen.engine.loader import LoadedModel, forward
from cbgen.engine.model_input import ModelInput
from cbgen.engine.operators.backend import PagedBackend
from cbgen.engine.sampler import Sampler
from cbgen.engine.sampling_input import SamplingInput


class ModelRunner:
    """Owns the model and the KV cache tensors."""

    def __init__(self, loaded: LoadedModel, num_blocks: int, block_size: int) -> None:
        self.loaded = loaded
        self.kv_cache = KVCache(loaded.layers, num_blocks, block_size, loaded.dtype, loaded.device)
        self.operators = loaded.operators
        self.sampler = Sampler(self.operators)

    def run(self, model_input: ModelInput) -> list[int | None]:
        """Compute one step.

        Returns:
            [S] a token id for each of `model_input.sampling`; None where the logits were not finite.
        """
        loaded = self.loaded
        metadata = AttentionMetadata.from_model_input(model_input, loaded.device)
        context = AttentionContext(PagedBackend(self.operators, self.kv_cache, metadata), loaded.windows)
        logits = forward(
            loaded.model,
            torch.from_numpy(model_input.input_ids).to(loaded.device),
            torch.from_numpy(model_input.positions).to(loaded.device),
            torch.from_numpy(model_input.logits_indices).to(loaded.device),
            context,
        )
        if not model_input.sampling:
            return []
        with torch.inference_mode():
            token_ids = self.sampler.sample(logits, SamplingInput.from_sequences(model_input.sampling))
        return [None if token_id < 0 else token_id for token_id in token_ids.tolist()]

    def release_memory(self) -> None:
        """After a failed step: give back what it allocated, so that a smaller one has the room."""
        gc.collect()  # frames of the failed forward may hold tensors in cycles
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()
