"""A web server for tests of the hub: Hugging Face, ModelScope, a package index and an npm registry in one."""

import io
import json
import re
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FileServer:
    """What is served under which path, how it misbehaves, and what was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    """Connections end after this many bytes of a body."""
    stall_after: int | None = None
    """The first connection sends this many bytes of a body, and then nothing until `release`."""
    takes_ranges: bool = True
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    """Path, Range and Authorization of every request."""
    stalled: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.asked]

    def add_python_package(self, name: str, version: str, members: dict[str, bytes], index: str = "simple") -> None:
        """A wheel in the index."""
        file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, content in members.items():
                archive.writestr(member, content)
        self.files[f"/packages/{file}"] = packed.getvalue()
        page = f'<!DOCTYPE html><a href="/packages/{file}#sha256=0">{file}</a><br><a href="/x.whl">other-1.0.whl</a>'
        self.files[f"/{index}/{name}/"] = page.encode()

    def add_npm_package(self, name: str, version: str, members: dict[str, bytes]) -> None:
        """A tarball in the registry."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for member, content in members.items():
                entry = tarfile.TarInfo(member)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        path = f"/tarballs/{name.replace('/', '-')}-{version}.tgz"
        self.files[path] = packed.getvalue()
        about = {"name": name, "version": version, "dist": {"tarball": f"{self.url}{path}"}}
        self.files[f"/npm/{name.replace('/', '%2f')}/{version}"] = json.dumps(about).encode()


class FileHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: FileServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        served, span = self.served, self.headers.get("Range")
        served.asked.append((self.path, span, self.headers.get("Authorization")))
        if self.path in served.redirects:
            self.answer(302, b"", {"Location": served.redirects[self.path]})
        elif (content := served.files.get(self.path)) is None:
            self.answer(404, b"")
        elif span is None or not served.takes_ranges:
            self.answer(200, content)
        else:
            start = int(re.fullmatch(r"bytes=(\d+)-", span)[1])
            if start >= len(content):
                self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            else:
                last = len(content) - 1
                self.answer(206, content[start:], {"Content-Range": f"bytes {start}-{last}/{len(content)}"})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        served = self.served
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if served.stall_after is not None and len(body) > served.stall_after:
            self.wfile.write(body[: served.stall_after])
            self.wfile.flush()
            served.stall_after = None
            served.stalled.set()
            served.release.wait(60)
            self.close_connection = True
        elif served.cut_after is not None and len(body) > served.cut_after:
            self.wfile.write(body[: served.cut_after])
            self.close_connection = True
        else:
            self.wfile.write(body)


@contextmanager
def file_server() -> Iterator[FileServer]:
    """A running server, which knows its own URL."""
    served = FileServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (FileHandler,), {"served": served}))
    server.daemon_threads = True
    served.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
