"""The way through a long sound is faster-whisper's, token for token: CTranslate2's decoder, rules, seeks, prompts."""

import json

import numpy as np
import pytest
import torch

from tests.models.published_tokenizer import published_tokenizer
from vivavoce.models.whisper.config import WhisperConfig, WhisperTokens
from vivavoce.models.whisper.model import Whisper
from vivavoce.models.whisper.steps import TranscriptionOptions
from vivavoce.models.whisper.transcriber import WhisperTranscriber

ctranslate2 = pytest.importorskip("ctranslate2")
faster_whisper = pytest.importorskip("faster_whisper")

TOKENS = WhisperTokens.of_vocabulary(51865)
PROMPT = "hello there"
SUPPRESSED = [1, 2, 7, *TOKENS.specials]
CONFIG = WhisperConfig(
    d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=64, decoder_ffn_dim=64,
)  # fmt: skip


class Multilingual:
    """CTranslate2's model, which does not take this vocabulary for a multilingual one."""

    is_multilingual = True

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder, converted = tmp_path_factory.mktemp("whisper"), tmp_path_factory.mktemp("converted")
    model = Whisper.random(CONFIG, seed=5)
    model.decoder.embed_positions.weight.normal_(generator=torch.Generator().manual_seed(1))
    ids = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), TOKENS.endoftext)
    model.save(folder, **ids, decoder_start_token_id=TOKENS.startoftranscript)
    generation = {
        **ids,
        "suppress_tokens": SUPPRESSED,
        "begin_suppress_tokens": [220, TOKENS.endoftext],
        "no_timestamps_token_id": TOKENS.notimestamps,
        "lang_to_id": {f"<|{code}|>": id_ for code, id_ in TOKENS.languages.items()},
        "alignment_heads": [[1, 0], [1, 1]],
        "max_initial_timestamp_index": 50,
        "compression_ratio_threshold": None,
        "logprob_threshold": None,
        "no_speech_threshold": None,
    }
    end = "<|endoftext|>"
    files = {
        "tokenizer.json": published_tokenizer(),
        "generation_config.json": generation,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": end, "eos_token": end},
        "preprocessor_config.json": {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80},
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values), encoding="utf8")
    converter = ctranslate2.converters.TransformersConverter(
        str(folder), copy_files=["tokenizer.json", "preprocessor_config.json"]
    )
    converter.convert(str(converted), force=True)
    peer = faster_whisper.WhisperModel(str(converted), device="cpu", compute_type="float32", cpu_threads=1)
    peer.model = Multilingual(peer.model)
    return peer, WhisperTranscriber.load(folder)


@pytest.mark.full
def test_segments_are_those_of_faster_whisper(pair):
    peer, mine = pair
    sound = (0.1 * np.random.default_rng(0).standard_normal(16_000 * 61)).astype(np.float32)
    theirs, _ = peer.transcribe(
        sound, language="zh", beam_size=1, temperature=0.0, compression_ratio_threshold=None, log_prob_threshold=None,
        no_speech_threshold=None, suppress_tokens=SUPPRESSED, initial_prompt=PROMPT,
    )  # fmt: skip
    options = TranscriptionOptions("zh", prompt=PROMPT, temperatures=(0.0,))
    compared = 0
    for expected, segment in zip(theirs, mine.segments(torch.from_numpy(sound), options), strict=True):
        compared += 1
        assert segment.tokens == tuple(expected.tokens) and segment.text == expected.text
        assert (segment.start, segment.end) == pytest.approx((expected.start, expected.end), abs=1e-6)
        assert segment.average_logprob == pytest.approx(expected.avg_logprob, abs=1e-3)
        assert segment.no_speech == pytest.approx(expected.no_speech_prob, abs=1e-4)
    assert compared > 5
