"""Exported graphs with a state equal the model on every call of a stream, not only on the first."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.export.operators import operators_listed_once  # noqa: F401 - a fixture
from tests.export.test_onnx import WHISPER
from tests.models.tiny import CONFIG
from tests.models.tiny_nano import tiny_nano
from vivavoce.errors import VivaError
from vivavoce.export.nano_onnx import lm_graphs as nano_lm_graphs
from vivavoce.export.nano_onnx_codec import codec_graphs, empty_state
from vivavoce.export.onnx import lm_graphs, whisper_graphs
from vivavoce.export.onnx_graph import OnnxExport, StreamCheck, difference, export_graph, open_session
from vivavoce.models.moss_audio_tokenizer.config import MossAudioTokenizerConfig, QuantizerConfig, StageConfig
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.whisper.model import Whisper
from vivavoce.nn.modules import fill_randomly

STEP = "moss_audio_tokenizer_decode_step"
CODEBOOKS = 2
PIECES = (2, 1, 1, 3, 1, 4, 1)  # frames; in total more than either stage's window


def stage(inputs: int, outputs: int, layers: int, seconds: float) -> StageConfig:
    return StageConfig(inputs, outputs, layers, seconds, d_model=8, num_heads=2, dim_feedforward=16)


# Patches and stages alternate as in the published codec. Tracing time grows with stages, layers and codebooks, so there
# are two of each: stages of different rates and windows, the first of two layers. 1000 Hz stereo, frames of 40 samples.
CODEC = MossAudioTokenizerConfig(
    sample_rate=1000,
    channels=2,
    encoder=(20, stage(20, 12, 1, 0.12), 2, stage(24, 10, 2, 0.2), 2),
    decoder=(2, stage(10, 24, 2, 0.2), 2, stage(12, 20, 1, 0.12), 20),
    quantizer=QuantizerConfig(20, 12, 20, num_quantizers=CODEBOOKS, codebook_size=32, codebook_dim=4),
)


@pytest.fixture(scope="module")
def codec() -> MossAudioTokenizerNano:
    model = MossAudioTokenizerNano(CODEC).eval()
    fill_randomly(model, 0)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "codebook" in name or "scale" in name:
                parameter.normal_()
    return model


def test_a_streamed_codec_is_the_codec_on_every_step(codec: MossAudioTokenizerNano, tmp_path: Path) -> None:
    graph = next(graph for graph in codec_graphs(codec) if graph.name == STEP)
    exported = export_graph(graph, tmp_path)
    assert exported.difference is not None
    assert exported.difference < 1e-4
    codes = torch.randint(0, 32, (sum(PIECES), CODEBOOKS), generator=torch.Generator().manual_seed(2))
    session = open_session(exported.file)
    state = {name: tensor.numpy() for name, tensor in empty_state(codec).items()}
    sounds = []
    for piece in codes.int().split(PIECES):
        given = {"audio_codes": piece[None].numpy(), "audio_code_lengths": np.array([len(piece)], np.int32)}
        sound, _, *after = session.run(None, given | state)
        state = dict(zip(state, after, strict=True))
        sounds.append(sound)
    wanted = codec.decode(codes.T[None])
    assert difference(wanted, np.concatenate(sounds, axis=-1).reshape(wanted.shape)) < 1e-4


class TwoCounters(nn.Module):
    """Two positions that begin at zero and advance differently."""

    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        return x + first - second, first + 1, second + 2


def counters(first: Tensor, second: Tensor) -> OnnxExport:
    x = torch.ones(3)
    stream = StreamCheck(
        {"x": x, "first": first, "second": second}, ({"x": x}, {"x": x}), {"first": "a", "second": "b"}
    )
    return OnnxExport("counters", TwoCounters(), stream.first, {"x": {0: "row"}}, ("y", "a", "b"), stream=stream)


def test_one_tensor_given_for_two_inputs_stays_two_inputs(tmp_path: Path) -> None:
    zero = torch.zeros(1)
    assert export_graph(counters(zero, zero), tmp_path).difference == 0


class WrongLater(nn.Module):
    """The exported graph ignores its state, which does not show while that is zero."""

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return (x + 0 * state if torch.compiler.is_exporting() else x + state), state + 1


def test_a_graph_that_differs_from_the_second_call_on_is_refused(tmp_path: Path) -> None:
    x, zero = torch.ones(3), torch.zeros(1)
    given = {"x": x, "state": zero}
    graph = OnnxExport("later", WrongLater(), given, {"x": {0: "row"}}, ("y", "after"), check_twice(given))
    assert export_graph(graph, tmp_path).difference == 0
    streamed = replace(graph, stream=StreamCheck(given, ({"x": x}, {"x": x}), {"state": "after"}))
    with pytest.raises(VivaError, match="later: ONNX differs from torch"):
        export_graph(streamed, tmp_path)


def check_twice(given: dict[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
    return ({"x": torch.ones(5), "state": given["state"]},)


def test_every_graph_with_a_state_is_compared_on_a_stream(codec: MossAudioTokenizerNano) -> None:
    lm, whisper = MossSpeech.random(CONFIG, dtype=torch.float32), Whisper.random(WHISPER)
    graphs = [*nano_lm_graphs(tiny_nano(dtype=torch.float32)), *codec_graphs(codec), *whisper_graphs(whisper)]
    graphs += lm_graphs(lm, ("text_logits", "audio_logits"))
    stateful = {"moss_tts_decode_step", "moss_tts_local_cached_step", STEP, "lm", "decoder"}
    assert {graph.name for graph in graphs if graph.stream is not None} == stateful
    for graph in graphs:
        assert graph.stream is None or len(graph.stream.following) >= 3
        tensors = list(graph.example.values())
        assert len({id(tensor) for tensor in tensors}) == len(tensors)
