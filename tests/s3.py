"""An S3 server in this process for tests: moto behind a counter of requests, which fails as many as it is told to."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from pyarrow import fs
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"


@dataclass
class Server:
    """What the server has seen, and what it shall do next.

    Attributes:
        counts: requests by (method, key).
        failures: so many of the next requests whose method is in `failing` get status 500.
    """

    url: str = ""
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: int = 0
    failing: tuple[str, ...] = ("GET", "PUT", "POST")
    num_failed: int = 0
    spared: int = 0

    def uri(self, key: str, **options: str) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"s3://{BUCKET}/{key}" + (f"?{query}" if query else "")

    def fail_next(self, count: int, *methods: str, after: int = 0) -> None:
        """Fail `count` requests, once `after` of them went through."""
        self.failures, self.num_failed, self.spared = count, 0, after
        self.failing = methods or ("GET", "PUT", "POST")

    def reset(self) -> None:
        """Forget all objects, counts and failures."""
        self.fail_next(0)
        for backends in s3_backends.values():
            for backend in backends.values():
                backend.reset()
        backend.create_bucket(BUCKET, "us-east-1")
        self.counts.clear()

    def count(self, method: str, key: str) -> int:
        return self.counts[method, key]

    def wrap(self, application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
        def counting(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            method = environ["REQUEST_METHOD"]
            key = environ["PATH_INFO"].removeprefix(f"/{BUCKET}").removeprefix("/")
            self.counts[method, key] += 1
            if self.failures > 0 and method in self.failing and self.spared > 0:
                self.spared -= 1
            elif self.failures > 0 and method in self.failing:
                self.failures -= 1
                self.num_failed += 1
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response("500 Internal Server Error", [("Content-Length", "0")])
                return [b""]
            return application(environ, start_response)

        return counting


class _QuietHandler(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A running server with an empty bucket; the environment points there."""
    from cbgen.data import filesystems

    server = Server()
    running = make_server(
        "127.0.0.1",
        0,
        server.wrap(DomainDispatcherApplication(create_backend_app)),
        threaded=True,
        request_handler=_QuietHandler,
    )
    server.url = f"http://127.0.0.1:{running.server_port}"
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setattr(filesystems, "_SDK_TRIES", 1)  # only our own tries are counted, and waited for
    filesystems._s3.cache_clear()
    filesystem = fs.S3FileSystem(
        endpoint_override=server.url.removeprefix("http://"), scheme="http", allow_bucket_creation=True
    )
    filesystem.create_dir(BUCKET)
    server.counts.clear()
    try:
        yield server
    finally:
        running.shutdown()
        thread.join()
        running.server_close()
        filesystems._s3.cache_clear()
