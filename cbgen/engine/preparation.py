"""A model as it was loaded becomes the one that serves: operators chosen, layers joined, weights packed.

Enters: a `LoadedModel` straight from its files. Leaves: the same with `operators` set and its module changed in place.
The model's answer to a few tokens is compared before and after; what was joined is said in one word per form.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from cbgen.engine.attention.base import AttentionContext, AttentionMetadata
from cbgen.engine.fusion import CallRecorder, Fuser, FusionReport, pack_linears
from cbgen.engine.kv_cache import KVCache
from cbgen.engine.linear import LinearFactory, choose_packing
from cbgen.engine.loader import LoadedModel, forward
from cbgen.engine.model_input import ModelInput
from cbgen.engine.operators.backend import PagedBackend
from cbgen.engine.operators.choice import choose_operators
from cbgen.engine.operators.native import NativeOperators
from cbgen.engine.operators.trials import ModelShape
from cbgen.engine.sampling_input import SamplingInput
from cbgen.errors import CbgenError

_PROBE_LENGTHS = (6, 5)  # tokens of the two sequences the model runs on
_BLOCK_SIZE = 16
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2}  # of the logits, relative; 0.15 in bfloat16


def prepare(loaded: LoadedModel, disabled: Set[str], notice: Callable[[str], None]) -> LoadedModel:
    """Make a freshly loaded model fast.

    Args:
        loaded: from `load_model`; its module is changed in place.
        disabled: names out of `OPTIMIZATIONS` to do without.
        notice: told what takes seconds, and what makes the run slower than it could be.

    Raises:
        CbgenError: the joined model answers differently; this is a fault of ours.
    """
    shape = ModelShape(
        loaded.dtype,
        loaded.device,
        loaded.hidden_size,
        loaded.intermediate_size,
        loaded.vocab_size,
        tuple(loaded.layers),
    )
    operators = choose_operators(loaded.device, disabled, notice, shape)
    loaded = replace(loaded, operators=operators)
    if loaded.device.type != "cpu":
        return loaded
    gemm = operators.gemm if isinstance(operators, NativeOperators) else None
    packing = "none" if "packing" in disabled else choose_packing(loaded.dtype, loaded.device, gemm)
    linears = LinearFactory(operators, gemm, packing)
    probe = _Probe(loaded)
    with torch.inference_mode():
        before = probe.run(probe.backend)
        report = FusionReport()
        if "fusion" not in disabled:
            fuser = Fuser(linears, probe.recorder)
            fuser.fuse(loaded.model, probe.run)
            report = fuser.report
        if packing != "none":
            report.linears = pack_linears(loaded.model, linears)
        after = probe.run(probe.backend)
    _check(loaded, before, after)
    return replace(loaded, packing=packing, fused=report.describe())


def _check(loaded: LoadedModel, before: Tensor, after: Tensor) -> None:
    difference = float((after - before).norm() / before.norm().clamp_min(1e-6))
    if torch.isfinite(before).all() and not difference < _TOLERANCE.get(loaded.dtype, 0.15):
        raise CbgenError(
            f"joining the layers of {type(loaded.model).__name__} changed its answers by {difference:.1%}; run with "
            "--disable fusion,packing, and please report this model"
        )


class _Probe:
    """Two short sequences on a cache of their own."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        starts = np.cumsum([0, *_PROBE_LENGTHS])
        positions = np.concatenate([np.arange(length) for length in _PROBE_LENGTHS])
        blocks = np.repeat(np.arange(len(_PROBE_LENGTHS)), _PROBE_LENGTHS)
        model_input = ModelInput(
            input_ids=(7 * np.arange(len(positions)) + 3) % loaded.vocab_size,
            positions=positions,
            slot_mapping=blocks * _BLOCK_SIZE + positions,
            cu_seqlens_q=starts.astype(np.int32),
            context_lens=np.array(_PROBE_LENGTHS, dtype=np.int32),
            block_tables=np.arange(len(_PROBE_LENGTHS), dtype=np.int32)[:, None],
            num_decodes=0,
            logits_indices=starts[1:] - 1,
            sampling=[],
            sampling_input=SamplingInput.from_sequences([]),
        )
        self._input_ids = torch.from_numpy(model_input.input_ids)
        self._positions = torch.from_numpy(positions)
        self._logits_indices = torch.from_numpy(model_input.logits_indices)
        kv_cache = KVCache(loaded.layers, len(_PROBE_LENGTHS), _BLOCK_SIZE, loaded.dtype, loaded.device)
        metadata = AttentionMetadata.from_model_input(model_input, loaded.device)
        self.backend = PagedBackend(loaded.operators, kv_cache, metadata)
        self.recorder = CallRecorder(loaded.operators, kv_cache, metadata)

    def run(self, backend: PagedBackend) -> Tensor:
        """Logits of both sequences' last tokens, [2, vocab_size] float32."""
        context = AttentionContext(backend, self._loaded.windows)
        return forward(self._loaded.model, self._input_ids, self._positions, self._logits_indices, context).float()
