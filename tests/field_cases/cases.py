"""The cases as data: `load_cases()` reads every `cases_*.jsonl` here. What a case may hold, README.md says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_FLAGS = {
    "max_tokens": "--max-tokens",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "seed": "--seed",
    "stop": "--stop",
    "include_stop": "--include-stop",
    "min_tokens": "--min-tokens",
    "ignore_eos": "--ignore-eos",
    "dtype": "--dtype",
    "n": "--n",
    "batch": "--max-num-seqs",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        directory: holds its files; commands run there.
        input: what `cbgen run` gets, relative to the directory.
        params: sampling parameters of the run.
        exits: classes of exit code that are right: ok, row_errors, refuse, fatal.
        records: for each output record the forms that are right; None where only `num_records` counts.
        steps: lines of bash instead of one plain run; they see $CBGEN, $MODELS, $GGUF, $CASE and $TMP.
    """

    id: str
    title: str
    directory: Path
    input: str
    model: str
    params: dict[str, Any]
    exits: tuple[str, ...]
    records: list[list[dict[str, Any]]] | None
    num_records: int | None
    steps: tuple[str, ...]

    @property
    def must_refuse(self) -> bool:
        return self.exits == ("refuse",)

    def arguments(self, output: Path, models: Path, source: str | None = None, **changes: Any) -> list[str]:
        """The command line of a plain run, after `cbgen`."""
        command = ["run", source or self.input, "-o", str(output), "--model", str(models / self.model)]
        for name, value in {**self.params, **changes}.items():
            for item in value if isinstance(value, list) else [value]:
                if item is True:
                    command.append(_FLAGS[name])
                elif item is not None and item is not False:
                    command += [_FLAGS[name], str(item)]
        return command


def load_cases() -> list[Case]:
    """All cases, in the order of their files."""
    paths = sorted(HERE.glob("cases_*.jsonl"))
    return [_parse(json.loads(line)) for path in paths for line in path.read_text("utf-8").split("\n") if line]


def _parse(fields: dict[str, Any]) -> Case:
    first = fields["files"][0]
    return Case(
        id=fields["id"],
        title=fields["title"],
        directory=HERE / fields["set"] / fields["id"],
        input="in" if first.startswith("in/") else first,
        model=fields["model"],
        params=fields["params"],
        exits=tuple(fields["exit"]),
        records=fields["recs"],
        num_records=fields["n"],
        steps=tuple(fields["steps"] or ()),
    )
