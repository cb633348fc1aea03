"""`fork_client.py SOCKET ARGS...`: `cbgen ARGS...`, run by the fork server with our streams, directory and environment.

Signals go on to the command; its exit code is ours; when we are killed, the server kills the command.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any


def call(
    address: str,
    arguments: list[str],
    directory: str,
    environment: dict[str, str],
    streams: list[int],
    started: Callable[[int], None] = lambda process: None,
) -> int:
    """Run a command; returns its exit code, negative for a signal. `started` gets its process id."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        request = json.dumps([arguments, directory, environment]).encode()
        socket.send_fds(connection, [request], streams)
        started(int(connection.recv(100)))
        return int(connection.recv(100) or b"-9")


def _forward_signals(process: int) -> None:
    def forward(number: int, _: Any) -> None:
        os.kill(process, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)


if __name__ == "__main__":
    code = call(sys.argv[1], sys.argv[2:], os.getcwd(), dict(os.environ), [0, 1, 2], _forward_signals)
    sys.exit(code if code >= 0 else 128 - code)
