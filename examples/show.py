"""Print an output file as prompt and completion, row by row: `python examples/show.py out.jsonl`."""

import json
import sys

for line in open(sys.argv[1], encoding="utf-8"):  # noqa: SIM115
    row = json.loads(line)
    prompt = row.get("prompt") or row["messages"][-1]["content"]
    answer = row["completion"] if row["error"] is None else f"[{row['error']['code']}] {row['error']['message']}"
    sys.stdout.write(f"\n> {prompt.strip()}\n{answer.strip()}\n")
