"""`python -m tests.crash_driver LOG ARGS...`: `cbgen ARGS...`, noting in LOG each row once it counts as finished."""

import os
import sys

from cbgen import cli
from cbgen.data.writers import OrderedWriter


def main() -> None:
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    put = OrderedWriter.put

    def put_and_note(self, row, record):
        put(self, row, record)
        os.write(log, b"%d\n" % row.index)

    OrderedWriter.put = put_and_note
    cli.main(sys.argv[2:])


if __name__ == "__main__":
    main()
