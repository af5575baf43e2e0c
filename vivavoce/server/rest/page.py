"""The files of the page. Everything comes from the package; nothing from elsewhere."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

MEDIA_TYPES = {  # not asked of the system, which may think otherwise
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked about: a page never talks to a newer server
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class PageFile:
    """One file of the page, as it is answered."""

    content: bytes
    media_type: str

    @property
    def tag(self) -> str:
        """Changes when the content does."""
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    async def answer(self, request: "Request") -> "Response":
        """The file, unless the browser has it already."""
        from starlette.responses import Response

        headers = HEADERS | {"ETag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def page_files() -> dict[str, PageFile]:
    """The files of the page by their names."""
    found: dict[str, PageFile] = {}
    for file in files("vivavoce.server").joinpath("page").iterdir():
        media_type = MEDIA_TYPES.get(file.name[file.name.rfind(".") :])
        if media_type is not None:
            found[file.name] = PageFile(file.read_bytes(), media_type)
    return found


def page_routes() -> list[Any]:
    """Addresses of the page, which everybody may see."""
    from starlette.routing import Route

    addresses = {"/" if name == "index.html" else f"/{name}": file for name, file in page_files().items()}
    return [Route(address, file.answer) for address, file in addresses.items()]
