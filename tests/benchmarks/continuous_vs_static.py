"""One ragged workload on the demo model, static and continuous in turn: `make bench-batching`.

Output lengths are forced (lognormal), so both do identical work; both must give the same tokens. Each run is a process
of its own; runs alternate, and the ratio is taken pair by pair. Beside it stands what `cbgen simulate` predicts.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from cbgen.bench.simulate import Workload, simulate

TOPICS = ("rain", "bread", "bridges", "sparrows", "maps", "glass", "tides", "clocks", "salt", "moss", "trains")


def make_lengths(num_rows: int) -> list[int]:
    rng = random.Random(7)
    return [min(256, max(4, round(rng.lognormvariate(3.6, 1.0)))) for _ in range(num_rows)]


def write_prompts(path: Path, lengths: list[int]) -> None:
    with path.open("w") as file:
        for index, length in enumerate(lengths):
            chat = [
                {"role": "user", "content": f"Tell me something about {TOPICS[index % len(TOPICS)]}, number {index}."}
            ]
            file.write(json.dumps({"id": index, "messages": chat, "sampling_params": {"max_tokens": length}}) + "\n")


def run(directory: Path, batching: str, slots: int, dtype: str) -> dict:
    output = directory / f"{batching}.jsonl"
    command = [
        "run",
        directory / "in.jsonl",
        "-o",
        output,
        "--batching",
        batching,
        "--max-num-seqs",
        slots,
        "--overwrite",
    ]
    command += ["--dtype", dtype, "--ignore-eos", "--token-ids", "--max-model-len", 512]
    subprocess.run([sys.executable, "-m", "cbgen", *map(str, command)], check=True, stderr=subprocess.DEVNULL)
    return json.loads(Path(f"{output}.cbgen/summary.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    lengths = make_lengths(options.rows)
    workload = Workload(
        lengths=lengths,
        prompt_lengths=[1] * len(lengths),
        arrivals_ms=[0.0] * len(lengths),
        slots=options.slots,
        step_ms=1.0,
    )
    predicted = simulate(workload, "static").num_steps / simulate(workload, "continuous").num_steps
    sys.stdout.write(
        f"{options.rows} rows, {sum(lengths):,} tokens (longest {max(lengths)}), {options.slots} slots, "
        f"{options.dtype}; in steps the simulator predicts {predicted:.2f}x\n"
    )
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_prompts(directory / "in.jsonl", lengths)
        for pair in range(options.pairs):
            speeds = {}
            for batching in ("static", "continuous"):
                summary = run(directory, batching, options.slots, options.dtype)
                speeds[batching] = summary["output_tokens_per_second"]
                sys.stdout.write(
                    f"pair {pair + 1} {batching:<11} {speeds[batching]:7.1f} tok/s  {summary['steps']:5} steps  "
                    f"occupancy {summary['occupancy']:.3f}, {summary['occupancy_while_queued']:.3f} while rows wait\n"
                )
            same = (directory / "static.jsonl").read_bytes() == (directory / "continuous.jsonl").read_bytes()
            ratios.append(speeds["continuous"] / speeds["static"])
            sys.stdout.write(f"pair {pair + 1} ratio {ratios[-1]:.2f}x, outputs {'identical' if same else 'DIFFER'}\n")
    ratios.sort()
    sys.stdout.write(f"median {statistics.median(ratios):.2f}x, from {ratios[0]:.2f}x to {ratios[-1]:.2f}x\n")


if __name__ == "__main__":
    main()
