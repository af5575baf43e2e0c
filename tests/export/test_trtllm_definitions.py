"""Our definitions of MOSS-Speech for TensorRT-LLM take exactly the exported tensors and compute what the model does."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.export.trtllm_models import MOSS, hidden_states, moss_speech
from tests.export.trtllm_modules import CacheParams, engine_modules, install, namespace, torch_modules
from vivavoce.export.trtllm.export import export_trtllm, whole_batch
from vivavoce.export.trtllm.moss_speech import joint_id
from vivavoce.export.trtllm.options import TrtLlmOptions
from vivavoce.models.checkpoint import Checkpoint, load_weights
from vivavoce.models.moss_speech.model import MossSpeech


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[MossSpeech, Path]:
    folder = tmp_path_factory.mktemp("moss")
    return moss_speech(folder), folder


def rows() -> tuple[Tensor, Tensor]:
    """Rows of text and speech, and their joint ids."""
    torch.manual_seed(1)
    made = torch.stack([torch.randint(0, 300, (12,)), torch.randint(0, 64, (12,))], dim=1)
    made[4:9, 0] = MOSS.modality_pad_token_id
    return made, torch.tensor([joint_id(MOSS, tuple(row)) for row in made.tolist()])


@pytest.mark.parametrize("part", ["whole", "trunk"])
def test_the_engine_network(
    model: tuple[MossSpeech, Path], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, folder = model
    export_trtllm(folder, tmp_path / "out", TrtLlmOptions(), part)
    install(monkeypatch, engine_modules())
    shown: dict[str, Tensor] = {}
    monkeypatch.setattr(Tensor, "mark_output", lambda x, name, dtype: shown.update({name: x}), raising=False)
    defined = runpy.run_path(str(tmp_path / "out" / "moss_speech_network.py"))
    config = namespace(json.loads((tmp_path / "out" / "config.json").read_text()))
    name = {"whole": "MossSpeechForCausalLM", "trunk": "MossSpeechTrunk"}[part]
    assert f"--model_cls_name {name}" in (tmp_path / "out" / "build_engine.sh").read_text()
    network = defined[name](config)
    tensors = load_file(tmp_path / "out" / "rank0.safetensors")
    assert {key: value.shape for key, value in network.named_parameters()} == {k: v.shape for k, v in tensors.items()}
    network.load_state_dict({key: value.float() for key, value in tensors.items()})
    given, ids = rows()
    cache = CacheParams()
    cache.fill_none_tensor_list(config.num_hidden_layers)
    with torch.no_grad():
        logits = network(ids, kv_cache_params=cache, attention_params="filled")
    if part == "whole":
        wanted = torch.cat(ours.logits(hidden_states(ours, given)), dim=-1)
        torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-4)
        assert defined["MODEL_MAP"][config.architecture].__name__ == name
    else:
        caught: list[Tensor] = []
        hook = ours.model.shared_block.register_forward_hook(lambda *passed: caught.append(sum(passed[2])))
        hidden_states(ours, given)
        hook.remove()
        torch.testing.assert_close(shown["trunk_states"], caught[0], rtol=0, atol=2e-4)


def test_the_pytorch_backends_model(
    model: tuple[MossSpeech, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, folder = model
    manifest = export_trtllm(folder, tmp_path / "out", TrtLlmOptions(version="1.3.0rc21", tp=8))
    assert manifest["backend"] == "pytorch" and "build_engine.sh" not in manifest["files"]
    registered: dict[str, type] = {}
    install(monkeypatch, torch_modules(registered))
    runpy.run_path(str(tmp_path / "out" / "moss_speech_pytorch.py"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 4 and config["vocab_size"] == 392
    theirs = registered[config["architectures"][0]](SimpleNamespace(pretrained_config=namespace(config), mapping=None))
    with Checkpoint(tmp_path / "out") as published:
        load_weights(theirs, published)  # names and shapes are the published ones, all of them and no more
    given, ids = rows()
    batch = whole_batch(ours, len(ids))
    with torch.no_grad():
        logits = theirs(batch, ids, batch.positions)
    torch.testing.assert_close(logits, torch.cat(ours.logits(hidden_states(ours, given)), dim=-1), rtol=0, atol=2e-4)
