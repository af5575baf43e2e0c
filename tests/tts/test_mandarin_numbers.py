"""Numbers of Mandarin texts: what they are written as for the phonemiser, and that none is left out of the speech."""

import pytest

from vivavoce.tts.mandarin_numbers import spoken_numbers
from vivavoce.tts.phonemes import FOREIGN_WORDS, phonemes


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("1,000元", "1000元"),
        ("2024-01-05是星期五", "2024年1月5日是星期五"),
        ("2024/12/31", "2024年12月31日"),
        ("10:30见，9:05到，8:00开", "10点30分见，9点零5分到，8点开"),
        ("比分3:2", "比分3:2"),
        ("气温-3.5℃，体温37°C", "气温-3.5摄氏度，体温37摄氏度"),
        ("$5的咖啡，¥100元", "5美元的咖啡，100元"),
        ("电话是13800138000", "电话是一三八零零一三八零零零"),
        ("007和01月", "零零七和01月"),
        ("占5%-10%", "占5%到10%"),
        ("½杯，二〇二四年，３个", "1/2杯，二零二四年，3个"),
        ("1分钟等于60秒，0.05米", "1分钟等于60秒，0.05米"),
    ],
)
def test_numbers_are_written_as_they_are_read(written, spoken):
    assert spoken_numbers(written) == spoken


def test_only_words_of_other_scripts_are_foreign_in_a_mandarin_text():
    parts = FOREIGN_WORDS.split("“1”和A4纸，iPhone 15用New York的GPT-4。")
    assert parts == ["“1”和", "A4", "纸，", "iPhone", " 15用", "New York", "的", "GPT-4", "。"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("digits", "words"),
    [
        ("1分钟等于60秒。", "一分钟等于六十秒。"),
        ("60秒。", "六十秒。"),
        ("3.5公里。", "三点五公里。"),
        ("答案是“2”。", "答案是“二”。"),
        ("1、苹果，2、香蕉。", "一、苹果，二、香蕉。"),
        ("《1984》是小说。", "《一千九百八十四》是小说。"),
        ("100%的人。", "百分之一百的人。"),
    ],
)
def test_digits_are_spoken_wherever_they_stand(digits, words):
    pytest.importorskip("misaki.zh")
    spoken = phonemes(digits, "z", lambda character: not character.isdigit())
    assert spoken.text == phonemes(words, "z", str.isprintable).text
    assert spoken.text[-1] == ".", "the end of the sentence is spoken too"


@pytest.mark.full
def test_a_foreign_word_in_a_mandarin_text_is_spoken_as_english():
    pytest.importorskip("misaki.zh")
    pytest.importorskip("hibari")
    spoken = phonemes("Python是一种语言，有3个版本。", "z", str.isprintable)
    assert spoken.text.startswith(phonemes("Python", "a", str.isprintable).text)
    assert not any(map(str.isdigit, spoken.text))
