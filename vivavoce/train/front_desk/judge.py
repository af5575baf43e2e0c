"""Judging whether a transcript is the expected reply."""

from collections.abc import Callable, Sequence
from functools import cache

from vivavoce.train.front_desk.answers import Exchange, fixed_replies, slotted_replies
from vivavoce.train.front_desk.language import SpokenLanguage
from vivavoce.train.front_desk.languages import language_of

SameWord = Callable[[str, str], bool]
MAX_WORD_ERRORS = 0.45  # share of wrong words up to which a transcript can match a reply


def judge(transcript: str, expected: Exchange) -> bool:
    """Whether a transcript has the intent of the expected reply and all its numbers, times, names, dishes and days.

    It has to be in the language of that reply; the script of Mandarin does not matter.
    """
    language = language_of(expected.reply)
    words, reply_words = language.spoken_words(transcript), language.spoken_words(expected.reply)
    pairs = aligned(reply_words, words, language.same_word)
    errors = word_errors(pairs, language.same_word)
    if errors > MAX_WORD_ERRORS * len(reply_words):
        return False
    if any(language.is_value(word) and not language.is_recognised_value(word, other) for word, other in pairs if word):
        return False
    return errors == 0 or all(
        errors <= word_errors(aligned(reply, words, language.same_word), language.same_word)
        for reply in _every_reply(language)
    )


def aligned(expected: Sequence[str], transcribed: Sequence[str], same_word: SameWord) -> list[tuple[str, str]]:
    """Minimum-edit alignment of expected and transcribed words; "" for a missing or extra word."""
    cost = [[row + column for column in range(len(transcribed) + 1)] for row in range(len(expected) + 1)]
    for row, word in enumerate(expected, 1):
        for column, other in enumerate(transcribed, 1):
            swap = cost[row - 1][column - 1] + (not same_word(word, other))
            cost[row][column] = min(swap, cost[row - 1][column] + 1, cost[row][column - 1] + 1)
    pairs: list[tuple[str, str]] = []
    row, column = len(expected), len(transcribed)
    while row or column:
        total = cost[row][column]
        if (
            row
            and column
            and total == cost[row - 1][column - 1] + (not same_word(expected[row - 1], transcribed[column - 1]))
        ):
            row, column = row - 1, column - 1
            pairs.append((expected[row], transcribed[column]))
        elif row and total == cost[row - 1][column] + 1:
            row -= 1
            pairs.append((expected[row], ""))
        else:
            column -= 1
            pairs.append(("", transcribed[column]))
    return pairs[::-1]


def word_errors(pairs: Sequence[tuple[str, str]], same_word: SameWord) -> int:
    return sum(not same_word(word, other) for word, other in pairs)


@cache
def _every_reply(language: SpokenLanguage) -> tuple[tuple[str, ...], ...]:
    replies = (*fixed_replies(language), *slotted_replies(language))
    return tuple(dict.fromkeys(language.spoken_words(reply) for reply in replies))
