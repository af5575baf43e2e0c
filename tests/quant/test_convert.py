"""Every method on every kind of model: written, read in a fresh process, run; and what must be refused."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.quant.checkpoints import KINDS, write
from vivavoce import hub
from vivavoce.asr import transcribe
from vivavoce.errors import CapacityError, CheckpointError, InputError
from vivavoce.models.checkpoint import Checkpoint, save_weights
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.quantised import MIN_MATRIX_SIZE, QUANTISED, pack_file
from vivavoce.models.whisper.model import Whisper
from vivavoce.nn.linear import Linear
from vivavoce.nn.quantised_weight import quantise
from vivavoce.quant.calibration import calibrate
from vivavoce.quant.convert import Findings, quantise_folder, units
from vivavoce.quant.manifest import Manifest, verify
from vivavoce.quant.policy import METHODS, QuantMethod, method_of, policy_for
from vivavoce.quant.qat import NOT_TRAINED, FineTuning, fine_tune
from vivavoce.quant.speech_sets import project_set
from vivavoce.quant.subjects import SUBJECTS, CalibrationBatch

# Loads each folder, runs the same example through it, and prints how far it is from the float model.
RUN = """
import json, sys
from pathlib import Path
import torch
from vivavoce.quant.subjects import SUBJECTS, CalibrationBatch
torch.set_num_threads(1)
errors = {}
for kind, (source, folders) in json.loads(sys.argv[1]).items():
    subject = SUBJECTS[kind]
    with torch.no_grad():
        example = CalibrationBatch(**torch.load(Path(folders[0]).with_name("example.pt")))
        exact = subject.logits(subject.load(Path(source)), example)
        logits_of = {Path(folder).name: subject.logits(subject.load(Path(folder)), example) for folder in folders}
    errors[kind] = {name: float((logits - exact).norm() / exact.norm()) for name, logits in logits_of.items()}
print(json.dumps(errors))
"""
LAYERS_ADD_UP = 3.0  # a model's error against one layer's, for the depths met here


def findings_for(method: QuantMethod, kind: str, source: Path, example: CalibrationBatch) -> Findings | None:
    """What a method needs of a model: its ranges, or its weights after one training step."""
    if method.trains:
        tuned = fine_tune(kind, source, policy_for(source).parts[0], [example], [example], FineTuning(steps=1))
        return Findings(tuned=tuned.weights, training=tuned.training)
    return Findings(ranges=calibrate(SUBJECTS[kind], source, [example])) if method.calibrates else None


def quantised_by_every_method(kind: str, folder: Path) -> tuple[str, list[str]]:
    """A model of a kind, and its quantised folders by every supported method, all under `folder`."""
    source, subject = write(kind, folder / "source"), SUBJECTS[kind]
    policy, example = policy_for(source), subject.examples(source, project_set().items[:1])[0]
    folder.mkdir(exist_ok=True)
    torch.save(vars(example), folder / "example.pt")
    supported_schemes = [method for method in METHODS.values() if not (method.trains and kind in NOT_TRAINED)]
    for method in supported_schemes:
        quantise_folder(source, folder / method.name, method, policy, findings_for(method, kind, source, example))
    return str(source), [str(folder / method.name) for method in supported_schemes]


@pytest.fixture(scope="module")
def errors_elsewhere(tmp_path_factory) -> dict[str, dict[str, float]]:
    """Relative error of every method on every kind of model, measured in another process."""
    root = tmp_path_factory.mktemp("every")
    made = {kind: quantised_by_every_method(kind, root / kind) for kind in KINDS}
    done = subprocess.run([sys.executable, "-c", RUN, json.dumps(made)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_is_written_read_elsewhere_and_runs_within_its_error(kind, errors_elsewhere):
    supported_schemes = {method.name for method in METHODS.values() if not (method.trains and kind in NOT_TRAINED)}
    assert set(errors_elsewhere[kind]) == supported_schemes
    for name, error in errors_elsewhere[kind].items():
        assert error < LAYERS_ADD_UP * METHODS[name].error, (name, error)


@pytest.mark.parametrize(
    ("bits", "method", "is_exact"),
    [
        (5, "int8-weight", True),
        (6, "int8-dynamic", True),
        (8, "int8-weight", True),
        (5, "fp8", True),
        (6, "fp8", False),
    ],
)
def test_a_matrix_stored_in_few_bits_is_not_rounded_again(bits, method, is_exact, tmp_path):
    whole, source, out = write("whisper", tmp_path / "whole"), tmp_path / "source", tmp_path / "out"
    shutil.copytree(whole, source)
    pack_file(whole / "model.safetensors", source / "model.safetensors", low_bits={"weight$": bits})
    quantise_folder(source, out, METHODS[method], policy_for(source))
    with Checkpoint(source) as shipped, Checkpoint(out) as made:
        packed = [name for name in made.quantised if shipped.tensor(name).numel() >= MIN_MATRIX_SIZE]
        assert {torch.equal(made.tensor(name), shipped.tensor(name)) for name in packed} == {is_exact}


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_policy_does_not_name_is_the_same_bit_for_bit(kind, tmp_path):
    source, out = write(kind, tmp_path / "source"), tmp_path / "out"
    policy = policy_for(source)
    manifest = quantise_folder(source, out, METHODS["int4-weight"], policy)
    rounded = 0
    for unit in units(source, policy):
        target = out if unit.target == "." else out / unit.target
        with Checkpoint(unit.source) as before, Checkpoint(target) as after:
            for name in before.names():
                if name in unit.part.unused:
                    assert name not in after
                elif unit.part.scheme_of(name, before.shapes[name], "int4") is None:
                    assert torch.equal(before.tensor(name), after.tensor(name)), name
                    assert name not in after.quantised
                else:
                    rounded += 1
                    assert name in after.quantised
    assert rounded == sum(manifest.tensors.values()) > 0
    never = [name for name in Checkpoint(out if kind != "cosyvoice" else out / "llm.pt").quantised if "norm" in name]
    assert not never


def test_untouched_files_hold_the_very_bytes_of_their_source(tmp_path):
    source = write("moss_speech", tmp_path)
    quantise_folder(source, tmp_path / "out", METHODS["int8-dynamic"], policy_for(source))
    for name in ("codec/flow/hift.safetensors", "codec/model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_pickled_weights_become_safetensors_that_load_by_the_old_name(tmp_path):
    source, out = write("cosyvoice", tmp_path / "source"), tmp_path / "out"
    quantise_folder(source, out, METHODS["int8-weight"], policy_for(source))
    assert not list(out.rglob("*.pt"))
    before, after = torch.load(source / "hift.pt"), Checkpoint(out / "hift.pt")
    assert torch.equal(before["conv_post.weight"], after.tensor("conv_post.weight"))


def test_shards_hold_what_one_file_does(tmp_path):
    source = write("moss_speech", tmp_path)
    policy, method = policy_for(source), METHODS["int4-weight"]
    quantise_folder(source, tmp_path / "one", method, policy)
    manifest = quantise_folder(source, tmp_path / "many", method, policy, shard_bytes=1_000_000)
    assert sum(name.startswith("model-") for name in manifest.files) > 5
    one, many = Checkpoint(tmp_path / "one"), Checkpoint(tmp_path / "many")
    assert sorted(one.names()) == sorted(many.names())
    assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one.names())
    (tmp_path / "many" / sorted(manifest.files)[-1]).unlink()
    with pytest.raises(CheckpointError, match="lacks"):
        verify(tmp_path / "many")


# Quantises a folder and prints the most memory of its own that this took beyond what stood there before, in bytes.
MEASURED = """
import sys
from pathlib import Path
from vivavoce.quant.convert import quantise_folder
from vivavoce.quant.policy import METHODS
from vivavoce.quant.policy import policy_for
source, out = map(Path, sys.argv[1:])
policy = policy_for(source)
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024
before, seen = anonymous(), []
look = lambda name: seen.append(anonymous() - before)
quantise_folder(source, out, METHODS["int8-weight"], policy, shard_bytes=8_000_000, progress=look)
print(max(seen))
"""
# Freed memory is returned to the system immediately, so that the measured size is what is held.
RETURNS_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def test_the_source_is_never_held_whole(tmp_path):
    """Sixty matrices of 4 MB pass through the memory of a few, and sixty of 1 MB are not kept either until the end."""
    source, matrix = tmp_path / "source", torch.randn(1024, 1024)
    source.mkdir()
    save_file(
        {f"model.layers.{n}.mlp.down_proj.weight": matrix.clone() for n in range(60)}, source / "model.safetensors"
    )
    (source / "config.json").write_text('{"model_type": "moss_speech"}')
    run = [sys.executable, "-c", MEASURED, str(source), str(tmp_path / "out")]
    environment = os.environ | RETURNS_MEMORY | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < (source / "model.safetensors").stat().st_size / 8


def test_the_manifest_records_the_method_and_detects_a_changed_file(tmp_path):
    source, out = write("whisper", tmp_path / "source"), tmp_path / "out"
    quantise_folder(source, out, METHODS["int8-weight"], policy_for(source))
    manifest = verify(out)
    assert (manifest.method, manifest.kind) == ("int8-weight", "whisper")
    assert set(manifest.source) == {"model.safetensors"} and manifest.tensors["int8"] == 32
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match="SHA-256"):
        verify(out)


def test_a_newer_format_is_refused_by_name(tmp_path):
    source, out = write("whisper", tmp_path / "source"), tmp_path / "out"
    quantise_folder(source, out, METHODS["int8-weight"], policy_for(source))
    file = out / "model.safetensors"
    with safe_open(file, "pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        said = json.loads(handle.metadata()[QUANTISED]) | {"version": 9}
    save_file(tensors, file, metadata={QUANTISED: json.dumps(said)})
    with pytest.raises(CheckpointError, match="format 9"):
        Checkpoint(out)


def test_overrides_keep_add_and_widen(tmp_path):
    source, out = write("whisper", tmp_path / "source"), tmp_path / "out"
    policy = policy_for(source).overridden(keep=[r"fc1"], eight_bits=[r"encoder.*fc2"], also=[r"embed_tokens\.weight$"])
    quantise_folder(source, out, METHODS["int4-weight"], policy)
    kept = Checkpoint(out).quantised
    schemes = {name: read().scheme for name, read in kept.items()}
    assert not any("fc1" in name for name in schemes)
    assert schemes["model.encoder.layers.0.fc2.weight"] == "int8"
    assert schemes["model.encoder.layers.0.self_attn.q_proj.weight"] == "int4"
    assert "model.decoder.embed_tokens.weight" in schemes
    with pytest.raises(InputError, match="not a regular expression"):
        policy.overridden(keep=["("])


def test_what_is_refused_says_why(tmp_path):
    source, out = write("whisper", tmp_path / "source"), tmp_path / "out"
    quantise_folder(source, out, METHODS["fp16"], policy_for(source))
    with pytest.raises(InputError, match="already quantised"):
        quantise_folder(out, tmp_path / "again", METHODS["fp16"], policy_for(out))
    (out / "quantisation.json").unlink()
    with pytest.raises(InputError, match="already holds quantised matrices"):
        quantise_folder(out, tmp_path / "again", METHODS["fp16"], policy_for(out))
    with pytest.raises(InputError, match="exists"):
        quantise_folder(source, out, METHODS["fp16"], policy_for(source))
    with pytest.raises(InputError, match="inside its source"):
        quantise_folder(source, source / "out", METHODS["fp16"], policy_for(source))
    with pytest.raises(InputError, match="scaled_dot_product_attention"):
        method_of("sdpa")
    with pytest.raises(InputError, match="no method 'int2'"):
        method_of("int2")
    with pytest.raises(InputError, match="stays in float"):
        policy_for(write("moss_speech", tmp_path) / "codec")
    with pytest.raises(InputError, match="its type is unknown"):
        policy_for(tmp_path)


def test_a_missing_shard_and_a_matrix_that_does_not_fit_are_named(tmp_path):
    model = MossSpeech.load(write("moss_speech", tmp_path))
    save_weights(model, tmp_path / "sharded", shard_bytes=20_000_000)
    model.config.write(tmp_path / "sharded")
    policy = policy_for(tmp_path / "sharded")
    sorted((tmp_path / "sharded").glob("model-*"))[0].unlink()
    with pytest.raises(CheckpointError, match="lacks model-00001"):
        quantise_folder(tmp_path / "sharded", tmp_path / "out", METHODS["fp16"], policy)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="more than float16"):
        quantise(torch.full((2, 2), 1e6), "float16")
    with pytest.raises(InputError, match="NaN"):
        quantise(torch.full((2, 2), torch.nan), "int8")


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    """A file may not grow past 3 MB here, which is what a full disk does to the third of them."""
    source = write("moss_speech", tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, before[1]))
    try:
        with pytest.raises(CapacityError, match="not enough disk space"):
            quantise_folder(source, tmp_path / "out", METHODS["int8-weight"], policy_for(source))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_linear_layers_of_a_quantised_model_never_have_float_memory(tmp_path):
    source, out = write("moss_speech", tmp_path), tmp_path / "out"
    quantise_folder(source, out, METHODS["int8-weight"], policy_for(source))
    with Checkpoint(out):
        assert Linear(8, 8).weight.is_meta
    assert not Linear(8, 8).weight.is_meta
    model = MossSpeech.load(out)
    assert not any(parameter.is_meta for parameter in model.parameters())
    held = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert held < 0.6 * sum(p.nbytes for p in MossSpeech.load(source).parameters())


def test_a_device_without_a_kernel_says_so_and_computes_right(tmp_path):
    source, out = write("whisper", tmp_path / "source"), tmp_path / "out"
    quantise_folder(source, out, METHODS["fp8"], policy_for(source))
    with pytest.warns(UserWarning, match="no kernel on cpu"):
        model = Whisper.load(out)
    with Checkpoint(out) as kept:
        name = "encoder.layers.0.fc1.weight"
        assert torch.equal(model.get_parameter(name), kept.tensor(f"model.{name}"))


def test_a_quantised_recogniser_is_used_like_any_other(tmp_path):
    source, out = hub.resolve("mini-asr"), tmp_path / "out"
    quantise_folder(source, out, METHODS["int8-dynamic"], policy_for(source))
    sound = project_set().items[26].sound
    assert transcribe(sound, out, gate=False).text == transcribe(sound, source, gate=False).text


def test_overwriting_replaces_the_whole_folder(tmp_path):
    source, out = write("whisper", tmp_path / "source"), tmp_path / "out"
    quantise_folder(source, out, METHODS["fp16"], policy_for(source))
    (out / "stray.txt").write_text("old")
    quantise_folder(source, out, METHODS["int8-weight"], policy_for(source), overwrite=True)
    assert Manifest.read(out).method == "int8-weight" and not (out / "stray.txt").exists()
    shutil.rmtree(out)


def test_paths_are_not_needed_beyond_the_folder(tmp_path):
    """A quantised folder can be moved, and says nothing of where it was made."""
    source, out = write("whisper", tmp_path / "source"), tmp_path / "out"
    quantise_folder(source, out, METHODS["int8-weight"], policy_for(source))
    moved = Path(shutil.move(out, tmp_path / "moved"))
    verify(moved)
    assert str(tmp_path) not in (moved / "quantisation.json").read_text(encoding="utf8")
