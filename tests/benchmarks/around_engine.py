"""What reader, tokenizer and writer add to the engine's time: `make bench-around`.

The same rows, with forced output lengths, in three ways, each run a process of its own:

    full    the whole command
    bare    prompts made beforehand, token ids straight into `Engine.add` and `step`, nothing written
    around  the whole command, on an engine that answers at once: the processor time of everything but the model

`full` and `bare` take turns, and their ratio is taken pair by pair. `around` bounds what can be lost: host work that
is not hidden behind the engine costs its own time, hidden work less.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cbgen import pipeline
from cbgen.config import EngineConfig, ModelConfig, OutputConfig, ReportConfig, RunConfig
from cbgen.data.prompts import PromptBuilder
from cbgen.data.readers import check_inputs, read_rows
from cbgen.engine.model_files import find_model
from cbgen.job import Serving
from cbgen.params import SamplingParams, merge_params
from cbgen.records import Prompt
from tests.fakes import FakeEngine

TOPICS = ("rain", "bread", "bridges", "sparrows", "maps", "glass", "tides", "clocks", "salt", "moss")
WAYS = ("full", "bare", "around")


def write_prompts(path: Path, num_rows: int) -> None:
    rng = random.Random(11)
    with path.open("w") as file:
        for index in range(num_rows):
            words = " ".join(rng.choice(TOPICS) for _ in range(rng.randint(5, 60)))
            chat = [{"role": "user", "content": f"Row {index}. Write about {words}."}]
            length = min(384, max(16, round(rng.lognormvariate(4.4, 0.7))))
            file.write(json.dumps({"id": index, "messages": chat, "sampling_params": {"max_tokens": length}}) + "\n")


def make_config(source: Path, slots: int) -> RunConfig:
    return RunConfig(
        inputs=(str(source),),
        output=OutputConfig(path=str(source.with_name("out.jsonl")), overwrite=True),
        model=ModelConfig(name="demo"),
        sampling={"ignore_eos": True},
        engine=EngineConfig(max_num_seqs=slots, max_model_len=1024),
        report=ReportConfig(progress="none"),
    )


# -- one run, in a process of its own ---------------------------------------------------------------------------------


def run_full(config: RunConfig) -> tuple[float, int]:
    """Seconds from the first row to the last commit, and steps."""
    pipeline.run(config)
    summary = json.loads(Path(f"{config.output.path}.cbgen/summary.json").read_text())
    return summary["generate_seconds"], summary["steps"]


def run_bare(config: RunConfig) -> tuple[float, int]:
    """Seconds from the first `add` to the last `step`, and steps."""
    serving = pipeline._load(config, find_model("demo"), lambda _: None)
    engine = serving.engine
    params = merge_params(SamplingParams(), config.sampling)
    builder = PromptBuilder(serving.tokenizer, config.prompt, params, engine.limits.max_model_len, engine.vocab_size)
    items = builder.build(list(read_rows(check_inputs(config.inputs))))
    prompts = [item for item in items if isinstance(item, Prompt)]
    assert len(prompts) == len(items)
    started = time.monotonic()
    waiting = iter(prompts)
    prompt = next(waiting, None)
    while prompt is not None or engine.has_unfinished:
        while prompt is not None and engine.wants_more:
            engine.add(prompt.row.index, prompt.token_ids, prompt.params)
            prompt = next(waiting, None)
        engine.more_is_coming = prompt is not None
        engine.step()
    return time.monotonic() - started, engine.stats.num_steps


def run_around(config: RunConfig) -> tuple[float, int]:
    """Processor seconds of all threads, from the first row to the last commit; no steps worth counting."""
    from cbgen.engine.loader import load_tokenizer

    tokenizer = load_tokenizer(find_model("demo"))
    rng = random.Random(5)

    token_ids = [rng.randrange(3, 49_000) for _ in range(400)]

    def answer(*_: Any) -> tuple[list[int], str]:
        return token_ids, "length"  # cut by the row's own max_tokens

    slots = config.engine.max_num_seqs or 32
    engine = FakeEngine(answer, vocab_size=49_152, slots=slots, context=1024)
    started = 0.0

    def make_serving(*_: Any) -> Serving:
        nonlocal started
        started = time.process_time()
        return Serving(tokenizer, engine)  # type: ignore[arg-type]

    pipeline.run(config, make_serving)
    return time.process_time() - started, 0


# -- all runs ---------------------------------------------------------------------------------------------------------


def measure(way: str, source: Path, slots: int) -> tuple[float, int]:
    command = [sys.executable, "-m", "tests.benchmarks.around_engine", "--one", way, str(source), "--slots", str(slots)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"{' '.join(command)}\n{process.stderr}")
    seconds, steps = process.stdout.split()
    return float(seconds), int(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, source = options.one
        runs = dict(zip(WAYS, (run_full, run_bare, run_around), strict=True))
        seconds, steps = runs[way](make_config(Path(source), options.slots))
        sys.stdout.write(f"{seconds} {steps}\n")
        return
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "in.jsonl"
        write_prompts(source, options.rows)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.pairs):
            for way in WAYS:
                seconds[way].append(measure(way, source, options.slots))
    for way, values in seconds.items():
        sys.stdout.write(
            f"{way:<7} median {statistics.median(values):7.3f} s   {min(values):.3f} - {max(values):.3f}\n"
        )
    added = [full / bare - 1 for full, bare in zip(seconds["full"], seconds["bare"], strict=True)]
    sys.stdout.write(
        f"added to the engine: median {statistics.median(added):.1%}   {min(added):.1%} - {max(added):.1%}\n"
    )
    share = statistics.median(seconds["around"]) / statistics.median(seconds["bare"])
    sys.stdout.write(f"processor time around the engine: {share:.1%} of the engine's time\n")


if __name__ == "__main__":
    main()
