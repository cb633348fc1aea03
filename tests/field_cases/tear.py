"""`tear.py OUT KEEP FRACTION [newline|nul|utf8]`: keep KEEP whole lines and FRACTION of the next one, as a crash would.

newline: the torn line got a line end; nul: 64 NUL bytes follow, as a file system may leave them after a power cut;
utf8: cut inside a multi-byte character.
"""

import sys
from pathlib import Path

ENDS = {"newline": b"\n", "nul": b"\0" * 64}


def main() -> None:
    path, keep, fraction = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    mode = sys.argv[4] if len(sys.argv) > 4 else ""
    lines = [line + b"\n" for line in path.read_bytes().split(b"\n")[:-1]]
    torn = lines[keep] if keep < len(lines) else b""
    first_wide = next((index for index, byte in enumerate(torn) if byte >= 0xC0), None)
    size = first_wide + 1 if mode == "utf8" and first_wide is not None else int(len(torn) * fraction)
    path.write_bytes(b"".join(lines[:keep]) + torn[:size] + ENDS.get(mode, b""))


if __name__ == "__main__":
    main()
