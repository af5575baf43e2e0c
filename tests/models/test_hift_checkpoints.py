"""Both vocoders' published files: names, shapes and spellings; and the mels that neither takes."""

import math
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from tests.models import hift_cases
from tests.models.hift_cases import BAD_MELS, WAYS_TO_SPELL, mels, quietened, spelled
from tests.models.named_checkpoint import NamedCheckpoint
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import fold_weight_norm, published_tensors
from vivavoce.models.hift.causal import CausalHiFT, CausalHiFTConfig
from vivavoce.models.hift.model import HiFT, HiFTConfig
from vivavoce.models.hift.stream import HiFTStream


class Kind(NamedTuple):
    keys: str
    parameters: int
    vocoder: type = HiFT
    config: type = HiFTConfig

    @property
    def narrow(self):
        return self.config(**hift_cases.SMALL)


KINDS = {
    "moss-speech": Kind("moss_speech_hift.tsv", 20_821_295),
    "cosyvoice2": Kind("cosyvoice2_hift.tsv", 20_821_295),
    "cosyvoice3": Kind("cosyvoice3_hift.tsv", 20_779_887, CausalHiFT, CausalHiFTConfig),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def vocoder(kind):
    with torch.no_grad():
        return quietened(kind.vocoder(kind.narrow).eval()).requires_grad_(False)


def test_names_shapes_and_count_are_the_published_ones(kind):
    published = NamedCheckpoint(kind.keys, 1, lambda *_: torch.zeros(0))
    assert len(published.shapes) == 328
    assert sum(math.prod(shape) for shape in published.shapes.values()) == kind.parameters
    with torch.device("meta"):
        ours = {name: tuple(tensor.shape) for name, tensor in published_tensors(kind.vocoder()).items()}
    assert ours == fold_weight_norm(published).shapes


@pytest.mark.parametrize(("magnitude", "direction", "prefix"), WAYS_TO_SPELL.values(), ids=WAYS_TO_SPELL)
def test_every_naming_of_the_checkpoint_loads(kind, vocoder, magnitude, direction, prefix, tmp_path):
    torch.save(spelled(vocoder, kind.keys, magnitude, direction, prefix), tmp_path / "hift.pt")
    loaded = kind.vocoder.load(tmp_path / "hift.pt", config=kind.narrow)
    assert loaded.conv_pre.weight.dtype == torch.float32
    assert loaded.f0_predictor.classifier.weight.dtype == vocoder.f0_predictor.classifier.weight.dtype
    mel = mels(6, dtype=torch.float32)
    torch.testing.assert_close(loaded(mel), vocoder(mel), rtol=1e-3, atol=1e-4)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(kind, vocoder, tmp_path):
    tensors = {name: t for name, t in published_tensors(vocoder).items() if name != "conv_post.bias"}
    save_file(tensors, tmp_path / "hift.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: conv_post\.bias"):
        kind.vocoder.load(tmp_path / "hift.safetensors", config=kind.narrow)


@pytest.mark.parametrize(("mel", "says"), BAD_MELS.values(), ids=BAD_MELS)
def test_bad_mels_are_refused(vocoder, mel, says):
    with pytest.raises(InputError, match=says):
        vocoder(mel)
    stream = HiFTStream(vocoder) if isinstance(vocoder, HiFT) else vocoder
    with pytest.raises(InputError, match=says):
        stream.step(stream.initial_state(), mel)
