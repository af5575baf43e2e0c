"""Questions for `viva bench answer` in Kokoro's held-out voices: held-out phrasings, or those for evaluation alone."""

from collections.abc import Sequence

from vivavoce.bench.answer import AskedQuestion, padded_with_silence
from vivavoce.errors import InputError
from vivavoce.models.moss_speech.codec import ENCODER_RATE
from vivavoce.train.front_desk import Exchange, dialogues
from vivavoce.train.front_desk.evaluation_set import evaluation_dialogues
from vivavoce.train.questions import held_out_language, spoken_by_kokoro


def kokoro_questions(count: int | None, seed: int, device: str, code: str = "en") -> list[AskedQuestion]:
    """So many questions with held-out phrasings; None: all that are for evaluation alone, which are English."""
    lines: Sequence[Sequence[Exchange]]
    if count is None:
        if code != "en":
            raise InputError("the phrasings for evaluation alone are English: give a number of questions")
        lines = evaluation_dialogues()
    else:
        lines = dialogues("held_out", count, 1000 + seed, (1, 1), held_out_language(code))
    spoken = spoken_by_kokoro([line[-1].user for line in lines], seed, device, code)
    return [
        AskedQuestion(line[-1], f"kokoro-{voice}", padded_with_silence(sound.resampled(ENCODER_RATE)), tuple(line[:-1]))
        for line, (voice, sound) in zip(lines, spoken, strict=True)
    ]
