"""`rss.py FILE COMMAND...`: runs COMMAND with our stdin and stdout, and writes its peak resident set in kB to FILE."""

import resource
import subprocess
import sys
from pathlib import Path


def main() -> None:
    code = subprocess.call(sys.argv[2:])
    Path(sys.argv[1]).write_text(f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
