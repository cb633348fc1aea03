"""The device side of a step: move the input over, run the model, sample. The only caller of the model's forward."""

from __future__ import annotations

import gc
import time

import numpy as np
import numpy.typing as npt
import torch

from cbgen.engine.attention.base import AttentionContext, AttentionMetadata
from cbgen.engine.kv_cache import KVCache
from cbgen.engine.loader import LoadedModel, forward
from cbgen.engine.model_input import ModelInput
from cbgen.engine.operators.backend import PagedBackend
from cbgen.engine.sampler import Sampler


class ModelRunner:
    """Owns the model and the KV cache tensors.

    Attributes:
        sample_seconds: wall-clock time spent in the sampler so far.
    """

    def __init__(self, loaded: LoadedModel, num_blocks: int, block_size: int) -> None:
        self.loaded = loaded
        self.kv_cache = KVCache(loaded.layers, num_blocks, block_size, loaded.dtype, loaded.device)
        self.operators = loaded.operators
        self.sampler = Sampler(self.operators)
        self.sample_seconds = 0.0

    def run(self, model_input: ModelInput) -> npt.NDArray[np.int64]:
        """Compute one step.

        Returns:
            [S] a token id for each of `model_input.sampling`; -1 where the logits were not finite.
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
            return np.zeros(0, dtype=np.int64)
        started = time.perf_counter()
        with torch.inference_mode():
            token_ids = self.sampler.sample(logits, model_input.sampling_input)
        self.sample_seconds += time.perf_counter() - started
        return token_ids

    def release_memory(self) -> None:
        """After a failed step: give back what it allocated, so that a smaller one has the room."""
        gc.collect()  # frames of the failed forward may hold tensors in cycles
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()
