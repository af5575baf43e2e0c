"""Errors that a user can act on: each message says what is wrong, with which value, and what to do.

Modules that need an optional package import it at the top. Callers import such a module within `optional_packages`,
which turns the ImportError into a MissingDependencyError that names the extra to install; the CLI does so for all.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class VivaError(Exception):
    """Base of all errors that a user can act on. The message is one line, shown without a traceback."""


class CheckpointError(VivaError):
    """A model's files are missing, damaged, or not of the declared layout."""


class InputError(VivaError):
    """An argument cannot be used: wrong ids, wrong rate, wrong shape, empty."""


class NothingToSayError(InputError):
    """A text contains nothing that can be spoken."""


class CapacityError(VivaError):
    """A valid request does not fit: context, cache pages, memory."""


class MissingDependencyError(VivaError):
    """A feature needs an extra that is not installed; the message names the pip command."""


class EndpointError(VivaError):
    """A remote part failed. The message may quote its answer; `public` does not, and is all that clients get."""

    def __init__(self, public: str, detail: str = "") -> None:
        super().__init__(f"{public}: {detail}" if detail else public)
        self.public = public


class UnreachableEndpointError(EndpointError, ConnectionError):
    """A remote part cannot be reached."""


def public_message(error: BaseException) -> str:
    """What a client of a server may know of an error."""
    if isinstance(error, EndpointError):
        return error.public
    return str(error) if isinstance(error, VivaError) else f"internal error ({type(error).__name__})"


# The extra of pyproject.toml that installs a top-level module. A module of several extras has the smallest of them.
EXTRA_OF_MODULE = {
    "ai_edge_litert": "quality",
    "aiohttp": "fleet",
    "aiortc": "server",
    "av": "media",
    "ctranslate2": "asr",
    "faster_whisper": "asr",
    "llguidance": "tools",
    "matplotlib": "plot",
    "mcp": "mcp",
    "modelscope": "modelscope",
    "msgpack": "server",
    "msgspec": "server",
    "multipart": "server",
    "onnx": "export",
    "onnxruntime": "onnx",
    "onnxscript": "export",
    "pesq": "quality",
    "prometheus_client": "server",
    "pylibsrtp": "server",
    "pystoi": "quality",
    "python_multipart": "server",
    "ray": "ray",
    "sounddevice": "microphone",
    "speechmos": "judge",
    "starlette": "server",
    "transformers": "peer",
    "uvicorn": "server",
    "uvloop": "server",
    "visqol": "quality",
    "websockets": "server",
}
# Packages without an extra: the name under which pip installs a module.
PACKAGE_OF_MODULE = {
    "huggingface_hub": "huggingface_hub",
    "soundfile": "soundfile",
    "soxr": "soxr",
    "tokenizers": "tokenizers",
    "triton": "triton",
    "yaml": "pyyaml",
}


def missing_dependency(error: ImportError) -> MissingDependencyError | None:
    """The error for a package that is not installed; None if the import failed for another reason."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.partition(".")[0]
    if extra := EXTRA_OF_MODULE.get(module):
        return MissingDependencyError(f"this needs the package {module}: pip install 'vivavoce[{extra}]'")
    if package := PACKAGE_OF_MODULE.get(module):
        return MissingDependencyError(f"this needs the package {module}: pip install {package}")
    return None


@contextmanager
def optional_packages() -> Iterator[None]:
    """For importing a module with optional packages: MissingDependencyError if one is not installed."""
    try:
        yield
    except ImportError as error:
        if (missing := missing_dependency(error)) is None:
            raise
        raise missing from error


def shown(text: str) -> str:
    """A text quoted for a message, cut after 30 characters."""
    return repr(text if len(text) <= 30 else text[:30] + "…")
