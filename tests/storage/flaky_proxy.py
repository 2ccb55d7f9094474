"""A proxy before an S3 server that injects faults and remembers every request."""

import http.client
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import unquote

Fault = Literal[
    "500",
    "503",
    "SlowDown",
    "403",
    "501",
    "cut",  # the connection ends before the server sees anything
    "cut answer",  # it ends in the middle of the answer
    "lost answer",  # the server has acted; its answer never arrives
    "dropped",  # "done" is answered and nothing was done
    "no condition",  # the server never sees the condition, as some stores ignore it
]
_CODES = {
    "500": (500, "InternalError"),
    "503": (503, "ServiceUnavailable"),
    "SlowDown": (503, "SlowDown"),
    "403": (403, "AccessDenied"),
    "501": (501, "NotImplemented"),
}
_NOT_PASSED_ON = {"connection", "expect", "keep-alive", "transfer-encoding"}


@dataclass(slots=True)
class Rule:
    """A fault for some requests: how many are left, None for all."""

    fault: Fault
    method: str
    path: "re.Pattern[str]"
    left: int | None
    met: int = 0

    def meets(self, method: str, path: str, conditional: bool) -> bool:
        """Return whether a request is to suffer, and count it."""
        if self.left == 0 or not re.fullmatch(self.method, method):
            return False
        if not self.path.search(path) or (self.fault == "501" and not conditional):
            return False
        self.met += 1
        if self.left is not None:
            self.left -= 1
        return True


@dataclass
class Proxy:
    """A running proxy.

    Attributes:
        url: Its endpoint.
        requests: Method and path with query of every request, in order.
    """

    url: str
    upstream: tuple[str, int]
    requests: list[tuple[str, str]] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def inject(
        self, fault: Fault, method: str = ".*", path: str = "", times: int | None = None
    ) -> Rule:
        """Let the next requests that match suffer a fault."""
        rule = Rule(fault, method, re.compile(path), times)
        with self.lock:
            self.rules.append(rule)
        return rule

    def heal(self) -> None:
        """Take all faults back and forget the requests."""
        with self.lock:
            self.rules.clear()
            self.requests.clear()

    def count(self, method: str, path: str = "") -> int:
        """Return how many requests of a method had a matching path."""
        with self.lock:
            return sum(
                m == method and bool(re.search(path, p)) for m, p in self.requests
            )

    def fault_for(self, method: str, path: str, conditional: bool) -> Fault | None:
        """Remember a request and return the fault it is to suffer."""
        with self.lock:
            self.requests.append((method, path))
            for rule in self.rules:
                if rule.meets(method, path, conditional):
                    return rule.fault
        return None


@contextmanager
def flaky_proxy(host: str, port: int) -> Iterator[Proxy]:
    """Run a proxy before the server at a host and port."""
    proxy = Proxy("", (host, port))

    class Handler(_Handler):
        """The handler of this proxy."""

        owner = proxy

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Proxy

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""

    def handle(self) -> None:
        """Serve a connection; that a client leaves is no error here."""
        try:
            super().handle()
        except OSError:
            self.close_connection = True

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(self.path)
        conditional = "If-None-Match" in self.headers
        fault = self.owner.fault_for(self.command, path, conditional)
        if fault == "cut":
            self._cut()
        elif fault in _CODES:
            status, code = _CODES[fault]
            text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>"
            self._answer(status, [("Content-Type", "application/xml")], text.encode())
        elif fault == "dropped":
            self._answer(200, [("ETag", '"0"')], b"")
        else:
            self._forward(body, fault)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

    def _forward(self, body: bytes, fault: Fault | None) -> None:
        connection = http.client.HTTPConnection(*self.owner.upstream, timeout=60)
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                # Host stays as the client signed it.
                if name.lower() in _NOT_PASSED_ON:
                    continue
                if fault == "no condition" and name.lower() == "if-none-match":
                    continue
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if fault == "lost answer":
            self._cut()
            return
        headers = [
            (name, value)
            for name, value in answer.getheaders()
            if name.lower() not in _NOT_PASSED_ON | {"content-length"}
        ]
        size = answer.getheader("Content-Length") if self.command == "HEAD" else None
        half = len(data) // 2 if fault == "cut answer" else None
        self._answer(answer.status, headers, data, size, half)

    def _answer(
        self,
        status: int,
        headers: list[tuple[str, str]],
        data: bytes,
        size: str | None = None,
        send_only: int | None = None,
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", size or str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:send_only])
        if send_only is not None:
            self._cut()

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
