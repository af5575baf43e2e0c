"""The dialogues that the language model learns from and is evaluated with: numbers, edition, and tools."""

import argparse
import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vivavoce.train import add_option
from vivavoce.train.front_desk import (
    DECLINE,
    LANGUAGES,
    Exchange,
    SpokenLanguage,
    dialogues,
    general_sentences,
    languages,
    single_questions,
    tool_dialogues,
)

SLOT_INTENTS = ("table", "room", "wake_up", "price", "order")  # intents whose replies repeat slots
CONVERTED_TIME_INTENTS = ("table", "wake_up")
CONVERTED_TIME = "forty five"  # the reply says "a quarter to" the next hour instead
EVALUATION_SEED = 0  # the questions do not depend on the training data
MAX_HELD_OUT_TOOLS = 200


@dataclass(frozen=True)
class DialoguePlan:
    """Amounts of data: `spoken` dialogues have speech and text, `written` ones text only."""

    spoken: int = 20_000
    written: int = 20_000
    general: int = 2_500
    """Spoken sentences outside the domain, which are declined."""
    slot_questions: int = 0
    """More single questions whose replies repeat a slot; half of them convert a time."""
    read: int = 2_000
    """Sentences other than replies, read by the reply voice."""
    versions: int = 8
    voices: int = 1
    """Minimum number of voices of a sentence; frequent ones have more."""
    held_out: int = 320
    held_out_general: int = 60
    tools: int = 0
    """Spoken dialogues in which functions are called."""
    held_out_tools: int = 0
    edition: int = 1
    """Of the desk's phrasings."""
    languages: tuple[str, ...] = ("en",)
    """Of the callers; with several, dialogues have one each, and some change it."""
    seed: int = 0

    @property
    def spoken_languages(self) -> tuple[SpokenLanguage, ...]:
        """The languages of the desk, in this edition."""
        return languages(self.languages, self.edition)


TINY = DialoguePlan(spoken=12, written=6, general=4, read=4, versions=2, held_out=6, held_out_general=2)
PLAN_OPTIONS = ("spoken", "general", "slot_questions", "tools", "edition", "versions", "voices", "languages", "seed")


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """The options that decide which dialogues there are."""
    parser.add_argument("--spoken", type=int, help="number of spoken dialogues")
    parser.add_argument("--general", type=int, help="number of out-of-domain sentences")
    add_option(parser, "--slot-questions", "--valued", type=int, help="number of extra single questions with slots")
    parser.add_argument("--tools", type=int, help="number of dialogues in which functions are called")
    parser.add_argument("--edition", type=int, help="of the desk's phrasings: 1 (default) or 2")
    parser.add_argument("--versions", type=int, help="augmented versions of each user utterance")
    parser.add_argument("--voices", type=int, help="minimum number of voices per user sentence")
    parser.add_argument("--languages", nargs="+", choices=sorted(LANGUAGES), help="of the callers; default: English")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a few dialogues")


def plan_of(options: argparse.Namespace) -> DialoguePlan:
    """The plan of these options."""
    changes = {name: value for name in PLAN_OPTIONS if (value := getattr(options, name)) is not None}
    changes |= {"languages": tuple(options.languages)} if options.languages else {}
    plan = dataclasses.replace(TINY if options.tiny else DialoguePlan(), **changes)
    return dataclasses.replace(plan, held_out_tools=min(plan.tools, MAX_HELD_OUT_TOOLS))


def train_dialogues(plan: DialoguePlan) -> tuple[list[list[Exchange]], list[str]]:
    """Training dialogues, and their spoken user sentences in order of first use."""
    spoken = dialogues("train", plan.spoken, plan.seed, (1, 4), plan.spoken_languages)
    if "en" in plan.languages:
        spoken += [_declined(text) for text in general_sentences(plan.general, plan.seed)]
    parts = (_shares(total, len(plan.languages)) for total in (plan.slot_questions, plan.tools))
    for language, slot_questions, tools in zip(plan.spoken_languages, *parts, strict=True):
        converted: list[Exchange] = []
        if language.code == "en":
            half = slot_questions // 2
            converted = single_questions(CONVERTED_TIME_INTENTS, half, plan.seed, CONVERTED_TIME, language=language)
        others = single_questions(SLOT_INTENTS, slot_questions - len(converted), plan.seed, language=language)
        spoken += [[each] for each in (*converted, *others)]
        spoken += tool_dialogues("train", tools, plan.seed, language=language)
    sentences = list(dict.fromkeys(exchange.user for line in spoken for exchange in line))
    return spoken + dialogues("train", plan.written, plan.seed + 1, (1, 6), plan.spoken_languages), sentences


def held_out_dialogues(plan: DialoguePlan) -> list[list[Exchange]]:
    """Dialogues of held-out phrasings: single questions, conversations, out-of-domain sentences, and with tools."""
    half, spoken_languages = plan.held_out // 2, plan.spoken_languages
    lines = dialogues("held_out", half, EVALUATION_SEED + 100, (1, 1), spoken_languages)
    lines += dialogues("held_out", plan.held_out - half, EVALUATION_SEED + 101, (2, 4), spoken_languages)
    for language, count in zip(spoken_languages, _shares(plan.held_out_tools, len(spoken_languages)), strict=True):
        lines += tool_dialogues("held_out", count, EVALUATION_SEED + 102, (1, 2), language)
    if "en" not in plan.languages:
        return lines
    learned = set(general_sentences(plan.general, plan.seed))
    others = general_sentences(4 * plan.held_out_general + plan.general, EVALUATION_SEED + 100)
    fresh = [text for text in others if text not in learned]
    return lines + [_declined(text) for text in fresh[-plan.held_out_general :]]


def _shares(total: int, parts: int) -> list[int]:
    """A number divided between languages."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def voices_of(
    dialogue_lines: Sequence[Sequence[Exchange]], sentences: Sequence[str], min_voices: int = 1
) -> dict[str, int]:
    """Number of voices of each sentence: the minimum, and one more for every four uses, up to 8."""
    uses = Counter(exchange.user for line in dialogue_lines for exchange in line)
    return {sentence: min(max(8, min_voices), min_voices + uses[sentence] // 4) for sentence in sentences}


def replies_of(lines: Sequence[Sequence[Exchange]]) -> list[str]:
    """The distinct replies of dialogues."""
    return list(dict.fromkeys(exchange.reply for line in lines for exchange in line))


def _declined(text: str) -> list[Exchange]:
    return [Exchange("decline", text, DECLINE)]
