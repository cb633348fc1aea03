"""Greedy token ids of `transformers.generate`, one row at a time in float32, and of our engine on the same rows."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from cbgen.config import EngineConfig
from cbgen.engine.engine import Engine
from cbgen.engine.loader import LoadedModel, load_model
from cbgen.engine.model_files import ModelFiles
from cbgen.params import SamplingParams

TIE = 1e-3  # reference logits closer than this may fall either way


@dataclass
class Reference:
    """One row's expected ids, and at which steps the two best logits were too close to call."""

    token_ids: list[int]
    ties: list[bool]


@dataclass
class Comparison:
    """What a comparison found: rows that differ without excuse, and how many were excused by a tie."""

    wrong: list[int] = field(default_factory=list)
    num_ties: int = 0


def load(directory: Path, dtype: str = "float32") -> LoadedModel:
    files = ModelFiles(directory.name, directory)
    return load_model(files, dtype=dtype, device=torch.device("cpu"), eos_token_id=None)


def reference(directory: Path, prompts: list[list[int]], num_tokens: int) -> list[Reference]:
    """`generate` on each row alone, with eager attention and no end-of-sequence."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, output_scores=True, return_dict_in_generate=True, pad_token_id=0
    )
    results = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids))
        best = [score[0].topk(2).values.tolist() for score in output.scores]
        token_ids = output.sequences[0, len(prompt) :].tolist()
        results.append(Reference(token_ids, [first - second < TIE for first, second in best]))
    return results


def generate(loaded: LoadedModel, prompts: list[list[int]], num_tokens: int, **engine: Any) -> list[list[int]]:
    """The engine's answers to the same rows, by row; checks its books after every step."""
    serving = Engine(loaded, EngineConfig(**engine))
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        serving.add(index, np.array(prompt, dtype=np.int32), params)
    answers: dict[int, list[int]] = {}
    while serving.has_unfinished:
        for generation in serving.step():
            answers[generation.index] = generation.token_ids
        serving.check_integrity()
    generate.cached_tokens = serving.stats.num_cached_tokens  # type: ignore[attr-defined]
    generate.preemptions = serving.stats.num_preemptions  # type: ignore[attr-defined]
    generate.cached = serving.stats.num_cached_tokens  # type: ignore[attr-defined]
    return [answers[index] for index in range(len(prompts))]


def compare(expected: list[Reference], answers: list[list[int]]) -> Comparison:
    """Equal, or different from a tied step on."""
    result = Comparison()
    for index, (row, answer) in enumerate(zip(expected, answers, strict=True)):
        if row.token_ids == answer:
            continue
        first = next(i for i, (a, b) in enumerate(zip(row.token_ids, answer, strict=True)) if a != b)
        if row.ties[first]:
            result.num_ties += 1
        else:
            result.wrong.append(index)
    return result
