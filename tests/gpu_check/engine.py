"""Stage `engine`: token ids of tiny random models in every mode of the engine.

In float32 they are those of `transformers.generate`, one row at a time on CPU, where two logits are not too close to
call; batched or alone makes no difference. In bfloat16, whose rounding depends on the batch, the share of equal rows is
told, not judged.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cbgen.engine.loader import LoadedModel, load_model
from cbgen.engine.model_files import ModelFiles
from cbgen.engine.preparation import prepare
from cbgen.params import SamplingParams
from tests.engine.parity import Reference, reference
from tests.gpu_check.context import Context
from tests.gpu_check.models import build_tiny, describe_operators, say
from tests.gpu_check.modes import EAGER, GRAPHS_1, GRAPHS_4, GRAPHS_8, ROUNDS, UNMIXED, Mode, generate, open_engine
from tests.models import ARCHITECTURES, VOCAB_SIZE

_PLAIN_MODELS = ("llama-ratio-1", "llama-ratio-3", "qwen2-ratio-7", "qwen3-ratio-4")  # graphs must hold these
MODES = (GRAPHS_4, EAGER, ROUNDS, GRAPHS_1, GRAPHS_8, UNMIXED)
_REHEARSED = ("qwen3-ratio-4", "gemma2-softcap-window-8")
_STOPS = tuple(range(5, VOCAB_SIZE, 9))
_SAMPLED = {
    "drawn": SamplingParams(temperature=0.8, top_p=0.9, top_k=40),
    "drawn, penalized": SamplingParams(temperature=0.8, min_p=0.02, repetition_penalty=1.2, min_tokens=3),
}
_LEAST_EQUAL_DRAWS = 0.75  # share of rows; a draw may fall between two sums that were rounded differently


def run(context: Context) -> None:
    names = _REHEARSED if context.dry else tuple(ARCHITECTURES)
    context.facts(architectures=len(names), modes=[mode.name for mode in MODES])
    for name in context.mine(names):
        if context.seconds_left < 0:
            context.case(architecture=name, dtype="float32", mode="all", ok=False, error="no time")
            continue
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
            try:
                build_tiny(name, Path(directory))
            except (AttributeError, ImportError) as error:  # an architecture that this transformers does not have
                context.case(architecture=name, dtype="float32", mode="all", skipped=str(error)[:200])
                continue
            try:
                _check(context, name, Path(directory))
            except Exception as error:
                text = f"{type(error).__name__}: {error}"[:400]
                context.case(architecture=name, dtype="float32", mode="all", ok=False, error=text)


def _check(context: Context, name: str, directory: Path) -> None:
    """One architecture in all modes and both dtypes."""
    num_rows, num_tokens = (5, 6) if context.dry else (9, 20)
    rng = np.random.default_rng(len(name))
    prompts = [rng.integers(3, VOCAB_SIZE, rng.integers(1, 60)).tolist() for _ in range(num_rows)]
    expected = reference(directory, prompts, num_tokens)
    loaded = _load(directory, "float32", context.device)
    company, alone = _limits()
    for mode in MODES:
        _check_greedy(context, name, loaded, mode, company, prompts, expected)
    for mode in (EAGER, GRAPHS_4):
        _check_greedy(context, name, loaded, mode, alone, prompts, expected)
    for mode in (ROUNDS, GRAPHS_8):
        _check_greedy(context, name, loaded, mode, company, prompts, expected, _STOPS)
    _check_draws(context, name, loaded, prompts, num_tokens)
    _compare_bfloat16(context, name, _load(directory, "bfloat16", context.device), prompts, num_tokens)


def _limits() -> tuple[dict[str, Any], dict[str, Any]]:
    """Of an engine: rows in company, with prompts cut into chunks; and each row alone."""
    company = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "kv_cache_memory": 4 << 20, "max_model_len": 100}
    return company, {**company, "max_num_seqs": 1}


def _load(directory: Path, dtype: str, device: torch.device) -> LoadedModel:
    files = ModelFiles(directory.name, directory)
    loaded = load_model(files, dtype=dtype, device=device, eos_token_id=None)
    return prepare(loaded, frozenset(), say)


def _check_greedy(
    context: Context,
    name: str,
    loaded: LoadedModel,
    mode: Mode,
    limits: dict[str, Any],
    prompts: list[list[int]],
    expected: list[Reference],
    stops: tuple[int, ...] = (),
) -> None:
    """Against transformers; with stop ids, rows end amid a round."""
    watched = open_engine(loaded, mode, **limits)
    watched.forbid_sync(forbids=True)
    params, lengths = SamplingParams(stop_token_ids=stops), [len(row.token_ids) for row in expected]
    wrong, num_ties = compare(generate(watched.engine, prompts, lengths, params=params).token_ids, expected, stops)
    told = {**watched.describe(), **describe_operators(loaded)}
    is_clean = not (told["graphs_off"] or told["launch_errors"] or told["replaced"])
    is_clean = is_clean and (told["operators"] == "triton" or not context.is_cuda)
    context.case(
        architecture=name,
        dtype="float32",
        mode=f"{mode.name}{', stops' if stops else ''}",
        slots=limits["max_num_seqs"],
        rows=len(prompts),
        wrong_rows=wrong,
        ties=num_ties,
        **told,
        ok=not wrong and (is_clean or name not in _PLAIN_MODELS),
    )


def compare(got: list[list[int]], expected: list[Reference], stops: tuple[int, ...]) -> tuple[list[int], int]:
    """(Rows that differ without excuse, how many are excused by a tie.) An answer ends with its first stop id."""
    wrong, num_ties = [], 0
    for row, (ids, reference_row) in enumerate(zip(got, expected, strict=True)):
        whole = reference_row.token_ids
        end = next((place for place, token in enumerate(whole) if token in stops), len(whole) - 1)
        wanted = whole[: end + 1]
        if ids == wanted:
            continue
        first = next((place for place, (a, b) in enumerate(zip(ids, wanted, strict=False)) if a != b), None)
        if first is not None and reference_row.ties[first]:
            num_ties += 1
        else:
            wrong.append(row)
    return wrong, num_ties


def _check_draws(context: Context, name: str, loaded: LoadedModel, prompts: list[list[int]], num_tokens: int) -> None:
    """A row draws the same alone, in company, and in every mode, since its random numbers are its own."""
    lengths = [num_tokens] * len(prompts)
    company, alone = _limits()
    for way, params in _SAMPLED.items():
        expected = _answers(loaded, EAGER, alone, prompts, lengths, params)
        for mode in (EAGER, GRAPHS_4):
            share = equal_share(_answers(loaded, mode, company, prompts, lengths, params), expected)
            context.case(
                architecture=name,
                dtype="float32",
                mode=f"{mode.name}, {way}",
                slots=company["max_num_seqs"],
                rows=len(prompts),
                equal_share=share,
                ok=share >= _LEAST_EQUAL_DRAWS,
            )


def _compare_bfloat16(
    context: Context, name: str, loaded: LoadedModel, prompts: list[list[int]], num_tokens: int
) -> None:
    lengths = [num_tokens] * len(prompts)
    company, alone = _limits()
    expected = _answers(loaded, EAGER, alone, prompts, lengths)
    for mode in (EAGER, GRAPHS_4):
        got = _answers(loaded, mode, company, prompts, lengths)
        context.case(
            architecture=name,
            dtype="bfloat16",
            mode=mode.name,
            slots=company["max_num_seqs"],
            rows=len(prompts),
            equal_share=equal_share(got, expected),
            first_difference=_first_difference(got, expected),
            ok=all(len(ids) == num_tokens for ids in got),
        )


def _answers(
    loaded: LoadedModel,
    mode: Mode,
    limits: dict[str, Any],
    prompts: list[list[int]],
    lengths: list[int],
    params: SamplingParams | None = None,
) -> list[list[int]]:
    return generate(open_engine(loaded, mode, **limits).engine, prompts, lengths, params=params).token_ids


def equal_share(got: list[list[int]], expected: list[list[int]]) -> float:
    """Of the rows, how many are the same to the last token."""
    return sum(ours == theirs for ours, theirs in zip(got, expected, strict=True)) / max(len(expected), 1)


def _first_difference(got: list[list[int]], expected: list[list[int]]) -> int | None:
    """The earliest token that differs in any row; None where none does."""
    places = [
        next((place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        for ours, theirs in zip(got, expected, strict=True)
    ]
    return min((place for place in places if place is not None), default=None)
