"""A model as it was loaded becomes the one that serves: operators chosen, layers joined, weights packed.

Enters: a `LoadedModel` straight from its files. Leaves: the same with `operators` set and its module changed in place.
The model's answer to a few tokens is compared before and after; what was joined is said in one word per form.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

import torch
from torch import Tensor

from cbgen.engine.containment import short_memory_named
from cbgen.engine.dry_run import DryRun
from cbgen.engine.fusion import CallRecorder, Fuser, FusionReport, pack_linears
from cbgen.engine.linear import LinearFactory, choose_packing
from cbgen.engine.loader import LoadedModel, step_weight_bytes
from cbgen.engine.machine_probe import release_cached_memory
from cbgen.engine.operators.choice import choose_operators
from cbgen.engine.operators.native import NativeOperators
from cbgen.engine.operators.trials import ModelShape
from cbgen.errors import CbgenError

_PROBE_LENGTHS = (6, 5)  # tokens of the two sequences the model runs on
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2}  # of the logits, relative; 0.15 in bfloat16


def prepare(loaded: LoadedModel, disabled: Set[str], notice: Callable[[str], None]) -> LoadedModel:
    """Make a freshly loaded model fast.

    Args:
        loaded: from `load_model`; its module is changed in place.
        disabled: names out of `OPTIMIZATIONS` to do without.
        notice: told what takes seconds, and what makes the run slower than it could be.

    Raises:
        ModelError: memory ran out.
        CbgenError: the joined model answers differently; this is a fault of ours.
    """
    with short_memory_named("no memory is left to prepare the model: free some, or run with --disable fusion,packing"):
        return _prepare(loaded, disabled, notice)


def _prepare(loaded: LoadedModel, disabled: Set[str], notice: Callable[[str], None]) -> LoadedModel:
    operators = choose_operators(loaded.device, disabled, notice, _shape(loaded))
    loaded = replace(loaded, operators=operators, weight_bytes=step_weight_bytes(loaded.model))
    gemm = operators.gemm if isinstance(operators, NativeOperators) else None
    packing = "none" if "packing" in disabled else choose_packing(loaded.dtype, loaded.device, gemm)
    linears = LinearFactory(operators, gemm, packing)
    probe = DryRun(loaded, list(_PROBE_LENGTHS))
    with torch.inference_mode():
        before = probe.run().float()
        report = FusionReport()
        if "fusion" not in disabled:
            fuser = Fuser(linears, CallRecorder(operators, probe.kv_cache, probe.metadata))
            fuser.fuse(loaded.model, probe.run)
            report = fuser.report
        if packing != "none":
            report.linears = pack_linears(loaded.model, linears)
        after = probe.run().float()
    _check(loaded, before, after)
    release_cached_memory(loaded.device)  # of the weights that were joined
    return replace(loaded, packing=packing, fused=report.describe())


def _shape(loaded: LoadedModel) -> ModelShape:
    return ModelShape(
        loaded.dtype,
        loaded.device,
        loaded.hidden_size,
        loaded.intermediate_size,
        loaded.vocab_size,
        tuple(loaded.layers),
    )


def _check(loaded: LoadedModel, before: Tensor, after: Tensor) -> None:
    difference = float((after - before).norm() / before.norm().clamp_min(1e-6))
    if torch.isfinite(before).all() and not difference < _TOLERANCE.get(loaded.dtype, 0.15):
        raise CbgenError(
            f"joining the layers of {type(loaded.model).__name__} changed its answers by {difference:.1%}; run with "
            "--disable fusion,packing, and please report this model"
        )
