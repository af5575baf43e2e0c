"""Which addresses the server may be made to reach: those below an address that the operator named."""

from urllib.parse import SplitResult, unquote, urlsplit


def is_below(url: str, address: str) -> bool:
    """Whether a URL has the origin of an address, and its path or one below it."""
    try:
        parts, allowed = urlsplit(url), urlsplit(address)
        if _origin(parts) != _origin(allowed) or parts.username is not None or parts.fragment:
            return False
    except ValueError:  # not a URL
        return False
    path = unquote(parts.path)
    if ".." in path.split("/") or "\\" in path or "%" in path:  # a server may read them as other paths
        return False
    return path == allowed.path or path.startswith(f"{allowed.path}/")


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, parts.port or default
