"""What a Whisper makes of a sound that is not over: the words so far, when each was said, and where it looked for them.

What is settled is given to the decoder as the beginning of its text, so every guess goes on from it.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vivavoce.models.whisper.alignment import MEDIAN_WIDTH, median_filter, split_words, token_times
from vivavoce.models.whisper.config import CONV_STRIDE, MEL_FRAMES_PER_SECOND, SECONDS_PER_TIMESTAMP
from vivavoce.models.whisper.decoding import Text
from vivavoce.models.whisper.model import WindowMemory
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.models.whisper.windows import (
    Answer,
    EncodeWindow,
    LanguageDetector,
    Question,
    TranscriptionOptions,
    WriteText,
)


@dataclass(frozen=True)
class GuessedWord:
    """A word with its time in seconds of the sound, and the latest moment its tokens looked at."""

    text: str
    tokens: tuple[int, ...]
    start: float
    end: float
    look: float


@dataclass(frozen=True)
class LiveGuess:
    """The settled words of a sound, timed anew, and those that are guessed to follow."""

    settled: tuple[GuessedWord, ...] = ()
    guessed: tuple[GuessedWord, ...] = ()


LiveSteps = Generator[Question, Answer, LiveGuess]


def hear_live(
    listener: WhisperTranscriber,
    samples: Tensor,
    wish: TranscriptionOptions,
    context: Sequence[int] = (),
    settled: Sequence[int] = (),
) -> LiveSteps:
    """The guess for a sound of at most a window, all work left to the caller as in `WhisperTranscriber.hear`.

    `context` are tokens of what was said before the sound, `settled` those its text surely begins with.  # [time]
    """
    wish = replace(wish, language=wish.language or listener.usual_language, timestamps=False)
    config = listener.model.config
    mel = listener.log_mel(samples)
    frames = min(config.window_frames, mel.shape[-1] - config.window_frames)
    memory = yield EncodeWindow(listener.window(mel, 0, wish.padding, frames))
    assert isinstance(memory, WindowMemory)
    if wish.language is None:
        wish = replace(wish, language=str((yield LanguageDetector(memory))))
    half = config.max_target_positions // 2
    prompt = listener.tokens.prompt(wish.language, wish.task, False, [*context][-(half // 2) :])
    room = config.max_target_positions - len(prompt) - len(settled) - 1
    text = yield WriteText(memory, (*prompt, *settled), wish, 0.0, 1, min(half, room), bool(settled))
    assert isinstance(text, Text)
    if listener.is_silence(text):
        text = replace(text, tokens=[])
    return _timed(listener, memory, wish, settled, text.tokens, frames)


@torch.inference_mode()
def _timed(
    listener: WhisperTranscriber,
    memory: WindowMemory,
    wish: TranscriptionOptions,
    settled: Sequence[int],
    guessed: Sequence[int],
    frames: int,
) -> LiveGuess:
    """Words of both parts with their times, by the alignment heads' attention to what is sound."""
    tokens, language = listener.tokens, wish.language or ""
    written = [token for token in (*settled, *guessed) if token < tokens.endoftext]
    if not written:
        return LiveGuess()
    prompt = tokens.prompt(language if tokens.is_multilingual else None)
    ids = torch.tensor([[*prompt, *written, tokens.endoftext]], device=memory.keys.device)
    positions = max(1, frames // CONV_STRIDE)
    heads = listener.settings.alignment_heads
    attention = listener.model.decoder.attention(ids, memory, heads, positions)[0, :, len(prompt) - 1 : -1].float()
    begins = token_times(attention)
    smooth = median_filter(attention.mean(0), MEDIAN_WIDTH)  # [token, position]
    looks = (smooth.argmax(-1) * SECONDS_PER_TIMESTAMP).tolist()
    words: list[GuessedWord] = []
    place = 0
    known = sum(token < tokens.endoftext for token in settled)
    for group in (*split_words(written[:known], listener.spell, language),
                  *split_words(written[known:], listener.spell, language)):  # fmt: skip
        end = place + len(group)
        until = min(float(begins[end]), frames / MEL_FRAMES_PER_SECOND)
        words.append(
            GuessedWord(listener.spell(group), tuple(group), float(begins[place]), until, max(looks[place:end]))
        )
        place = end
    count = len(split_words(written[:known], listener.spell, language))
    return LiveGuess(tuple(words[:count]), tuple(words[count:]))
