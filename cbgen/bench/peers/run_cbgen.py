"""This engine, by itself: token ids in, token ids out, through `Engine.add` and `Engine.step`.

Knobs: fields of `EngineConfig` (`batching`, `order`, `disabled`, `max_num_seqs`, ...), and `device`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from protocol import Answers, Generate, Task, serve

from cbgen.config import EngineConfig


def engine_config(task: Task) -> EngineConfig:
    """The engine's settings as the knobs have them."""
    knobs = {name: value for name, value in task.knobs.items() if name != "device"}
    knobs["disabled"] = frozenset(knobs.get("disabled", ()))
    return EngineConfig(**{"max_model_len": task.max_model_len, **knobs})


def prepare_threads(task: Task) -> None:
    """All cores, as `cbgen run` has them."""
    import torch

    torch.set_num_threads(task.threads)


def load(task: Task) -> tuple[Generate, Callable[[], dict[str, Any]]]:
    """Load the model and make an engine; counters begin anew with each call of what is returned."""
    import numpy as np

    from cbgen.engine.engine import Engine
    from cbgen.engine.loader import choose_device, load_model
    from cbgen.engine.model_files import ModelFiles
    from cbgen.params import SamplingParams
    from cbgen.records import EngineStats

    prepare_threads(task)
    files = ModelFiles(task.model, Path(task.model))
    device = choose_device(task.knobs.get("device", "auto"))
    engine = Engine(load_model(files, dtype=task.dtype, device=device, eos_token_id=None), engine_config(task))

    def generate(work: Task) -> Answers:
        engine.stats = EngineStats()
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
            for generation in engine.step():
                answers[generation.index] = generation.token_ids
        return answers

    return generate, lambda: {"stats": asdict(engine.stats), "engine": engine.describe()}


if __name__ == "__main__":
    serve(("cbgen", "torch", "transformers"), load)
