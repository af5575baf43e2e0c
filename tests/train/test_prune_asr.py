"""Cutting a published English Whisper to shorter windows and fewer pieces."""

import base64
from dataclasses import replace

import pytest
import torch

from vivavoce.errors import InputError
from vivavoce.models.whisper.config import ENGLISH_ONLY, WhisperConfig, WhisperTokens
from vivavoce.models.whisper.model import Whisper
from vivavoce.train.asr import Vocabulary, byte_letters, save_whisper
from vivavoce.train.asr.prune import first_merges, pruned
from vivavoce.train.asr.train import TINY

MERGES = ("th", "the", " the", "in")
CONFIG = WhisperConfig(
    d_model=16,
    encoder_layers=1,
    encoder_attention_heads=2,
    encoder_ffn_dim=32,
    decoder_layers=2,
    decoder_attention_heads=2,
    decoder_ffn_dim=32,
    max_source_positions=150,
    max_target_positions=64,
    vocab_size=ENGLISH_ONLY,
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    sequences = [bytes([byte]) for byte in byte_letters()] + [text.encode() for text in MERGES]
    lines = (f"{base64.b64encode(text).decode()} {rank}" for rank, text in enumerate(sequences))
    file = tmp_path_factory.mktemp("ranks") / "gpt2.tiktoken"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_the_first_merges_keep_their_ids(ranks):
    vocabulary = first_merges(ranks, 3, 1.0)
    assert vocabulary.encode("the") == [258] and len(vocabulary.encode("in")) == 3
    assert first_merges(ranks, 4, 1.0).encode("then in")[0] == 258
    assert vocabulary.decode(vocabulary.encode("the inn")) == " the inn"


def test_a_pruned_model_computes_what_the_published_one_does(ranks, tmp_path):
    published, vocabulary = Whisper.random(CONFIG), first_merges(ranks, 4, 2.0)
    model = pruned(published, vocabulary, target_positions=32)
    assert model.config == replace(
        CONFIG, max_source_positions=100, max_target_positions=32, vocab_size=vocabulary.size
    )
    mel = torch.randn(1, 80, 200, generator=torch.Generator().manual_seed(0))
    own, theirs = vocabulary.tokens, WhisperTokens.of_vocabulary(ENGLISH_ONLY)
    text = vocabulary.encode("the thin")
    mine = torch.tensor([[own.startoftranscript, own.languages["en"], own.transcribe, own.timestamp(0.5), *text]])
    same = [theirs.startoftranscript, theirs.languages["en"], theirs.transcribe, theirs.timestamp(0.5), *text]
    with torch.no_grad():
        logits, expected = model(mel, mine), published(mel, torch.tensor([same]))
    for own_id, id_ in ((65, 65), (own.endoftext, theirs.endoftext), (own.nospeech, theirs.nospeech)):
        assert torch.allclose(logits[..., own_id], expected[..., id_], atol=1e-4)
    assert torch.allclose(logits[..., own.timestamps :], expected[..., theirs.timestamps :][..., :101], atol=1e-4)

    save_whisper(model, vocabulary, tmp_path)
    recipe = TINY.fine_tuning(tmp_path)
    assert recipe.config == model.config and recipe.ctc_shares is None
    assert Vocabulary.read(tmp_path).merges == vocabulary.merges


def test_other_models_and_longer_windows_are_refused(ranks):
    vocabulary = first_merges(ranks, 4, 4.0)
    with pytest.raises(InputError, match="longer"):
        pruned(Whisper.random(CONFIG), vocabulary)
    with pytest.raises(InputError, match="English"):
        pruned(Whisper.random(replace(CONFIG, vocab_size=100)), vocabulary)
