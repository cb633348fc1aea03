"""The whole of `cbgen run`: from a JSONL file of texts to a JSONL file of completions, on disk, with state and commits.

The model is loaded before the clock starts, as for every engine; the rest (planning, reading, tokenizing, generating,
writing, the summary) counts. Knobs: as of `run_cbgen`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from protocol import Answers, Generate, Missing, Task, serve
from run_cbgen import load_serving

from cbgen import pipeline
from cbgen.config import OutputConfig, RunConfig
from cbgen.job import Serving
from cbgen.records import EngineStats


def load(task: Task) -> tuple[Generate, Callable[[], dict[str, Any]]]:
    """Load as the pipeline itself does, once for all calls of what is returned."""
    if task.texts is None:
        raise Missing("the model has no tokenizer, which the whole command needs")
    config, serving = load_serving(task)

    def generate(work: Task) -> Answers:
        serving.engine.stats = EngineStats()
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            _write_rows(directory / "in.jsonl", work)
            return _run(config, serving, directory, len(work.lengths))

    def facts() -> dict[str, Any]:
        return {"stats": asdict(serving.engine.stats), "engine": serving.engine.describe()}

    return generate, facts


def _write_rows(path: Path, work: Task) -> None:
    prompts = work.prompts if work.texts is None else work.texts
    with path.open("w", encoding="utf-8") as file:
        for prompt, length in zip(prompts, work.lengths, strict=True):
            file.write(json.dumps({"prompt": prompt, "sampling_params": {"max_tokens": length}}) + "\n")


def _run(config: RunConfig, serving: Serving, directory: Path, num_rows: int) -> Answers:
    output = directory / "out.jsonl"
    files = replace(
        config,
        inputs=(str(directory / "in.jsonl"),),
        output=OutputConfig(path=str(output), token_ids=True),
    )
    pipeline.run(files, lambda *_: serving)
    with output.open(encoding="utf-8") as lines:
        answers = [list(json.loads(line)["token_ids"] or ()) for line in lines]
    if len(answers) != num_rows:
        raise RuntimeError(f"{len(answers)} rows came out of {num_rows}")
    return answers


if __name__ == "__main__":
    serve(("cbgen", "torch", "transformers"), load)
