"""One process of a stage: `python -m tests.gpu_check.stage TASK`, where TASK is the JSON that the driver makes.

Findings go to stdout, one JSON object a line; whatever libraries print goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from typing import TextIO

STARTED = time.monotonic()  # before torch is imported: its seconds count


def main() -> None:
    task = json.loads(sys.argv[1])
    stream = _claim_stdout()
    if task["hang"]:
        time.sleep(3600)
    try:
        from tests.gpu_check.context import make_context

        context = make_context(task, stream, STARTED)
        importlib.import_module(f"tests.gpu_check.{task['module']}").run(context)
        context.say({"end": True})
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)  # threads of a library, or a driver that is slow to shut down, have no say any more


def _claim_stdout() -> TextIO:
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


if __name__ == "__main__":
    main()
