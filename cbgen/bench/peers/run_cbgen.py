"""This engine, by itself: token ids in, token ids out, through `Engine.add` and `Engine.step`.

Knobs: fields of `EngineConfig` (`batching`, `order`, `disabled`, `max_num_seqs`, ...), and `device`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from protocol import Answers, Generate, Task, serve

from cbgen import pipeline
from cbgen.config import EngineConfig, ModelConfig, OutputConfig, ReportConfig, RunConfig
from cbgen.engine.model_files import ModelFiles
from cbgen.job import Serving


def load_serving(task: Task) -> tuple[RunConfig, Serving]:
    """The model and the engine as `cbgen run` loads them; the configuration lacks only its files."""
    knobs = {name: value for name, value in task.knobs.items() if name != "device"}
    knobs["disabled"] = frozenset(knobs.get("disabled", ()))
    config = RunConfig(
        inputs=("-",),
        output=OutputConfig(path="-"),
        model=ModelConfig(name=task.model, dtype=task.dtype, device=task.knobs.get("device", "auto")),
        engine=EngineConfig(**{"max_model_len": task.max_model_len, **knobs}),
        sampling={"ignore_eos": True, "temperature": 0.0},
        report=ReportConfig(progress="none", github=False),
    )
    files = ModelFiles(task.model, Path(task.model))
    return config, pipeline._load(config, files, _tell)


def _tell(note: str) -> None:
    sys.stderr.write(f"{note}\n")


def load(task: Task) -> tuple[Generate, Callable[[], dict[str, Any]]]:
    """Counters begin anew with each call of what is returned."""
    import numpy as np

    from cbgen.params import SamplingParams
    from cbgen.records import EngineStats

    engine = load_serving(task)[1].engine
    costs: list[tuple[float, int, int]] = []  # of each step: seconds, tokens sampled, other tokens computed

    def generate(work: Task) -> Answers:
        engine.stats = EngineStats()
        costs.clear()
        answers: Answers = [[] for _ in work.prompts]
        rows = iter(enumerate(zip(work.prompts, work.lengths, strict=True)))
        waiting = next(rows, None)
        while waiting is not None or engine.has_unfinished:
            while waiting is not None and engine.wants_more:
                row, (ids, length) = waiting
                params = SamplingParams(max_tokens=length, ignore_eos=True)
                refused = engine.add(row, np.array(ids, dtype=np.int32), params)
                if refused is not None:
                    raise RuntimeError(f"row {row} was refused: {refused.finish_reason}")
                waiting = next(rows, None)
            engine.more_is_coming = waiting is not None
            stats, started = engine.stats, time.perf_counter()
            before = stats.num_sampled_tokens, stats.num_scheduled_tokens
            for generation in engine.step():
                answers[generation.index] = generation.token_ids
            num_sampled = stats.num_sampled_tokens - before[0]
            num_others = stats.num_scheduled_tokens - before[1] - num_sampled
            costs.append((time.perf_counter() - started, num_sampled, num_others))
        return answers

    def facts() -> dict[str, Any]:
        return {"stats": asdict(engine.stats), "engine": engine.describe(), "step_cost": step_cost(costs)}

    return generate, facts


def step_cost(costs: list[tuple[float, int, int]]) -> dict[str, float]:
    """What a step takes, as `cbgen simulate` wants to know it: the line of least squares through all steps.

    Args:
        costs: of each step: seconds, tokens sampled, other tokens computed.
    """
    import numpy as np

    seconds, num_sampled, num_others = np.array(costs, dtype=np.float64).reshape(-1, 3).T
    columns = np.stack([np.ones_like(seconds), num_sampled, num_others], axis=1)
    solution = np.linalg.lstsq(columns, 1000 * seconds, rcond=None)[0]
    step_ms, row_ms, token_ms = (max(0.0, float(value)) for value in solution)
    return {"step_ms": step_ms, "row_ms": row_ms, "prefill_ms_per_token": token_ms}


if __name__ == "__main__":
    serve(("cbgen", "torch", "transformers"), load)
