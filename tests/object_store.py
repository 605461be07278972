"""moto's S3 server in a process of its own, and a proxy before it that fails as a test says."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

from tests.listening import free_port

Fault = Literal["", "503", "cut", "cut answer", "stop"]
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
SERVER = "import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"
STOP_S = 5.0
"""How long a stopped proxy holds a request: longer than the timeout that the tests set."""


@dataclass
class Proxy:
    """Passes requests on, each after ``delay_s``. ``fault``: what happens to the n-th one.

    ``times``: when each arrived, with its path.
    """

    server: int
    fault: Callable[[int], Fault] = lambda number: ""
    times: list[tuple[float, str]] = field(default_factory=list)
    port: int = 0
    delay_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def uri(self, bucket: str = "bucket") -> str:
        return f"s3://{bucket}/runs?endpoint_override=127.0.0.1:{self.port}&scheme=http"


@contextmanager
def s3_server(folder: Path) -> Iterator[Proxy]:
    """Yield a proxy before an S3 server that has one bucket, ``bucket``."""
    port = free_port()
    with (folder / "moto.txt").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=log, stderr=log)
    try:
        _request(port, "PUT", "/bucket", b"", {}, wait_s=60.0)
        proxy = Proxy(port)
        with _Server(proxy) as listening:
            proxy.port = listening.server_port
            threading.Thread(target=listening.serve_forever, daemon=True).start()
            yield proxy
            listening.shutdown()
    finally:
        server.kill()
        server.wait()


def _request(
    port: int, method: str, path: str, body: bytes, headers: dict[str, str], wait_s: float = 0.0
) -> tuple[int, list[tuple[str, str]], bytes]:
    end = time.monotonic() + wait_s
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        except (ConnectionError, http.client.HTTPException):
            if time.monotonic() >= end:
                raise
            time.sleep(0.1)
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    def __init__(self, proxy: Proxy) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy = proxy

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: a client that has given up is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        proxy = self.server.proxy
        with proxy.lock:
            proxy.times.append((time.time(), f"{self.command} {self.path}"))
            fault = proxy.fault(len(proxy.times) - 1)
        body = self._chunks() if "Transfer-Encoding" in self.headers else self._body()
        time.sleep(proxy.delay_s)
        if fault == "503":
            self._answer(503, [], b"")
            return
        if fault == "stop":
            time.sleep(STOP_S)
        if fault in ("cut", "stop"):
            self.close_connection = True
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        status, answered, content = _request(proxy.server, self.command, self.path, body, headers)
        if fault == "cut answer":  # the object is there, and its writer does not know
            self.close_connection = True
            return
        self._answer(status, answered, content)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _chunks(self) -> bytes:
        """Return a chunked body as it stands, with the sizes of its chunks."""
        read = b""
        while True:
            line = self.rfile.readline()
            read += line
            if not int(line.split(b";")[0], 16):
                break
            read += self.rfile.read(int(line.split(b";")[0], 16) + 2)
        while (line := self.rfile.readline()) != b"\r\n":
            read += line
        return read + line

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        length = next((v for n, v in headers if n.lower() == "content-length"), str(len(content)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""
