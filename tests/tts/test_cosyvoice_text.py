"""CosyVoice's text preparation, and user requests that change the speaking style."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivavoce.errors import InputError
from vivavoce.tts.cosyvoice_inputs import cut_at_words, normalise_transcript, prepare_piece, prepare_text, text_chunks
from vivavoce.tts.style import STYLES, DirectedStyle, apply_request

USUAL = DirectedStyle()


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("**Hello** 3 [people](http://x.y)", "Hello three people."),
        ("Wait [laughter] what?", "Wait [laughter] what?"),
        ("[T][AH0][M][AA1][T][OW2]", "[T][AH0][M][AA1][T][OW2]."),
        ("面积是5 m²。", "面积是5 m平方。"),
        ("你 好 - 世界，", "你好，世界。"),
        ("圆周率是3.14.", "圆周率是3.14。"),
        ("高管也通过电话[j][ǐ]予。", "高管也通过电话[j][ǐ]予。"),
        ("<|en|>Hi 5", "<|en|>Hi 5"),
        ("<strong>really</strong> good", "<strong>really</strong> good."),
    ],
)
def test_text_is_cleaned_around_what_the_model_knows(given, read):
    assert prepare_text(given, 3) == read


def test_a_text_may_be_left_as_it_is():
    assert prepare_text("Hello *you* 2 [laughter]", 3, clean=False) == "Hello *you* 2 [laughter]"


def test_phonemes_are_of_version_3_alone():
    with pytest.raises(InputError, match="CosyVoice 2 has no phonemes"):
        prepare_text("[AA1]", 2)
    assert prepare_text("See [1] there.", 2) == "See, one, there."


def test_long_texts_are_split_and_chinese_counts_characters():
    sentence = "This is a sentence of some length. "
    assert [len(part.text) <= 160 for part in text_chunks(sentence * 20, lambda text: len(text) // 2)].count(False) == 0
    assert max(len(part.text) for part in text_chunks("这是一个不太长的句子。" * 20, lambda text: 10**6)) <= 80


@pytest.mark.parametrize(
    ("written", "tidy"),
    [("HELLO THERE", "Hello there."), ("你好", "你好。"), ("Yes!", "Yes!"), (" a  b ", "a b."), ("", "")],
)
def test_a_transcript_has_sentence_case_and_an_end(written, tidy):
    assert normalise_transcript(written) == tidy


@given(st.lists(st.text("ab ,。你", max_size=9), max_size=9))
def test_streaming_text_is_complete_and_in_order(pieces):
    assert "".join(cut_at_words(pieces)) == "".join(pieces)


def test_streaming_text_is_cut_before_spaces():
    assert list(cut_at_words(["Hel", "lo wor", "ld, you ", "all"])) == ["Hello", " world, you", " all"]
    assert list(cut_at_words(["你好，世", "界"])) == ["你好，", "世界"]


def test_pieces_of_streaming_text_keep_their_spaces():
    assert [prepare_piece(piece, 3) for piece in (" 3 cats", ",", " [laughter]!", "")] == [
        " three cats",
        ",",
        " [laughter]!",
        "",
    ]


REQUESTS = {
    "More cheerful, please.": {"style": "happy"},
    "Could you talk a bit slower?": {"speed": 1 / 1.2},
    "Not so fast!": {"speed": 1 / 1.2},
    "Speed up a little": {"speed": 1.2},
    "too loud": {"volume": 1 / 1.5},
    "Louder.": {"volume": 1.5},
    "Speak in Cantonese, please": {"style": "cantonese"},
    "like a robot": {"style": "robot"},
    "说快一点": {"speed": 1.2},
    "别太快": {"speed": 1 / 1.2},
    "请用四川话说": {"style": "sichuan"},
    "开心一点，好吗？": {"style": "happy"},
}


@pytest.mark.parametrize(("said", "change"), REQUESTS.items(), ids=REQUESTS)
def test_a_request_changes_only_what_it_names(said, change):
    after = apply_request(said, USUAL)
    assert after is not None
    assert {name: getattr(after, name) for name in change} == pytest.approx(change)
    assert all(
        getattr(after, name) == getattr(USUAL, name) for name in ("speed", "volume", "style") if name not in change
    )


@pytest.mark.parametrize(
    "said",
    [
        "",
        "How fast is it?",
        "I am happy.",
        "fast",
        "I want a louder speaker",
        "Say that again",
        "今天很开心",
        "快",
        "What now?",
    ],
)
def test_ordinary_conversation_is_no_request(said):
    assert apply_request(said, USUAL) is None


def test_requests_accumulate_within_bounds_and_can_be_undone():
    style = USUAL
    for _ in range(20):
        style = apply_request("faster please", apply_request("louder", style))
    assert (style.speed, style.volume) == (2.0, 4.0)
    assert apply_request("less cheerful please", DirectedStyle(style="happy")).style == ""
    assert apply_request("speak normally again please", style) == USUAL


def test_the_published_instructions_are_there():
    assert len(STYLES[3]) == 26
    assert DirectedStyle(style="sichuan").instruction_for(3) == "请用四川话表达。"
    assert DirectedStyle(style="sichuan").instruction_for(2) == "用四川话说这句话"
    assert DirectedStyle(instruction="Whisper.").instruction_for(2) == "Whisper."
    with pytest.raises(InputError, match="201 characters"):
        DirectedStyle(instruction="a" * 201)
