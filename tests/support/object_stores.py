"""Object stores for tests: one in memory that fails now and then, and a real S3 server (moto's) on this machine."""

import os
import random
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any, ClassVar
from zlib import crc32

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.helpers import free_port


class Flaky(MemoryFileSystem):
    """memory:// of which each call fails with some chance."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}  # pyright: ignore[reportIncompatibleVariableOverride]
    pseudo_dirs: ClassVar[list[str]] = [""]  # pyright: ignore[reportIncompatibleVariableOverride]
    CHANCE = 0.05
    chance = CHANCE
    failures = 0
    calls: ClassVar[Counter[str]] = Counter()
    _random = random.Random(0)

    @classmethod
    def register(cls) -> None:
        fsspec.register_implementation("flaky", cls, clobber=True)
        cls.chance = cls.CHANCE
        # the first call fails for certain: so a test knows that failures happen
        cls.failures, cls._force = 0, True

    _force = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, str) and path.startswith("flaky://"):
            path = "memory://" + path.removeprefix("flaky://")
        return super()._strip_protocol(path)

    @classmethod
    def _fail_sometimes(cls, call: str) -> None:
        cls.calls[call] += 1
        if cls._force or cls._random.random() < cls.chance:
            cls._force = False
            cls.failures += 1
            raise ConnectionError(f"injected into {call}")

    def find(self, *args: Any, **kwargs: Any) -> Any:
        self._fail_sometimes("find")
        return super().find(*args, **kwargs)

    def cat_file(self, *args: Any, **kwargs: Any) -> Any:
        self._fail_sometimes("cat_file")
        return super().cat_file(*args, **kwargs)

    def pipe_file(self, *args: Any, **kwargs: Any) -> Any:
        self._fail_sometimes("pipe_file")
        return super().pipe_file(*args, **kwargs)

    def rm_file(self, *args: Any, **kwargs: Any) -> Any:
        self._fail_sometimes("rm_file")
        return super().rm_file(*args, **kwargs)

    def open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
        self._fail_sometimes("open")
        file = super().open(path, mode, *args, **kwargs)
        if mode == "wb":  # what was written arrives when the file is closed, or does not
            close = file.close

            def upload() -> None:
                if not file.closed:
                    self._fail_sometimes("upload")
                close()

            file.close = upload
        return file


@contextmanager
def moto_server() -> Iterator[str]:
    """s3://bucket on a server of its own process; the environment has its address."""
    import s3fs

    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }.items():
        os.environ[name] = value
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with open(os.devnull, "w") as nowhere:
        server = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
    try:
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline
            assert server.poll() is None
            time.sleep(0.1)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"
    finally:
        server.kill()
        server.wait()


@contextmanager
def s3_server_that_fails(answers: Callable[[str, str], int], content: bytes = b"") -> Iterator[str]:
    """s3://bucket/run on a server in this process that stores nothing; the environment has its address.

    Args:
        answers: returns the status of the answer to a method and a path. 0: the server never answers. 206: a part of
            the content, with the checksum of the whole, as rclone answers.
    """
    import s3fs

    over = Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status = answers(self.command, self.path)
            if not status:
                over.wait()
                return
            body = {200: EMPTY_LISTING, 404: NO_BUCKET}.get(status, UNAVAILABLE)
            self.send_response(status)
            if status == 206:
                first, last = self.headers["Range"].removeprefix("bytes=").split("-")
                body = content[int(first) : int(last) + 1]
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
                self.send_header("x-amz-checksum-crc32", b64encode(crc32(content).to_bytes(4, "big")).decode())
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

        def log_message(self, format: str, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None: ...  # of a client that has ended

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    address = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}", "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**address, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        try:
            yield "s3://bucket/run"
        finally:
            over.set()
            server.shutdown()
            server.server_close()
            s3fs.S3FileSystem.clear_instance_cache()


NO_BUCKET = b"<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>"
EMPTY_LISTING = b'<?xml version="1.0"?><ListBucketResult><Name>bucket</Name><KeyCount>0</KeyCount></ListBucketResult>'
UNAVAILABLE = b'<?xml version="1.0"?><Error><Code>ServiceUnavailable</Code><Message>down</Message></Error>'
