"""The plan of what Kokoro speaks for mini-speech: callers and questions of the dialogues, replies, and other sentences.

Replies and sentences of `teacher` are in the voice of the desk; `mixed` and `held_out` are for the speech encoder, and
have other sentences than the dialogues.
"""

import dataclasses
import random
from dataclasses import dataclass

from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.train.front_desk import general_sentences, user_sentences
from vivavoce.train.front_desk.general import word_strings
from vivavoce.train.lm.dialogue_plan import DialoguePlan, held_out_dialogues, replies_of, train_dialogues
from vivavoce.train.utterances import REPLY_VOICES, Utterance, callers_sentences, mixture, random_speed

OTHER_SEED = 77  # of sentences that the dialogues do not have


@dataclass(frozen=True)
class PlannedCounts:
    """Numbers of utterances; the dialogues decide on the others."""

    callers: int = 10_000
    """Sentences of the dialogues' callers that Kokoro speaks; synthesizers may speak all."""
    mixed: int = 8_000
    held_out: int = 400
    general: int = 500
    """Sentences of the reply voice that are no replies, for the flow and the vocoder."""
    strings: int = 500

    def scaled(self, share: float) -> "PlannedCounts":
        """All numbers times a factor, at least 1."""
        return PlannedCounts(*(max(1, round(share * count)) for count in dataclasses.astuple(self)))


def planned_utterances(plan: DialoguePlan, counts: PlannedCounts) -> list[Utterance]:
    """The utterances of all parts; deterministic for its arguments."""
    source = random.Random(f"desk {plan.seed}")
    lines, sentences = train_dialogues(plan)
    tests = held_out_dialogues(plan)
    questions = dict.fromkeys(exchange.user for line in tests for exchange in line)
    callers = source.sample(sentences, min(counts.callers, len(sentences)))
    known = {*sentences, *questions}
    mixed = [
        text
        for text in callers_sentences(plan.spoken_language, counts.mixed, OTHER_SEED + plan.seed)
        if text not in known
    ]
    replies = [*replies_of(lines), *replies_of(tests), *general_sentences(plan.read, plan.seed + 2)]
    others = general_sentences(counts.general, OTHER_SEED + plan.seed) + word_strings(counts.strings, OTHER_SEED)
    teacher = dict.fromkeys([*replies, *others])
    held_out = HELD_OUT_VOICES["en"]
    evaluated = user_sentences("held_out", counts.held_out, OTHER_SEED, plan.spoken_language)
    return [
        *(Utterance("questions", "en", text, source.choice(held_out)) for text in questions),
        *(Utterance("held_out", "en", text, source.choice(held_out)) for text in evaluated),
        *(Utterance("teacher", "en", text, REPLY_VOICES["en"]) for text in teacher),
        *(Utterance("callers", "en", text, mixture("en", source), random_speed(source)) for text in callers),
        *(Utterance("mixed", "en", text, mixture("en", source), random_speed(source)) for text in mixed),
    ]
