"""Prompts have the published grid; texts are cleaned and cut so that every word is said once."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.tiny_nano import CONFIG, LetterTokenizer
from vivavoce.errors import InputError
from vivavoce.models.moss_tts_nano.prompt import MAX_TEXT_CHARACTERS, MossTTSNanoPrompt, chunks

PROMPT = MossTTSNanoPrompt(CONFIG, LetterTokenizer())
VOICE = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
PAD = [CONFIG.audio_pad_token_id] * 5


def written(text: str) -> list[tuple[int, ...]]:
    return [(token, *PAD) for token in LetterTokenizer().encode(text)]


HEAD = [(4, *PAD), *written("user"), *written("<user_inst>-Reference(s):")]
FIELDS = written("-Instruction:None-Tokens:None-Quality:None-SoundEvent:None-AmbientSound:None-Language:None-Text:")
TAIL = [*written("</user_inst>"), (5, *PAD), (4, *PAD), *written("assistant"), (6, *PAD)]


def test_a_clone_has_the_published_grid():
    reference = [(8, 1, 2, 3, 4, 5), (8, 6, 7, 8, 9, 10)]
    expected = [*HEAD, (6, *PAD), *reference, (7, *PAD), *FIELDS, *written("Hi."), *TAIL]
    assert PROMPT.clone("Hi.", VOICE) == expected
    assert PROMPT.voice(VOICE) + PROMPT.speech("Hi.") == expected


def test_a_continuation_has_the_published_grid():
    plain = [*HEAD, *written("None"), *FIELDS, *written("Hi."), *TAIL]
    assert PROMPT.continuation("Hi.") == plain
    said = [(9, 1, 2, 3, 4, 5), (9, 6, 7, 8, 9, 10)]
    assert PROMPT.continuation("Hi.", "Oh! ", VOICE) == [
        *HEAD, *written("None"), *FIELDS, *written("Oh!Hi."), *TAIL, *said,
    ]  # fmt: skip


def test_codebooks_left_out_of_a_reference_stay_empty():
    assert PROMPT.clone("Hi.", [[3, 4]])[len(HEAD) + 1] == (8, 3, 4, *PAD[:3])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: PROMPT.clone("", VOICE), "no text to say"),
        (lambda: PROMPT.clone(" \n ", VOICE), "no text to say"),
        (lambda: PROMPT.clone("Hi", []), "no frames"),
        (lambda: PROMPT.clone("Hi", [[24] * 5]), "speech code 24 is not in 0…23"),
        (lambda: PROMPT.clone("Hi", [[-1] * 5]), "speech code -1"),
        (lambda: PROMPT.clone("Hi", [[1] * 6]), "1 to 5 codes, not 6"),
        (lambda: PROMPT.clone("Hi", [[]]), "1 to 5 codes, not 0"),
        (lambda: PROMPT.continuation("Hi", "Oh"), "both its text and its codes"),
        (lambda: PROMPT.continuation("Hi", "", VOICE), "both its text and its codes"),
        (lambda: PROMPT.continuation("", "Oh", VOICE), "no text to say"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(call, says):
    with pytest.raises(InputError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


def letters(text: str) -> str:
    return re.sub(r"\s", "", text)


def count(text: str) -> int:
    return PROMPT.count_tokens(text)


def test_a_short_text_is_one_chunk_as_it_stands():
    (chunk,) = chunks("  hello, you ", count, 75)
    assert (chunk.text, chunk.pause) == ("hello, you", 0.0)


def test_a_long_text_is_cut_at_sentences_and_packed():
    text = 'one two three. Four five! "Six seven?" eight nine ten eleven twelve'
    cut = chunks(text, count, 24)
    assert [chunk.text for chunk in cut] == [
        "One two three. Four five!",
        '"Six seven?"',
        "eight nine ten eleven",
        "twelve.",
    ]
    assert [chunk.pause for chunk in cut] == [0.24, 0.40, 0.40, 0.0]


def test_chinese_is_joined_without_spaces():
    assert [chunk.text for chunk in chunks("早上好。你好吗？很好", count, 20)] == ["早上好。", "你好吗？", "很好。"]
    assert [chunk.text for chunk in chunks("早。好！是", count, 13)] == ["早。好！", "是。"]


def test_marks_inside_words_are_no_place_to_cut():
    cut = [chunk.text for chunk in chunks("It is 3.14 or 12:30 or 1,000 or e.g. v2.1 there", count, 8)]
    words = " ".join(cut).split()
    assert {"3.14", "12:30", "1,000", "v2.1"} <= set(words)


def test_no_limit_means_no_cut():
    text = "One. Two. Three. " * 50
    assert [chunk.text for chunk in chunks(text, count, 0)] == [text.strip()]


some_text = st.text(alphabet="ab1 .,!?;:\"'()中文字。，！？、：”\n-é🎉", min_size=1, max_size=120)


@settings(max_examples=150, deadline=None)
@given(some_text.filter(str.strip), st.integers(4, 30))
def test_no_letter_is_lost_or_said_twice(text, max_tokens):
    cut = chunks(text, count, max_tokens)
    said = letters("".join(chunk.text for chunk in cut))
    assert (
        said.removesuffix("。").removesuffix(".").lower() == letters(text).removesuffix("。").removesuffix(".").lower()
    )
    assert len(cut) == 1 or all(count(chunk.text) <= max_tokens or len(chunk.text) == 1 for chunk in cut)


@pytest.mark.parametrize(
    "text", ["a" * MAX_TEXT_CHARACTERS, "字" * MAX_TEXT_CHARACTERS, "Oh, well. " * (MAX_TEXT_CHARACTERS // 10)]
)
def test_a_text_beyond_the_limit_is_cut(text):
    cut = chunks(text, count, 75)
    assert letters("".join(chunk.text for chunk in cut)).rstrip(".。").lower() == letters(text).rstrip(".").lower()


@pytest.mark.parametrize(("text", "says"), [("", "no text to say"), (" \n", "no text"), ("a" * 100_001, "100001 char")])
def test_what_cannot_be_said_is_refused(text, says):
    with pytest.raises(InputError, match=says):
        chunks(text, count)
