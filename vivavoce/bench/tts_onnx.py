"""ONNX Runtime in `viva bench tts`: random weights exported once into a folder, then said from there."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce.bench.progress import stage
from vivavoce.export.nano_onnx import lm_graphs
from vivavoce.export.nano_onnx_codec import codec_graphs
from vivavoce.export.nano_onnx_folder import CODEC_META, MANIFEST
from vivavoce.export.onnx_graph import export_graph
from vivavoce.models.moss_audio_tokenizer_nano import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano import MossTTSNano
from vivavoce.models.moss_tts_nano_prompt import NanoTokenizerProtocol
from vivavoce.speech.interface import SpeakingStyle
from vivavoce.speech.onnx_backend import OnnxTTS
from vivavoce.speech.settings import SpeechSettings

NEEDED = ("moss_tts_prefill", "moss_tts_decode_step", "moss_tts_local_fixed_sampled_frame")
NEEDED_OF_CODEC = ("moss_audio_tokenizer_decode_step",)


class OnnxSpeaks:
    """`OnnxTTS` on random weights, with as many threads as torch has."""

    name = "onnx"

    def __init__(
        self,
        folder: Path,
        model: MossTTSNano,
        codec: MossAudioTokenizerNano,
        tokenizer: NanoTokenizerProtocol,
        settings: SpeechSettings,
        said: tuple[str, str],
    ) -> None:
        _export(folder, model, codec)
        threads = torch.get_num_threads()
        self._speaker = OnnxTTS(folder, folder, threads=threads, tokenizer=tokenizer, settings=settings)
        self._said, self.rate = said, self._speaker.rate

    def stream(self, seed: int) -> Iterator[NDArray[np.float32]]:
        """The sound of the text."""
        return self._speaker.stream(*self._said, SpeakingStyle(seed=seed))

    def stages(self) -> dict[str, Callable[[], object]]:
        """Its parts are the runtime's own."""
        return {}


def _export(folder: Path, model: MossTTSNano, codec: MossAudioTokenizerNano) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    graphs = chain(lm_graphs(model), codec_graphs(codec))
    for graph in graphs:
        if graph.name in NEEDED + NEEDED_OF_CODEC and not (folder / f"{graph.name}.onnx").is_file():
            with stage(f"exporting {graph.name}"):
                export_graph(graph, folder, check=False)
    sizes = codec.config
    meta = {"sample_rate": sizes.sample_rate, "channels": sizes.channels, "frame_samples": sizes.frame_samples}
    (folder / MANIFEST).write_text(json.dumps({"tts_config": asdict(model.config)}), encoding="utf8")
    (folder / CODEC_META).write_text(json.dumps(meta), encoding="utf8")
