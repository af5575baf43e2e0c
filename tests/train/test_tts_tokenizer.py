"""The miniature's tokenizer is a SentencePiece file that spells, and folds what is said alike."""

import pytest

from vivavoce.errors import InputError
from vivavoce.models.moss_tts_nano.prompt import OTHER_FIELDS, REFERENCE_FIELD, USER_END, MossTTSNanoConfig
from vivavoce.models.tokenizers import SentencePieceTokenizer
from vivavoce.train.tts.batches import folded_characters, tokenizer_pieces, write_tokenizer

TEXTS = ["Hello World.", "  spaced \n out\ttext ", "naïve café “quote” — yes… ﬁne Ａ１ 中文 🎉", "It's 3:30", "", " "]
TEMPLATE = [OTHER_FIELDS, REFERENCE_FIELD, USER_END, "<user_inst>x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def tokenizer(folder) -> SentencePieceTokenizer:
    return write_tokenizer(folder, 384)


def test_the_signs_stand_where_the_model_expects_them():
    texts = [text for text, _, _ in tokenizer_pieces()]
    config = MossTTSNanoConfig()
    assert texts[config.pad_token_id] == "<pad>"
    assert texts[config.im_start_token_id : config.im_end_token_id + 1] == ["<turn>", "</turn>"]
    assert texts[config.audio_assistant_slot_token_id] == "<speech>"
    assert len(set(texts)) == len(texts)


def test_a_text_is_spelled(tokenizer):
    pieces = [text for text, _, _ in tokenizer_pieces()]
    assert "".join(pieces[id] for id in tokenizer.encode("Two, please!")) == "▁two,▁please!"


def test_characters_that_sound_equal_are_encoded_equally(tokenizer):
    assert tokenizer.encode("CAFÉ\u00a0d’Or") == tokenizer.encode("cafe d'or")
    assert tokenizer.encode("“no”") == tokenizer.encode("no")


def test_every_folded_character_is_folded_in_the_file(tokenizer):
    for character, plain in folded_characters().items():
        assert tokenizer.encode(f"a{character}b") == tokenizer.encode(f"a{plain}b"), character


def test_the_prompt_s_words_are_one_id_each_and_texts_cannot_fake_them(tokenizer):
    assert len(tokenizer.encode(USER_END)) == 2
    assert len(tokenizer.encode(OTHER_FIELDS)) < 60
    assert len(tokenizer.encode(USER_END, symbols=False)) > 10


def test_unknown_writing_becomes_bytes(tokenizer):
    assert len(tokenizer.encode("中")) == 1 + 3


def test_sentencepiece_itself_reads_the_file_the_same(tokenizer, folder):
    sentencepiece = pytest.importorskip("sentencepiece")
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in TEXTS + TEMPLATE:
        assert tokenizer.encode(text) == theirs.encode(text)


def test_too_small_a_vocabulary_is_an_error(folder):
    with pytest.raises(InputError, match="more than the 100"):
        write_tokenizer(folder, 100)
