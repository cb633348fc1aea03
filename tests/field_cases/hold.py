"""`hold.py SECONDS`: keeps stdout open and silent, as a terminal would, until its reader goes away or time is up."""

import select
import sys


def main() -> None:
    poll = select.poll()
    poll.register(1, 0)  # only a vanished reader is of interest
    poll.poll(float(sys.argv[1]) * 1000)


if __name__ == "__main__":
    main()
