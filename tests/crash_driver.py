"""`python -m tests.crash_driver LOG ARGS...`: `cbgen ARGS...`, noting in LOG each row once it counts as finished."""

import os
import sys

from cbgen import cli
from cbgen.data.writers import OrderedWriter


def main() -> None:
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    flush = OrderedWriter.flush

    def flush_and_note(self):
        indices = [record.index for record in self._unwritten]
        flush(self)
        if indices:
            os.write(log, b"".join(b"%d\n" % index for index in indices))

    OrderedWriter.flush = flush_and_note
    cli.main(sys.argv[2:])


if __name__ == "__main__":
    main()
