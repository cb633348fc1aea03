"""`python -m tests.gpu_check`: see the package. Exit code 0 when every stage ended and no answer was wrong, else 1."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tests.gpu_check.driver import RunOptions, run_stages
from tests.gpu_check.report import format_report
from tests.gpu_check.stages import STAGES


def main() -> int:
    options = _parser().parse_args()
    names = [stage.name for stage in STAGES]
    chosen = options.stages.split(",") if options.stages else names
    unknown = [name for name in chosen if name not in names]
    if unknown:
        sys.stderr.write(f"gpu-check: no stage {unknown[0]!r}; there are {', '.join(names)}\n")
        return 2
    run_options = RunOptions(
        out=options.out,
        dry=options.dry,
        seconds=options.seconds,
        hang=options.hang,
        hang_seconds=options.hang_seconds,
        breaks=options.breaks,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # stages are ended on the way out
    document = run_stages(tuple(stage for stage in STAGES if stage.name in chosen), run_options)
    sys.stdout.write(format_report(document) + "\n")
    return 0 if document["ok"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_check", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="on CPU with tiny sizes: the same code, meaningless figures")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check.json"), help="the JSON document")
    parser.add_argument("--stages", help="only these, separated by commas")
    parser.add_argument("--seconds", type=float, default=480.0, help="budget of the whole run")
    parser.add_argument("--hang", metavar="STAGE", help="let this stage sleep, to see that it is ended")
    parser.add_argument("--hang-seconds", type=float, help="its time limit then")
    parser.add_argument("--break", dest="breaks", metavar="OPERATOR", help="let it answer wrongly, to see it noticed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
