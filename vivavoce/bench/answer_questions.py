"""Questions for `viva bench answer` in Kokoro's held-out voices: held-out phrasings, or those for evaluation alone."""

import random
from collections.abc import Sequence

from vivavoce.audio.io import Sound
from vivavoce.bench.answer import AskedQuestion, padded_with_silence
from vivavoce.errors import InputError
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.models.moss_speech.codec import ENCODER_RATE
from vivavoce.train.front_desk import ENGLISH_ALONE, Exchange, dialogues, languages
from vivavoce.train.front_desk.evaluation_set import evaluation_dialogues
from vivavoce.tts.interface import SpeakingStyle
from vivavoce.tts.kokoro import KokoroTTS

BATCH = 8
EDITION = 2  # of the phrasings in other languages than English
KOKORO = "kokoro-82m"


def kokoro_questions(count: int | None, seed: int, device: str, code: str = "en") -> list[AskedQuestion]:
    """So many questions with held-out phrasings; None: all that are for evaluation alone, which are English."""
    lines: Sequence[Sequence[Exchange]]
    if count is None:
        if code != "en":
            raise InputError("the phrasings for evaluation alone are English: give a number of questions")
        lines = evaluation_dialogues()
    else:
        spoken_language = ENGLISH_ALONE if code == "en" else languages((code,), EDITION)
        lines = dialogues("held_out", count, 1000 + seed, (1, 1), spoken_language)
    spoken = spoken_by_kokoro([line[-1].user for line in lines], seed, device, code)
    return [
        AskedQuestion(line[-1], f"kokoro-{voice}", padded_with_silence(sound.resampled(ENCODER_RATE)), tuple(line[:-1]))
        for line, (voice, sound) in zip(lines, spoken, strict=True)
    ]


def spoken_by_kokoro(texts: Sequence[str], seed: int, device: str, code: str = "en") -> list[tuple[str, Sound]]:
    """Each text in one of the held-out voices of a language, with the voice's name."""
    source = random.Random(f"kokoro {seed}")
    voices = [source.choice(HELD_OUT_VOICES[code]) for _ in texts]
    style = SpeakingStyle(clean=False)
    requests = [(text, voice, style) for text, voice in zip(texts, voices, strict=True)]
    tts = KokoroTTS.load(KOKORO, device)
    try:
        sounds = [
            sound for begin in range(0, len(requests), BATCH) for sound in tts.say_each(requests[begin : begin + BATCH])
        ]
    finally:
        tts.close()
    return list(zip(voices, sounds, strict=True))
