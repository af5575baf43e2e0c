"""A model on disk that every test of speaking can load."""

from pathlib import Path

import pytest
import torch

from vivavoce.models.checkpoint import save_weights
from vivavoce.models.moss_audio_tokenizer_nano import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano import MossTTSNano
from vivavoce.models.moss_tts_nano_config import NanoSampling
from vivavoce.speech.settings import SpeechSettings
from vivavoce.train.speaker.codec_forward import initialise as initialise_codec
from vivavoce.train.speaker.lm_forward import initialise
from vivavoce.train.speaker.sizes import TINY_CODEC, TINY_LM
from vivavoce.train.speaker.tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A model with its codec and settings, as `mini-tts` is; its weights are random."""
    root = tmp_path_factory.mktemp("mini")
    model, codec = MossTTSNano(TINY_LM), MossAudioTokenizerNano(TINY_CODEC)
    torch.manual_seed(0)
    initialise(model)
    initialise_codec(codec)
    (root / "codec").mkdir()
    save_weights(model, root)
    save_weights(codec, root / "codec")
    TINY_LM.write(root)
    TINY_CODEC.write(root / "codec")
    write_tokenizer(root, TINY_LM.vocab_size)
    SpeechSettings(NanoSampling(max_new_frames=9), 60, spells_numbers=True, own_voice="rms").write(root)
    return root
