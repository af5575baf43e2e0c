"""Questions for `viva bench answer` in Kokoro's held-out voices: held-out phrasings, or those for evaluation alone."""

import random
from collections.abc import Sequence

from vivavoce.audio.io import Sound
from vivavoce.bench.answer import AskedQuestion, padded_with_silence
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.models.moss_speech.codec import ENCODER_RATE
from vivavoce.train.front_desk import Exchange, dialogues
from vivavoce.train.front_desk.evaluation_set import evaluation_dialogues
from vivavoce.tts.interface import SpeakingStyle
from vivavoce.tts.kokoro import KokoroTTS

BATCH = 8
KOKORO = "kokoro-82m"


def kokoro_questions(count: int | None, seed: int, device: str) -> list[AskedQuestion]:
    """So many questions with held-out phrasings; None: all that are for evaluation alone."""
    lines: Sequence[Sequence[Exchange]] = (
        evaluation_dialogues() if count is None else dialogues("held_out", count, 1000 + seed, (1, 1))
    )
    spoken = spoken_by_kokoro([line[-1].user for line in lines], seed, device)
    return [
        AskedQuestion(line[-1], f"kokoro-{voice}", padded_with_silence(sound.resampled(ENCODER_RATE)), tuple(line[:-1]))
        for line, (voice, sound) in zip(lines, spoken, strict=True)
    ]


def spoken_by_kokoro(texts: Sequence[str], seed: int, device: str) -> list[tuple[str, Sound]]:
    """Each text in one of the held-out English voices, with the voice's name."""
    source = random.Random(f"kokoro {seed}")
    voices = [source.choice(HELD_OUT_VOICES["en"]) for _ in texts]
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
