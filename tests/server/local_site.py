"""A small HTTP server with pages that behave well and badly."""

import contextlib
import http.server
import threading

import pytest


class Site(http.server.BaseHTTPRequestHandler):
    """A server that behaves as its paths say."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        page = "<script>bad()</script><p>Hello &lt;there&gt;</p>"
        if self.path == "/slow":
            self.drip()
        elif self.path.startswith("/to?"):
            self.answer(302, "", location=self.path[4:])
        elif self.path == "/big":
            self.answer(200, "x" * (10 << 20))
        elif self.path == "/html":
            self.answer(200, page, kind="text/html")
        elif self.path == "/zip":
            self.answer(200, "not zipped", encoding="gzip")
        elif self.path == "/picture":
            self.answer(200, "picture", kind="image/png")
        else:
            self.answer(200, f"{self.command} {self.path}")

    def drip(self):
        with contextlib.suppress(OSError):
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n")
            while not self.server.is_over.wait(0.05):
                self.wfile.write(b".")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        self.answer(201, f"{self.headers['content-type']}: {body}")

    def answer(self, status, text, kind="text/plain", location=None, encoding=None):
        data = text.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        for name, value in (("location", location), ("content-encoding", encoding)):
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads, server.is_over = True, threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.is_over.set()
    server.shutdown()
    thread.join()
    server.server_close()
