"""Host time of one step at 256 running sequences: schedule, build input, draw, update: `make bench-host`.

No model runs; every sequence is in decode with a context of 200 to 2,000 tokens, and one in 200 ends per step and is
replaced, as in a real run. The prefix cache, the look-ahead window and predictions are at work; half of the rows are
sampled, the others greedy, unless `--greedy` is given. With `--rounds K` steps are launched as for a device that keeps
the state of its slots, K at a time where no prompt is read: schedule, launch (all but the device's own work), resolve.
"""

import argparse
import itertools
import random
import statistics
import sys
import time

import numpy as np
import torch

from cbgen.engine.block_manager import BlockManager
from cbgen.engine.model_input import build_model_input
from cbgen.engine.rounds import RoundRunner
from cbgen.engine.sampling_input import uniforms
from cbgen.engine.scheduler import Scheduler, SchedulerConfig
from cbgen.engine.sequence import Sequence
from cbgen.engine.waiting import ROWS_PER_SLOT
from cbgen.params import SamplingParams


def make_sequence(index: int, rng: random.Random, temperature: float) -> Sequence:
    num_prompt, num_output = rng.randint(100, 1800), rng.randint(50, 350)
    return Sequence(
        index=index,
        prompt_token_ids=np.arange(index, index + num_prompt, dtype=np.int32),
        params=SamplingParams(max_tokens=num_output, temperature=temperature),
        max_total_tokens=num_prompt + num_output,
        stop_token_ids=frozenset({2, 3}),
        random_stream=(0, index + 1, 0),
    )


class NoDevice:
    """A model runner and its KV cache, as far as rounds look at them before the device begins."""

    def __init__(self, num_blocks: int) -> None:
        self.loaded = self.kv_cache = self
        self.device, self.trash_block, self.vocab_size = torch.device("cpu"), num_blocks, 50_000


class Rounds:
    """The phases of a round, with a device that answers 7 at once."""

    def __init__(self, scheduler: Scheduler, blocks: BlockManager, budget: int, num_steps: int) -> None:
        self.scheduler, self.num_steps = scheduler, num_steps
        self.runner = RoundRunner(NoDevice(blocks.num_blocks), blocks, budget, num_steps)
        self.runner._run = lambda shape: None
        self.runner._ring.fill_(7)

    def phases(self) -> tuple[int, list[float]]:
        """Decode steps done, and the marks between the phases."""
        marks = [time.perf_counter()]
        output = self.scheduler.schedule(self.num_steps)
        marks.append(time.perf_counter())
        num_steps = self.num_steps if output.num_decodes == len(output.sequences) else 1
        flight = self.runner.launch(output, num_steps)
        launched = self.scheduler.launched(output, num_steps)
        marks.append(time.perf_counter())
        token_ids = self.runner.collect(flight)
        marks.append(time.perf_counter())
        self.scheduler.resolve(launched, token_ids)
        marks.append(time.perf_counter())
        return num_steps, marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=0, metavar="K")
    parser.add_argument("--greedy", action="store_true")
    options = parser.parse_args()
    rng = random.Random(0)
    config = SchedulerConfig(max_num_seqs=options.seqs, max_num_batched_tokens=4096, max_model_len=4096, order="auto")
    blocks = BlockManager(options.seqs * 256, 16, options.seqs, 4096, prefix_cache=True)
    scheduler = Scheduler(config, blocks)
    names = (
        ("schedule", "launch", "collect", "resolve")
        if options.rounds
        else ("schedule", "build input", "draw", "update")
    )
    times: dict[str, list[float]] = {name: [] for name in (*names, "together")}
    rounds = Rounds(scheduler, blocks, 4096, options.rounds) if options.rounds else None
    index = num_decodes = 0
    for step in range(options.steps):
        while scheduler.num_waiting < ROWS_PER_SLOT * options.seqs:
            scheduler.add(make_sequence(index, rng, 0.0 if options.greedy or index % 2 else 1.0))
            index += 1
        if rounds is not None:
            num_steps, marks = rounds.phases()
            if step > options.steps // 3:
                num_decodes += num_steps * scheduler.num_running
                phases = [*(b - a for a, b in itertools.pairwise(marks)), marks[-1] - marks[0]]
                for values, seconds in zip(times.values(), phases, strict=True):
                    values.append(seconds * 1000)
            continue
        started = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        model_input = build_model_input(output, blocks)
        built = time.perf_counter()
        uniforms(model_input.sampling_input.random_words)
        drawn = time.perf_counter()
        scheduler.update(output, np.full(len(model_input.sampling), 7))
        updated = time.perf_counter()
        if step > options.steps // 3:  # the first steps fill the slots
            num_decodes += output.num_decodes
            phases = (scheduled - started, built - scheduled, drawn - built, updated - drawn, updated - started)
            for values, seconds in zip(times.values(), phases, strict=True):
                values.append(seconds * 1000)
    sys.stdout.write(f"{num_decodes / max(len(times['together']), 1):.1f} decodes a step on average\n")
    for name, values in times.items():
        values.sort()
        low, high = values[len(values) // 10], values[len(values) * 9 // 10]
        spread = f"10-90% {low:.3f} - {high:.3f}"
        sys.stdout.write(f"{name:<12} median {statistics.median(values):.3f} ms   {spread}   {len(values)} steps\n")


if __name__ == "__main__":
    main()
