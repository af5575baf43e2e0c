"""Find the folder of a model by bundled name, path, catalogue name, Hugging Face id or ModelScope id."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from vivavoce.errors import CapacityError, CheckpointError, InputError, MissingDependencyError
from vivavoce.hub.catalogue import PUBLISHED, KnownModel, ModelFile
from vivavoce.hub.check import INDEX_NAME, CheckReport, FileCheck, check
from vivavoce.hub.fetch import fetch_listed
from vivavoce.hub.listed import LISTED

BUNDLED = Path(__file__).parent.parent / "minis"
CODEC_FOLDER = "codec"  # inside a checkpoint that includes its codec
GENERATION_CONFIG = "generation_config.json"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
NEVER_FETCHED = ["*.py", ".gitattributes"]  # published code is never run, so it is not downloaded
TRUE_WORDS = {"1", "on", "yes", "true"}
KNOWN: tuple[KnownModel, ...] = (*LISTED, *PUBLISHED)
__all__ = [
    "BUNDLED",
    "CODEC_FOLDER",
    "GENERATION_CONFIG",
    "INDEX_NAME",
    "KNOWN",
    "CheckReport",
    "FileCheck",
    "KnownModel",
    "LocalModel",
    "ModelFile",
    "bundled",
    "cache_folder",
    "check",
    "fetch",
    "free_disk",
    "is_offline",
    "known",
    "listed_folder",
    "local_models",
    "resolve",
]


@dataclass(frozen=True)
class LocalModel:
    """A model that is on this machine; `missing` are the expected files it lacks."""

    name: str
    source: str
    revision: str
    path: Path
    missing: tuple[str, ...]


def known(name: str) -> KnownModel | None:
    """The known model of this id or of this mirror's id."""
    bare = name.removeprefix("hf:").partition("@")[0].lower()
    return next((m for m in KNOWN if bare in {n.lower() for n in (m.name, *m.mirrors)}), None)


def resolve(name: str, revision: str | None = None, offline: bool | None = None) -> Path:
    """The folder of a model, which is downloaded if necessary.

    An interrupted download is resumed; complete files are kept after a failure.

    `name` is a bundled name, a folder, a name of the catalogue, `owner/name`, `hf:owner/name` or `ms:owner/name`, the
    last three with an optional `@revision`. `offline` forbids the network; None: HF_HUB_OFFLINE or VIVA_OFFLINE
    decides.
    """
    local = bundled().get(name) or _folder(name)
    if local is not None:
        if revision is not None:
            raise InputError(f"{name!r} is a folder on this machine and has no revisions; leave out {revision!r}")
        return local
    model = known(name)
    if model is not None and model.listed:
        if revision is not None:
            raise InputError(f"the files of {name!r} are fixed; leave out the revision {revision!r}")
        return fetch(model, offline)
    repo, asked = _split_revision(name, revision)
    no_network = is_offline() if offline is None else offline
    if repo.startswith("ms:"):
        return _from_modelscope(repo.removeprefix("ms:"), asked, no_network)
    return _from_hugging_face(repo.removeprefix("hf:"), asked, no_network)


def fetch(model: KnownModel, offline: bool | None = None, verify: bool = False) -> Path:
    """The folder of a model with listed files, completed if necessary; with `verify`, damaged files are replaced."""
    folder = listed_folder(model)
    no_network = is_offline() if offline is None else offline
    lacking = set(model.missing(folder))
    if lacking and not no_network:
        _require_room(sum(file.bytes for file in model.listed if file.name in lacking), model.name)
    if lacking or verify:
        try:
            fetch_listed(model, folder, no_network, verify)
        except CheckpointError as error:
            raise CheckpointError(_not_cached(model.name, offline=True) if no_network else str(error)) from error
    return folder


def listed_folder(model: KnownModel) -> Path:
    """Where the listed files of a model are kept."""
    return cache_folder() / "vivavoce" / model.name


def bundled(root: Path = BUNDLED) -> dict[str, Path]:
    """Folders of the bundled models by name."""
    return {config.parent.name: config.parent for config in sorted(root.glob("*/config.json"))}


def local_models() -> list[LocalModel]:
    """Bundled models, and known ones in the cache, complete or not."""
    found = [LocalModel(name, "bundled", "", path, ()) for name, path in bundled().items()]
    for model in KNOWN:
        if model.listed and (folder := listed_folder(model)).is_dir():
            found.append(LocalModel(model.name, "cache", "", folder, tuple(model.missing(folder))))
        for repo in (model.name, *model.mirrors):
            for folder in sorted((_repo_cache(repo) / "snapshots").glob("*")):
                found.append(LocalModel(repo, "cache", folder.name, folder, tuple(model.missing(folder))))
    return found


def cache_folder() -> Path:
    """The folder of Hugging Face models: HF_HUB_CACHE, or hub/ under HF_HOME."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def free_disk(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def is_offline() -> bool:
    """Whether the environment forbids the network."""
    return any(os.environ.get(name, "").lower() in TRUE_WORDS for name in ("HF_HUB_OFFLINE", "VIVA_OFFLINE"))


def _folder(name: str) -> Path | None:
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        raise InputError(f"{name!r} is a file; use its folder, {str(path.parent)!r}")
    if name.startswith(("/", "./", "../", "~")):
        raise CheckpointError(f"there is no folder {name!r}; use a folder, a bundled name or a hub id")
    return None


def _split_revision(name: str, revision: str | None) -> tuple[str, str | None]:
    repo, at, suffix = name.partition("@")
    if at and revision not in (None, suffix):
        raise InputError(f"{name!r} and revision {revision!r} contradict each other; use one of them")
    bare = repo.removeprefix("hf:").removeprefix("ms:")
    if not HUB_ID.fullmatch(bare) or (at and not suffix):
        names = ", ".join(bundled()) or "none"
        raise InputError(
            f"no model is called {name!r}: it is no folder, no bundled name ({names}), no name of `viva models` and no "
            "hub id (owner/name, hf:owner/name or ms:owner/name, optionally with @revision)"
        )
    return repo, suffix or revision


def _from_hugging_face(repo: str, revision: str | None, offline: bool) -> Path:
    model = known(repo)
    pinned = revision or (model.revision if model else None)
    if model and not offline:
        _require_disk_space(model, repo)
    mirrors = [name for name in (model.name, *model.mirrors) if name != repo] if model else []
    try:
        return _snapshot(repo, pinned, offline)
    except CheckpointError as first:
        for mirror in mirrors:
            try:
                return _snapshot(mirror, pinned, offline)
            except CheckpointError:
                continue
        raise first


def _snapshot(repo: str, revision: str | None, offline: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    model = known(repo)
    at = f"{repo}@{revision}" if revision else repo
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                cache_dir=cache_folder(),
                endpoint=os.environ.get("HF_ENDPOINT"),
                local_files_only=offline,
                ignore_patterns=[*NEVER_FETCHED, *(model.unused if model else ())],
            )
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo} is gated: accept its terms at huggingface.co/{repo}, then run `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo} is not on Hugging Face, or is private: check the spelling, or log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{repo} has no revision {revision!r} on Hugging Face; leave it out or correct it"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointError(_not_cached(at, offline or is_offline())) from error
    except Exception as error:  # the hub's HTTP library has its own exceptions, which differ between its versions
        raise CheckpointError(_cut_short(at, error)) from error


def _from_modelscope(repo: str, revision: str | None, offline: bool) -> Path:
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise MissingDependencyError(
            f"ms:{repo} comes through ModelScope: pip install 'vivavoce[modelscope]'"
        ) from error
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                local_files_only=offline,
                ignore_patterns=NEVER_FETCHED,
            )
        )
    except Exception as error:
        if offline:
            raise CheckpointError(_not_cached(f"ms:{repo}", offline)) from error
        raise CheckpointError(_cut_short(f"ms:{repo}", error)) from error


def _not_cached(repo: str, offline: bool) -> str:
    if offline:
        return (
            f"{repo} is not (completely) on this machine and the network is disabled: run `viva models fetch {repo}` "
            "online, or unset HF_HUB_OFFLINE and VIVA_OFFLINE"
        )
    return (
        f"{repo} is not on this machine and the hub cannot be reached: check the network (or set HF_ENDPOINT to a "
        "mirror) and run the same command again"
    )


def _cut_short(repo: str, error: Exception) -> str:
    reason = str(error).strip().split("\n", maxsplit=1)[0][:200]
    return (
        f"{repo} could not be fetched ({type(error).__name__}: {reason}); run the same command again, "
        "complete files are kept"
    )


def _require_disk_space(model: KnownModel, repo: str) -> None:
    if any(not model.missing(found) for found in (_repo_cache(repo) / "snapshots").glob(model.revision or "*")):
        return
    blobs = (_repo_cache(repo) / "blobs").glob("*")
    _require_room(model.bytes - sum(blob.stat().st_size for blob in blobs), repo)


def _require_room(needed: int, name: str) -> None:
    cache = cache_folder()
    free = free_disk(cache)
    if free < needed:
        raise CapacityError(
            f"{name} needs {needed / 1e9:.1f} GB more in {cache}, where {free / 1e9:.1f} GB are free; "
            "free some space, or set HF_HUB_CACHE to a folder on a larger disk"
        )


def _repo_cache(repo: str) -> Path:
    return cache_folder() / f"models--{repo.replace('/', '--')}"
