"""`python -m cbgen`: the same command as `cbgen`."""

from cbgen.cli import main

main()
