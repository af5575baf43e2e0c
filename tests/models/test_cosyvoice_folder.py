"""CosyVoice's folders load as they are published, both versions, and say what is wrong with those that do not."""

import re
import shutil

import pytest
import torch

from tests.golden import weights
from tests.models.named_checkpoint import GOLDEN
from tests.models.tiny_cosyvoice import sizes, write_folder
from vivavoce.errors import CheckpointError
from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.cosyvoice.folder import CosyVoiceSizes, load_cosyvoice, version_of


@pytest.fixture(scope="module", params=[2, 3])
def folder(request, tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp(f"cosyvoice{request.param}"), request.param)


def without_numbers(names):
    """Names of layers, whichever of their kind they are."""
    return {re.sub(r"\d+", "N", name) for name in names}


@pytest.mark.parametrize("part", ["llm", "flow", "hift"])
def test_the_small_files_have_the_published_names(folder, part):
    published = weights.shapes(GOLDEN / "keys" / f"cosyvoice{version_of(folder)}_{part}.tsv")
    ours = torch.load(folder / f"{part}.pt", weights_only=True)
    assert without_numbers(ours) == without_numbers(published)


def test_a_folder_loads_whole(folder):
    parts, version = load_cosyvoice(folder), version_of(folder)
    assert parts.version == version
    saved = torch.load(folder / "llm.pt", weights_only=True)
    for name, tensor in published_tensors(parts.lm).items():
        assert torch.equal(tensor, saved[name])
    saved = torch.load(folder / "flow.pt", weights_only=True)
    assert torch.equal(parts.speech.flow.input_embedding.weight, saved["input_embedding.weight"])
    assert parts.tokenizer.id_of("<|endofprompt|>") == parts.lm.config.end_of_prompt
    assert CosyVoiceSizes.of_folder(folder, version) == sizes(version)


def test_the_time_conditions_are_a_table_once_loaded(folder):
    estimator = load_cosyvoice(folder).speech.flow.decoder.estimator
    if version_of(folder) == 3:
        assert estimator.table.shape == (2, 6 + 2, 32)


def test_the_reinforced_language_model_is_another_file(folder, tmp_path):
    if version_of(folder) == 2:
        with pytest.raises(CheckpointError, match=r"lacks llm\.rl\.pt"):
            load_cosyvoice(folder, reinforced=True)
        return
    plain, reinforced = load_cosyvoice(folder).lm, load_cosyvoice(folder, reinforced=True).lm
    assert not torch.equal(plain.llm_decoder.weight, reinforced.llm_decoder.weight)
    without = shutil.copytree(folder, tmp_path / "without")
    (without / "llm.pt").unlink()
    assert torch.equal(load_cosyvoice(without).lm.llm_decoder.weight, reinforced.llm_decoder.weight)


def test_without_sizes_a_folder_is_of_the_published_ones(tmp_path):
    for version in (2, 3):
        assert CosyVoiceSizes.of_folder(tmp_path, version) == CosyVoiceSizes.published(version)


def test_a_broken_folder_is_refused_with_the_reason(tmp_path):
    folder = write_folder(tmp_path / "model", 3)
    with pytest.raises(CheckpointError, match=r"not a CosyVoice 2 or 3"):
        load_cosyvoice(tmp_path)
    (folder / "sizes.json").write_text('{"lm": {}}')
    with pytest.raises(CheckpointError, match="does not have the sizes"):
        load_cosyvoice(folder)
    sizes(3).write(folder)
    (folder / "campplus.onnx").write_bytes(b"\x00" * 30)
    with pytest.raises(CheckpointError, match=r"campplus\.onnx cannot be read as ONNX"):
        load_cosyvoice(folder)
    (folder / "hift.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks hift\.pt"):
        load_cosyvoice(folder)
