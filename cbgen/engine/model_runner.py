"""The device side of a step: move the input over, run the model, sample. The only caller of the model's forward."""

from __future__ import annotations

import gc

import torch

from cbgen.engine.attention.base import AttentionContext, AttentionMetadata
from cbgen.engine.attention.reference import ReferenceBackend
from cbgen.engine.kv_cache import KVCache
from cbgen.engine.loader import LoadedModel, forward
from cbgen.engine.model_input import ModelInput
from cbgen.engine.sampler import Sampler


class ModelRunner:
    """Owns the model and the KV cache tensors."""

    def __init__(self, loaded: LoadedModel, num_blocks: int, block_size: int) -> None:
        self.loaded = loaded
        self.kv_cache = KVCache(loaded.layers, num_blocks, block_size, loaded.dtype, loaded.device)
        self.sampler = Sampler()

    def run(self, model_input: ModelInput) -> list[int | None]:
        """Compute one step.

        Returns:
            [S] a token id for each of `model_input.sampling`; None where the logits were not finite.
        """
        loaded = self.loaded
        metadata = AttentionMetadata.from_model_input(model_input, loaded.device)
        context = AttentionContext(ReferenceBackend(self.kv_cache, metadata), loaded.windows)
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
            return self.sampler.sample(logits, model_input.sampling)

    def release_memory(self) -> None:
        """After a failed step: give back what it allocated, so that a smaller one has the room."""
        gc.collect()  # frames of the failed forward may hold tensors in cycles
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()
