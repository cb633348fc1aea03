"""Runs field cases: `python -m tests.field_cases [--id A- ...] [--command CMD] [--full]`; `make field-cases`.

Prints what failed and one line of totals; the exit code is 1 when anything failed.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.field_cases.cases import load_cases
from tests.field_cases.runner import CaseRunner, fork_server


def _from_anywhere(command: str) -> str:
    """The same command with its program found from here: cases run in their own directories."""
    program, *rest = command.split()
    return " ".join([str(Path(program).absolute()) if "/" in program else program, *rest])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--id", action="append", help="only cases whose id begins so; repeatable")
    parser.add_argument("--command", help="run this command, instead of forks of a warm process")
    parser.add_argument("--full", action="store_true", help="M-13 with 200,000 rows")
    options = parser.parse_args()
    command = options.command and _from_anywhere(options.command)
    cases = load_cases()
    chosen = [case for case in cases if case.id.startswith(tuple(options.id or [""]))]
    failed = 0
    with tempfile.TemporaryDirectory() as name, fork_server(Path(name)) as server:
        runner = CaseRunner(server.socket, server.models, command, full=options.full)
        for case in chosen:
            problems = runner.problems(case)
            if problems:
                failed += 1
                sys.stdout.write("\n     ".join([f"FAIL {case.id} {case.title}", *problems]) + "\n")
    sys.stdout.write(f"{len(chosen) - failed} passed, {failed} failed, {len(cases) - len(chosen)} skipped\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
