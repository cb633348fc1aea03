"""What is compiled for GPUs that are not there: calls of our operators that together need every kernel in every form.

Enters: nothing. Leaves: calls by label. They are those that a run makes at its start, `trials.py`, for models of the
shapes below; dtypes, head sizes and options are paired in these rather than crossed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from cbgen.engine.attention.base import AttentionCall, AttentionMetadata
from cbgen.engine.kv_cache import LayerSpec
from cbgen.engine.operators.base import HeadLayout, Penalties, SampleTensors
from cbgen.engine.operators.trials import ModelShape, Trial, make_trials
from cbgen.engine.operators.triton import TritonOperators
from cbgen.engine.slot_state import SlotState
from cbgen.engine.triton import slots
from tests.engine.triton.machines import Machine

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Call = Callable[[Machine], object]


def heads(num_heads, num_kv_heads, key_dim, value_dim=None, **options):
    """A kind of attention layer."""
    options.setdefault("window", None)
    return LayerSpec(0, num_kv_heads, key_dim, value_dim or key_dim, num_heads=num_heads, **options)


# dtype, hidden size, intermediate size, vocabulary, kinds of layers: all operators of these models are compiled
MODELS = {
    "Llama-3.1-8B": (BF16, 4096, 14_336, 128_256, [heads(32, 8, 128)]),
    "SmolLM2-135M": (FP32, 576, 1536, 49_152, [heads(9, 3, 64)]),
}
MORE_MODELS = {
    "Qwen3-0.6B": (BF16, 1024, 3072, 151_936, [heads(16, 8, 128)]),
    "Qwen2.5-7B": (FP16, 3584, 18_944, 152_064, [heads(28, 4, 128)]),
    "gpt-oss-20b": (BF16, 2880, 2880, 201_088, [heads(64, 8, 64, has_sinks=True, window=w) for w in (None, 128)]),
}
# dtype and kind of layer: attention alone. With the models above, each entry of each table and each option.
ATTENTION = {
    "bfloat16 64": (BF16, heads(64, 8, 64, has_sinks=True, window=128)),
    "bfloat16 256": (BF16, heads(16, 8, 256, softcap=50.0)),
    "float16 128": (FP16, heads(28, 4, 128, window=4096)),
    "float32 128": (FP32, heads(32, 8, 128, softcap=30.0)),
    "float32 256": (FP32, heads(4, 1, 256, has_sinks=True, window=512)),
}
MORE_ATTENTION = {
    "tiny": (FP32, heads(4, 2, 16)),
    "Gemma 2, sliding": (BF16, heads(16, 8, 256, softcap=50.0, window=4096)),
    "multi-head": (BF16, heads(32, 32, 80)),
    "odd window": (BF16, heads(32, 32, 96, window=2047)),
    "latent": (BF16, heads(16, 16, 192, 128)),
    "multi-query": (FP16, heads(71, 1, 64)),
    "float16, all options": (FP16, heads(8, 4, 256, has_sinks=True, softcap=50.0, window=128)),
}


def trial_calls(machine: Machine, *, everything: bool) -> dict[str, Call]:
    """Label -> a function that makes the call on a machine's operators.

    Without `everything` each kernel is called in each dtype, but those of sampling in one; and on a machine that shares
    its other kernels with its like, those that have a table.
    """
    calls: dict[str, Call] = {}
    for name, (dtype, *sizes, layers) in (MODELS | (MORE_MODELS if everything else {})).items():
        shape = ModelShape(dtype, torch.device("cpu"), *sizes, tuple(layers))
        trials = list(make_trials(shape))
        if not everything:
            left_out = {"draw"} if dtype == BF16 else {"argmax", "draw", "sample"}
            trials = [trial for trial in trials if trial.operator not in left_out]
        calls |= _calls(name, trials)
    for name, (dtype, layer) in (ATTENTION | (MORE_ATTENTION if everything else {})).items():
        shape = ModelShape(dtype, torch.device("cpu"), 64, 64, 64, (layer,))
        calls |= _calls(name, list(make_trials(shape)), only="attention")
    calls["slots"] = lambda machine: _slots(num_slots=256, num_rows=64, num_columns=40)
    if machine.shares_kernels and not everything:
        calls = {label: call for label, call in calls.items() if ": attention" in label}
    return calls


def _calls(name: str, trials: list[Trial], only: str = "") -> dict[str, Call]:
    return {
        f"{name}: {trial.operator} {index}": partial(_run, trial)
        for index, trial in enumerate(trials)
        if trial.operator == only or not only
    }


def _run(trial: Trial, machine: Machine) -> None:
    trial.run(_operators(machine))


def _operators(machine: Machine) -> TritonOperators:
    return TritonOperators(machine.capability, machine.num_multiprocessors)


def _slots(num_slots: int, num_rows: int, num_columns: int) -> None:
    """What a decode step does with the state of its slots."""
    state = SlotState.empty(num_slots, max(num_columns, 100), 0, 1000, torch.device("cpu"))
    rows = torch.zeros(num_rows, dtype=torch.int64)
    slots.gather_step(state, rows, num_columns, 16)
    slots.gather_sampling(state, rows)
    slots.advance(state, rows, rows, torch.zeros(8, num_slots, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


# -- one model's steps: what is compiled again when only the batch changes ---------------------------------------------

_HEADS, _KV_HEADS, _DIM, _HIDDEN, _INTERMEDIATE, _VOCABULARY = 32, 8, 128, 4096, 14_336, 128_256
_DECODES = (1, 2, 3, 8, 16, 17, 24, 64, 100, 256, 257, 512)
_LONGEST = (1, 16, 100, 1024, 5000, 131_072)


def step_calls() -> dict[str, Call]:
    """Steps of many sizes of the same model: numbers of rows, of prompts, of tokens, and lengths."""
    calls: dict[str, Call] = {}
    for num_decodes, chunks, longest in _step_sizes():
        label = f"{num_decodes} decodes, {len(chunks)} prompts of {sum(chunks)}, {longest} positions"
        calls[label] = partial(_step, num_decodes, chunks, longest)
    return calls


def _step_sizes() -> Iterator[tuple[int, list[int], int]]:
    for num_decodes in _DECODES:
        for longest in _LONGEST:
            yield num_decodes, [], longest
    for num_decodes in (0, 1, 16, 17):
        for chunks in ([1], [15], [16], [512], [7, 9], [1] * 16, [100] * 5):
            yield num_decodes, chunks, 1000


def _step(num_decodes: int, chunks: list[int], longest: int, machine: Machine) -> None:
    """The operators of one layer and the sampler, as a step has them; values do not matter here."""
    operators = _operators(machine)
    counts = [1] * num_decodes + chunks
    num_tokens, num_seqs = sum(counts), len(counts)
    x = torch.zeros(num_tokens, _HIDDEN, dtype=BF16)
    operators.rms_norm(x, torch.ones(_HIDDEN), 1e-5)
    operators.rms_norm(x, torch.ones(_HIDDEN), 1e-5, x)
    operators.activation_mul(x.new_zeros(num_tokens, 2 * _INTERMEDIATE), "silu")
    keys, values = x.new_zeros(2, 4, _KV_HEADS, 16, _DIM)
    slot_mapping = torch.zeros(num_tokens, dtype=torch.int64)
    metadata = AttentionMetadata(
        slot_mapping=slot_mapping,
        block_tables=torch.zeros(num_seqs, -(-longest // 16), dtype=torch.int32),
        context_lens=torch.ones(num_seqs, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        num_decodes=num_decodes,
        max_context_len=longest,
        query_starts=[],
        host_context_lens=[],
    )
    cos = x.new_zeros(num_tokens, _DIM)
    qkv = x.new_zeros(num_tokens, (_HEADS + 2 * _KV_HEADS) * _DIM)
    query = operators.rope_and_store(qkv, HeadLayout(_HEADS, _KV_HEADS, _DIM), cos, cos, keys, values, slot_mapping)
    operators.attention(AttentionCall(0, _DIM**-0.5), query, keys, values, metadata)
    number = torch.zeros(num_seqs, dtype=torch.int64)
    fraction = torch.zeros(num_seqs)
    params = SampleTensors(fraction, number.int(), fraction, fraction, number, number)
    stops = torch.full((num_seqs, 16), -1)
    penalties = Penalties(fraction, torch.zeros(num_seqs, -(-_VOCABULARY // 32), dtype=torch.int32), number)
    forbids = torch.zeros(num_seqs, dtype=torch.bool)
    operators.sample(x.new_zeros(num_seqs, _VOCABULARY), params, stops, forbids, penalties)
    _slots(1024, num_seqs, metadata.block_tables.shape[1])
