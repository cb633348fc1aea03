"""Peak memory of a long run beside a short one of the same shape: `make bench-memory`.

Both run the real command on the known-answer model, so the difference is what rows leave behind.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.chain import build_chain_model


def run(directory: Path, model: Path, num_rows: int) -> dict[str, float]:
    prompts, output = directory / f"in-{num_rows}.jsonl", directory / f"out-{num_rows}.jsonl"
    with prompts.open("w") as file:
        for index in range(num_rows):
            tokens = 1 + index * 7 % 13  # ragged, and now and then a row far longer than its neighbours
            tokens = 50 if index % 997 == 0 else tokens
            row = {"id": index, "prompt": f"row {index} 5", "sampling_params": {"max_tokens": tokens}}
            file.write(json.dumps(row) + "\n")
    command = [sys.executable, "-m", "cbgen", "run", prompts, "-o", output, "--model", model, "--max-num-seqs", "64"]
    subprocess.run([*map(str, command)], check=True, stderr=subprocess.DEVNULL)
    with output.open() as file:
        assert all(json.loads(line)["id"] == index for index, line in enumerate(file))
    summary = json.loads(Path(f"{output}.cbgen/summary.json").read_text())
    assert summary["rows_ok"] == num_rows
    return {"mb": summary["peak_memory_bytes"] / 1e6, "seconds": summary["generate_seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = build_chain_model(directory / "model")
        small, large = run(directory, model, 2_000), run(directory, model, options.rows)
    sys.stdout.write(
        f"2,000 rows: {small['mb']:.0f} MB; {options.rows:,} rows: {large['mb']:.0f} MB in {large['seconds']:.0f} s; "
        f"difference {large['mb'] - small['mb']:.0f} MB\n"
    )


if __name__ == "__main__":
    main()
