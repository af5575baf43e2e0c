"""The plan of what Kokoro speaks for mini-speech: callers and questions of the dialogues, replies, and other sentences.

Replies and sentences of `teacher` are in the voice of the desk, as are those of `voice`, sentences of all kinds for the
flow; `mixed` and `held_out` are for the speech encoder, and have other sentences than the dialogues.
"""

import dataclasses
import random
from dataclasses import dataclass

from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.train.front_desk import SpokenLanguage, general_sentences, language_of, user_sentences
from vivavoce.train.front_desk.general import word_strings
from vivavoce.train.front_desk.mandarin_general import mandarin_word_strings
from vivavoce.train.lm.dialogue_plan import DialoguePlan, held_out_dialogues, replies_of, train_dialogues
from vivavoce.train.utterances import (
    REPLY_SPEEDS,
    REPLY_VOICES,
    Utterance,
    callers_sentences,
    mixture,
    random_speed,
)

OTHER_SEED = 77  # of sentences that the dialogues do not have
VOICE_SEED = 177  # of those that `teacher` does not have either


@dataclass(frozen=True)
class PlannedCounts:
    """Numbers of utterances; the dialogues decide on the others."""

    callers: int = 16_000
    """English sentences of the dialogues' callers that Kokoro speaks; synthesizers may speak all."""
    mixed: int = 8_000
    """Of each language, as all below."""
    held_out: int = 400
    general: int = 500
    """Sentences of the reply voice that are no replies, for the flow and the vocoder."""
    strings: int = 500
    voice: int = 6_000
    """More sentences of the reply voice at other speeds, for the flow: replies, what callers say, and others."""

    def scaled(self, share: float) -> "PlannedCounts":
        """All numbers times a factor, at least 1."""
        return PlannedCounts(*(max(1, round(share * count)) for count in dataclasses.astuple(self)))


@dataclass(frozen=True)
class DialogueTexts:
    """The distinct sentences of the dialogues, in one language."""

    callers: list[str]
    questions: list[str]
    replies: list[str]


PARTS_BY_BEGINNING = {
    "encoder": ("mixed", "held_out", "teacher", "voice", "callers", "questions"),
    "flow": ("teacher", "voice", "callers", "questions"),
    "lm": ("callers", "questions"),
}
"""The parts that are needed, by the first part of the model that is trained."""


def planned_utterances(plan: DialoguePlan, counts: PlannedCounts, beginning: str = "encoder") -> list[Utterance]:
    """The utterances of all languages and the parts of PARTS_BY_BEGINNING; deterministic for its arguments."""
    source = random.Random(f"desk {plan.seed}")
    lines, sentences = train_dialogues(plan)
    tests = held_out_dialogues(plan)
    questions = list(dict.fromkeys(exchange.user for line in tests for exchange in line))
    replies = list(dict.fromkeys([*replies_of(lines), *replies_of(tests)]))
    utterances = []
    for language in plan.spoken_languages:
        texts = DialogueTexts(
            *(
                [text for text in every if language_of(text).code == language.code]
                for every in (sentences, questions, replies)
            )
        )
        utterances += _of_language(language, texts, plan, counts, source)
    return [each for each in utterances if each.part in PARTS_BY_BEGINNING[beginning]]


def _of_language(
    language: SpokenLanguage, texts: DialogueTexts, plan: DialoguePlan, counts: PlannedCounts, source: random.Random
) -> list[Utterance]:
    code, seed = language.code, OTHER_SEED + plan.seed
    # Synthesizers speak English only, so Kokoro has to speak all of the other callers' sentences.
    callers = texts.callers
    if code == "en":
        callers = source.sample(callers, min(counts.callers, len(callers)))
    known = {*texts.callers, *texts.questions}
    mixed = [text for text in callers_sentences(language, counts.mixed, seed) if text not in known]
    if code == "en":
        others = [*general_sentences(plan.read, plan.seed + 2), *general_sentences(counts.general, seed)]
        others += word_strings(counts.strings, OTHER_SEED)
    else:
        others = mandarin_word_strings(counts.general + counts.strings, seed)
    held_out = HELD_OUT_VOICES[code]
    evaluated = user_sentences("held_out", counts.held_out, OTHER_SEED, language)
    return [
        *(Utterance("questions", code, text, source.choice(held_out)) for text in texts.questions),
        *(Utterance("held_out", code, text, source.choice(held_out)) for text in evaluated),
        *(Utterance("teacher", code, text, REPLY_VOICES[code]) for text in dict.fromkeys([*texts.replies, *others])),
        *_of_the_reply_voice(code, texts, counts.voice, plan.seed),
        *(Utterance("callers", code, text, mixture(code, source), random_speed(source)) for text in callers),
        *(Utterance("mixed", code, text, mixture(code, source), random_speed(source)) for text in mixed),
    ]


def _of_the_reply_voice(code: str, texts: DialogueTexts, count: int, seed: int) -> list[Utterance]:
    """A third of them replies, a third what callers say, if there are as many; the rest are other sentences."""
    source = random.Random(f"voice {code} {seed}")  # of its own, so that the other parts are the same without this one
    third = count // 3
    known = [text for kind in (texts.replies, texts.callers) for text in source.sample(kind, min(third, len(kind)))]
    rest = count - len(known)
    if code == "en":
        strings = word_strings(rest // 3, VOICE_SEED + seed)
        others = general_sentences(rest - len(strings), VOICE_SEED + seed) + strings
    else:
        others = mandarin_word_strings(rest, VOICE_SEED + seed)
    return [
        Utterance("voice", code, text, REPLY_VOICES[code], random_speed(source, REPLY_SPEEDS))
        for text in dict.fromkeys([*known, *others])
    ]
