"""Models are found by bundled name, folder or hub id, fetched through a hub, and damage is named."""

import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.numpy import save_file
from typer.testing import CliRunner

from vivavoce import hub
from vivavoce.cli import app
from vivavoce.errors import CapacityError, CheckpointError, InputError, MissingDependencyError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/small-model"
BIG = "model-00001-of-00002.safetensors"


# --- a hub that speaks the few endpoints a snapshot needs -------------------------------------------------------------


@dataclass
class SmallHub:
    """What the server holds, how it misbehaves, and what it was asked."""

    files: dict[str, bytes]
    cut_after: int | None = None
    broken: str | None = None
    refuse: tuple[int, str] | None = None
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)

    def downloads(self) -> list[tuple[str, str | None]]:
        return [
            (path.rpartition("/")[2], span) for verb, path, span in self.asked if verb == "GET" and "/resolve/" in path
        ]


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: SmallHub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        if self.hub.refuse:
            self.reply(self.hub.refuse[0], b"{}", {"X-Error-Code": self.hub.refuse[1]})
        elif re.fullmatch(rf"/api/models/{REPO}(/revision/(main|v1))?", path):
            self.reply(200, json.dumps({"id": REPO, "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/{REPO}/tree/{COMMIT}":
            self.reply(200, json.dumps([self.entry(name) for name in self.hub.files]).encode())
        elif path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
            self.serve_file(path.removeprefix(f"/{REPO}/resolve/{COMMIT}/"))
        else:
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound" if REPO in path else "RepoNotFound"})

    def entry(self, name: str) -> dict[str, object]:
        content = self.hub.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": sha256(content).hexdigest()[:40]}

    def serve_file(self, name: str) -> None:
        content = self.hub.files[name]
        span = self.headers.get("Range")
        start = int(re.fullmatch(r"bytes=(\d+)-\d*", span)[1]) if span else 0
        headers = {"ETag": f'"{sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.command == "GET" and name == self.hub.broken:
            self.reply(500, b"gone")
        elif self.command == "GET" and not start and self.hub.cut_after and len(content) > self.hub.cut_after:
            self.reply(200, content, headers, only=self.hub.cut_after)
            self.close_connection = True
        else:
            self.reply(206 if start else 200, content[start:], headers)

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None, only: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:only])


def small_model(folder: Path, rows: int = 4) -> Path:
    """A two-shard model with a config: nothing in it is special but its size."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = {
        "model-00001-of-00002.safetensors": {"embed.weight": np.ones((rows, 1024), np.float32)},
        "model-00002-of-00002.safetensors": {
            "head.weight": np.ones((4, 8), np.float32),
            "norm": np.ones(8, np.float16),
        },
    }
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / hub.INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "small"}')
    return folder


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub nobody answers at."""
    for name in ("HF_HUB_OFFLINE", "VIVA_OFFLINE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # read from the environment on import
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def small_hub(no_hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    model = small_model(tmp_path / "published")
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    contents = SmallHub(files | {"modeling_small.py": b"raise SystemExit\n"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (HubHandler,), {"hub": contents}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield contents
    server.shutdown()
    server.server_close()
    thread.join()


def prepare_cache(cache: Path, repo: str, revision: str) -> Path:
    """A snapshot as an earlier fetch leaves it."""
    return small_model(cache / f"models--{repo.replace('/', '--')}" / "snapshots" / revision)


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_folder_is_used_as_it_is(tmp_path, monkeypatch):
    folder = small_model(tmp_path / "here")
    assert hub.resolve(str(folder)) == folder.resolve()
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("here") == hub.resolve("./here") == folder.resolve()


def test_a_bundled_model_is_a_folder_with_a_config(tmp_path):
    small_model(tmp_path / "tiny-voice")
    (tmp_path / "no-model").mkdir()
    assert hub.bundled(tmp_path) == {"tiny-voice": tmp_path / "tiny-voice"}


@pytest.mark.parametrize(
    ("name", "revision", "error", "says"),
    [
        ("no-such-mini", None, InputError, "no bundled name"),
        ("one/two/three", None, InputError, "no hub id"),
        ("someone/model@", None, InputError, "no hub id"),
        ("someone/model@v1", "v2", InputError, "contradict"),
        ("./not-there", None, CheckpointError, "no folder"),
    ],
)
def test_a_name_that_means_nothing_is_one_clear_line(no_hub, name, revision, error, says):
    with pytest.raises(error, match=says) as raised:
        hub.resolve(name, revision)
    assert "\n" not in str(raised.value)
    assert name in str(raised.value)


def test_a_file_or_a_revision_of_a_folder_is_refused(tmp_path):
    folder = small_model(tmp_path / "here")
    with pytest.raises(InputError, match="use its folder"):
        hub.resolve(str(folder / "config.json"))
    with pytest.raises(InputError, match="has no revisions"):
        hub.resolve(str(folder), revision="v1")


def test_modelscope_is_an_extra(no_hub):
    try:
        import modelscope  # noqa: F401
    except ImportError:
        with pytest.raises(MissingDependencyError, match=re.escape("pip install 'vivavoce[modelscope]'")):
            hub.resolve("ms:someone/model")
    else:
        with pytest.raises(CheckpointError, match="network is off"):
            hub.resolve("ms:someone/model", offline=True)


def test_known_models_are_found_by_mirror_and_prefix():
    moss = hub.known("fnlp/MOSS-Speech")
    assert moss is not None
    assert hub.known("hf:openmoss-team/moss-speech@main") is moss
    assert hub.known("fnlp/MOSS-Speech-Codec") is not moss
    assert hub.known("someone/else") is None
    assert all(re.fullmatch("[0-9a-f]{40}", model.revision) for model in hub.KNOWN if model.revision)


def test_no_known_model_leaves_out_what_it_must_have():
    assert len({model.name for model in hub.KNOWN}) == len(hub.KNOWN)
    for model in hub.KNOWN:
        assert not [file for file in model.files for pattern in model.unused if fnmatch(file, pattern)]
        assert model.codec is None or hub.known(model.codec) is not None


# --- fetching ---------------------------------------------------------------------------------------------------------


def test_a_model_is_fetched_once_and_then_needs_no_network(small_hub, monkeypatch):
    folder = hub.resolve(REPO)
    assert hub.check(folder).ok
    assert folder.name == COMMIT
    assert not (folder / "modeling_small.py").exists()

    asked = len(small_hub.downloads())
    assert hub.resolve(f"hf:{REPO}@{COMMIT}") == folder
    assert len(small_hub.downloads()) == asked

    monkeypatch.setenv("VIVA_OFFLINE", "1")
    small_hub.refuse = (500, "")
    assert hub.resolve(REPO) == folder


def test_a_revision_can_be_a_tag(small_hub):
    assert hub.resolve(f"{REPO}@v1").name == hub.resolve(REPO, revision="v1").name == COMMIT
    with pytest.raises(CheckpointError, match="no revision 'v9'"):
        hub.resolve(f"{REPO}@v9")


def test_a_dropped_connection_is_taken_up_where_it_broke(small_hub, tmp_path):
    small_hub.files[BIG] = (small_model(tmp_path / "larger", rows=6000) / BIG).read_bytes()
    small_hub.cut_after = 16 << 20
    folder = hub.resolve(REPO)
    first, second = [span for name, span in small_hub.downloads() if name == BIG]
    assert first is None
    assert int(second.removeprefix("bytes=").rstrip("-")) > 0
    assert (folder / BIG).read_bytes() == small_hub.files[BIG]


def test_a_fetch_that_failed_keeps_what_had_come(small_hub):
    small_hub.broken = BIG
    with pytest.raises(CheckpointError, match="run the same command again") as raised:
        hub.resolve(REPO)
    assert "\n" not in str(raised.value)

    small_hub.broken = None
    came = {name for name, _ in small_hub.downloads()} - {BIG}
    small_hub.asked.clear()
    assert hub.check(hub.resolve(REPO)).ok
    fetched = [name for name, _ in small_hub.downloads()]
    assert BIG in fetched
    assert len(came) >= 1
    assert not came & set(fetched)


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        ((404, "RepoNotFound"), "not on Hugging Face"),
        ((401, "RepoNotFound"), "not on Hugging Face"),
        ((403, "GatedRepo"), "is gated"),
    ],
)
def test_a_refusal_says_what_to_do(small_hub, refusal, says):
    small_hub.refuse = refusal
    with pytest.raises(CheckpointError, match=says) as raised:
        hub.resolve(REPO)
    assert REPO in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_network_is_one_clear_line(no_hub):
    with pytest.raises(CheckpointError, match="hub cannot be reached"):
        hub.resolve(REPO)


@pytest.mark.parametrize("switch", ["argument", "HF_HUB_OFFLINE", "VIVA_OFFLINE"])
def test_offline_uses_the_cache_and_says_when_it_is_not_there(no_hub, monkeypatch, switch):
    if switch != "argument":
        monkeypatch.setenv(switch, "1")
    offline = True if switch == "argument" else None
    with pytest.raises(CheckpointError, match=f"viva models fetch {REPO}"):
        hub.resolve(REPO, offline=offline)
    snapshot = prepare_cache(no_hub, REPO, COMMIT)
    assert hub.resolve(REPO, revision=COMMIT, offline=offline) == snapshot


def test_a_known_model_comes_pinned_and_from_its_mirror_if_need_be(no_hub):
    moss = hub.known("fnlp/MOSS-Speech")
    mirrored = prepare_cache(no_hub, moss.mirrors[0], moss.revision)
    assert hub.resolve(moss.name, offline=True) == mirrored
    own = prepare_cache(no_hub, moss.name, moss.revision)
    assert hub.resolve(moss.name, offline=True) == own


def test_what_nothing_reads_of_a_known_model_is_not_fetched(small_hub, monkeypatch):
    model = hub.KnownModel(REPO, "a model with ballast", 1000, ("config.json",), unused=("ballast/*", "*.bin"))
    small_hub.files |= {"ballast/large.onnx": b"large", "old.bin": b"old", "kept.txt": b"kept"}
    monkeypatch.setattr(hub, "KNOWN", (*hub.KNOWN, model))
    folder = hub.resolve(REPO)
    assert (folder / "kept.txt").is_file()
    assert not (folder / "ballast").exists() and not (folder / "old.bin").exists()
    assert hub.check(folder, model).ok


def test_a_known_model_that_cannot_fit_is_not_begun(no_hub, monkeypatch):
    free = os.statvfs(no_hub.parent).f_bavail * os.statvfs(no_hub.parent).f_frsize
    huge = hub.KnownModel("someone/huge", "larger than this disk", free * 2, ("config.json",), COMMIT)
    monkeypatch.setattr(hub, "KNOWN", (*hub.KNOWN, huge))
    with pytest.raises(CapacityError, match="HF_HUB_CACHE"):
        hub.resolve("someone/huge")


def test_local_models_lists_what_is_cached_and_what_it_lacks(no_hub):
    bundled = [(name, "bundled") for name in hub.bundled()]
    assert ("mini-speech", "bundled") in bundled
    assert [(found.name, found.source) for found in hub.local_models()] == bundled
    moss = hub.known("fnlp/MOSS-Speech")
    snapshot = prepare_cache(no_hub, moss.name, moss.revision)
    *_, found = hub.local_models()
    assert (found.name, found.path, found.revision) == (moss.name, snapshot, moss.revision)
    assert found.missing == ("tokenizer.json", "tokenizer_config.json")


def test_the_command_line_fetches_with_progress_on_stderr_and_json_on_stdout(small_hub):
    done = CliRunner().invoke(app, ["models", "fetch", REPO, "--json"])
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert said["ok"]
    assert Path(said["path"]).name == COMMIT
    assert "Fetching" in done.stderr


# --- checking ---------------------------------------------------------------------------------------------------------


def test_a_whole_model_checks_out(tmp_path):
    report = hub.check(small_model(tmp_path))
    assert report.ok
    assert {file.name: file.tensors for file in report.files}["model-00002-of-00002.safetensors"] == 2


def damage_truncate(folder: Path) -> str:
    shard = folder / "model-00001-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    return "model-00001-of-00002.safetensors was cut short"


def damage_cut_header(folder: Path) -> str:
    os.truncate(folder / "model-00002-of-00002.safetensors", 20)
    return "model-00002-of-00002.safetensors was cut short at 20 bytes"


def damage_header(folder: Path) -> str:
    shard = folder / "model-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[8] = ord("?")
    shard.write_bytes(content)
    return "model-00002-of-00002.safetensors has a damaged header"


def damage_append(folder: Path) -> str:
    with (folder / "model-00001-of-00002.safetensors").open("ab") as stream:
        stream.write(b"more")
    return "model-00001-of-00002.safetensors is too long"


def damage_remove(folder: Path) -> str:
    (folder / "model-00002-of-00002.safetensors").unlink()
    return "model-00002-of-00002.safetensors is missing"


def damage_swap(folder: Path) -> str:
    save_file({"other": np.ones(1, np.float32)}, folder / "model-00002-of-00002.safetensors")
    return "model-00002-of-00002.safetensors lacks 2 tensors that the index places in it, the first is head.weight"


def damage_config(folder: Path) -> str:
    (folder / "config.json").write_text('{"model_type": ')
    return "config.json is not JSON"


def damage_no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json is missing"


def damage_index(folder: Path) -> str:
    (folder / hub.INDEX_NAME).write_text("{}")
    return f"{hub.INDEX_NAME} has no weight_map"


def damage_pointer(folder: Path) -> str:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (folder / "model-00001-of-00002.safetensors").write_text(pointer)
    return "model-00001-of-00002.safetensors is a Git LFS pointer"


def damage_torch_file(folder: Path) -> str:
    (folder / "flow").mkdir()
    torch.save({"weight": torch.ones(2000)}, folder / "flow" / "flow.pt")
    assert hub.check(folder).ok
    os.truncate(folder / "flow" / "flow.pt", 4000)
    return "flow/flow.pt was cut short at 4000 bytes"


@pytest.mark.parametrize("damage", [value for name, value in globals().items() if name.startswith("damage_")])
def test_damage_is_named(tmp_path, damage):
    expected = damage(small_model(tmp_path))
    problems = hub.check(tmp_path).problems
    assert any(problem.startswith(expected) for problem in problems), problems


def test_a_known_model_must_have_its_files(tmp_path):
    problems = hub.check(small_model(tmp_path), hub.known("fnlp/MOSS-Speech")).problems
    assert problems == ("tokenizer.json is missing", "tokenizer_config.json is missing")
