"""Sentence embeddings: those of transformers' BERT, pooled and normalised as sentence-transformers does."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import BertConfig, BertModel

from vivavoce.errors import CheckpointError
from vivavoce.models.sentence_encoder import MAX_TOKENS, SentenceEncoder
from vivavoce.models.tokenizers import TextTokenizer

SENTENCES = "where can a car stay over night it is in the yard"
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *dict.fromkeys(SENTENCES.split())]
TEXTS = [SENTENCES, "it is", "", "the yard is in the night", "car " * 300]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random BERT, stored by transformers, with a tokenizer that pads and cuts as the published one does."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(3)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 260}
    config = BertConfig(vocab_size=len(WORDS), hidden_size=32, initializer_range=0.5, **sizes)
    BertModel(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(WORDS[:3])
    tokenizer.enable_padding(length=128)
    tokenizer.enable_truncation(128)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@torch.no_grad()
def expected(folder, texts):
    peer, tokenizer = BertModel.from_pretrained(folder).eval(), TextTokenizer.load(folder)
    first, last = tokenizer.id_of("[CLS]"), tokenizer.id_of("[SEP]")
    vectors = []
    for text in texts:
        ids = torch.tensor([[first, *tokenizer.encode(text)[: MAX_TOKENS - 2], last]])
        vectors.append(functional.normalize(peer(ids).last_hidden_state.mean(1), dim=1)[0])
    return torch.stack(vectors).numpy()


def test_a_batch_has_the_embeddings_of_transformers_one_by_one(folder):
    vectors = SentenceEncoder.load(folder).embed(TEXTS)
    np.testing.assert_allclose(vectors, expected(folder, TEXTS), atol=2e-6)
    assert SentenceEncoder.load(folder).embed([]).shape == (0, 32)


def test_another_model_is_refused(folder, tmp_path):
    for change in ({"model_type": "llama"}, {"hidden_act": "relu"}, {"hidden_size": None}):
        config = json.loads((folder / "config.json").read_text()) | change
        (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value}))
        with pytest.raises(CheckpointError):
            SentenceEncoder.load(tmp_path)


@pytest.mark.published
@pytest.mark.full
def test_published_weights_have_the_embeddings_of_transformers(published_model):
    folder = published_model("all-minilm-l6-v2")
    texts = ["Where can I leave my car?", "The garage is behind the house.", "Breakfast is from seven to ten.", "早餐"]
    vectors = SentenceEncoder.load(folder).embed(texts)
    np.testing.assert_allclose(vectors, expected(folder, texts), atol=2e-6)
    similar = vectors @ vectors[0]
    assert similar[1] > similar[2] + 0.1
