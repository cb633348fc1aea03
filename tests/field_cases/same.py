"""`same.py A B`: exit code 0 when both outputs hold the same answers in the same order."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent.parent)

from tests.field_cases.records import read_answers  # noqa: E402


def load(path: str) -> list[tuple]:
    return [(a.custom_id, a.ok, a.text, a.texts, a.finish) for a in read_answers(Path(path))]


def main() -> None:
    one, other = load(sys.argv[1]), load(sys.argv[2])
    differs = [index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]]
    if differs or len(one) != len(other):
        sys.exit(f"{len(one)} and {len(other)} records, first difference at {differs[:1]}")


if __name__ == "__main__":
    main()
