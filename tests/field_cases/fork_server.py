"""Runs many commands with one import: `python -m tests.field_cases.fork_server SOCKET MODELS`.

Imports what `cbgen run` needs, builds the models of the cases, and then forks for each request of `fork_client`. A
fork is a process of its own with the streams, the directory and the environment of the client, so a case sees nothing
of its neighbours. Ends when its stdin does.
"""

import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path

_READY = b"ready\n"
_REQUEST_BYTES = 1 << 18


class ForkServer:
    """Accepts requests, forks, and tells each client how its process ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)
        self._processes: dict[socket.socket, tuple[int, int]] = {}  # client -> (process, its pidfd)
        self._clients: dict[int, socket.socket] = {}  # pidfd -> client

    def serve(self) -> None:
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if 0 in ready:
                return
            for item in ready:
                if item in self._clients:
                    self._end(self._clients[item])
            for item in ready:
                if item in self._processes:  # the client was killed; before any new request, as with a real process
                    os.kill(self._processes[item][0], signal.SIGKILL)
                    self._end(item)
            if self._listener in ready:
                self._start()

    def _start(self) -> None:
        client, _ = self._listener.accept()
        request, streams, _, _ = socket.recv_fds(client, _REQUEST_BYTES, 3)
        process = os.fork()
        if process == 0:
            _run(streams, *json.loads(request))
        for stream in streams:
            os.close(stream)
        descriptor = os.pidfd_open(process)
        self._processes[client], self._clients[descriptor] = (process, descriptor), client
        self._selector.register(client, selectors.EVENT_READ)
        self._selector.register(descriptor, selectors.EVENT_READ)
        _send(client, process)

    def _end(self, client: socket.socket) -> None:
        process, descriptor = self._processes.pop(client)
        del self._clients[descriptor]
        self._selector.unregister(client)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(process, 0)
        _send(client, os.waitstatus_to_exitcode(status))
        client.close()


def _send(client: socket.socket, number: int) -> None:
    try:
        client.send(b"%d" % number)
    except OSError:  # it is gone; its end is handled when the selector says so
        return


def _run(streams: list[int], arguments: list[str], directory: str, environment: dict[str, str]) -> None:
    """In the fork: become `cbgen ARGUMENTS`."""
    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 64)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", errors="backslashreplace")  # noqa: SIM115
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        code = _call_main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _call_main(arguments: list[str]) -> int:
    from cbgen.cli import main

    try:
        main(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    address, models = sys.argv[1], Path(sys.argv[2])
    import cbgen.engine.engine
    import cbgen.engine.loader
    import cbgen.pipeline  # noqa: F401
    from tests.field_cases.models import build_models

    build_models(models)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        os.write(1, _READY)
        gc.freeze()
        ForkServer(listener).serve()


if __name__ == "__main__":
    main()
