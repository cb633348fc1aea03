"""Runs one batch with plenty of address space and again with little; prints what came of it. For a process of its own:
`python -m tests.engine.short_of_memory MODEL_DIRECTORY`.
"""

import json
import resource
import sys
from pathlib import Path

import numpy as np
import torch

from cbgen.config import EngineConfig
from cbgen.engine.engine import Engine
from cbgen.params import SamplingParams
from tests.engine.parity import load

HEADROOM = 150 << 20


def generate(engine: Engine) -> dict[int, list[int]]:
    for index in range(16):
        prompt = np.arange(3, 93, dtype=np.int32).repeat(2 + index)[:128]
        engine.add(index, prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    answers = {}
    while engine.has_unfinished:
        answers |= {generation.index: generation.token_ids for generation in engine.step()}
        engine.check_integrity()
    return answers


def main() -> None:
    torch.set_num_threads(1)
    loaded = load(Path(sys.argv[1]))
    config = EngineConfig(max_num_seqs=16, max_num_batched_tokens=2048, kv_cache_memory=50 << 20)
    plenty = Engine(loaded, config)
    expected = generate(plenty)
    little = Engine(loaded, config)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + HEADROOM, resource.RLIM_INFINITY))
    result = {
        "equal": generate(little) == expected,
        "rows": len(expected),
        "out_of_memory": [plenty.stats.num_out_of_memory, little.stats.num_out_of_memory],
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
