"""Transcription of recordings of any length, window by window as in openai-whisper: a text that cannot be trusted is
decoded again at higher temperatures, and the next window starts where the last complete segment ended.

`WhisperTranscriber.transcription_steps` is a generator: it yields requests to encode a window, to detect its language
and to decode texts, is sent the results, and yields segments. Serial transcription, many recordings batched in one
engine, and CTranslate2 share it.
"""

import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.audio.mel import WhisperMel, whisper_normalise
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.models.whisper.alignment import TimedWord, word_times
from vivavoce.models.whisper.config import CONV_STRIDE, MEL_FRAMES_PER_SECOND, WhisperSettings, WhisperTokens
from vivavoce.models.whisper.decoding import (
    Hotwords,
    LogitRule,
    Suppress,
    SuppressAtStart,
    Text,
    TimestampRules,
    beam_search,
    cut_segments,
    decode,
    language_probabilities,
    token_logprobs,
)
from vivavoce.models.whisper.model import Whisper, WindowMemory
from vivavoce.models.whisper.steps import (
    Answer,
    DetectLanguage,
    EncodeWindow,
    Padding,
    Question,
    ScoredToken,
    TranscriptionOptions,
    TranscriptionSteps,
    TranscriptSegment,
    WriteText,
    run_steps,
)
from vivavoce.models.whisper.vocabulary import load_tokenizer

MEL_BLOCK_SECONDS = 60
FADING_SAMPLES = 800  # of silence after a recording; later frames hold only silence
SILENCE_LOG_MEL = -10.0  # the minimum
TRIM_FRAMES = 8  # trimmed windows end on a multiple of these
BF16_TRIM_FRAMES = 32  # sixteen positions, the block of bfloat16 products
# After the sound: with less, models trained on full windows repeat short sentences, or understand them less well.
TRIM_TAIL_SECONDS = 6.0
MAX_TOKENS_PER_SECOND = 16  # of a trimmed window; a longer text repeats itself
MIN_TOKENS = 32  # that any trimmed window may have


class WhisperTranscriber:
    """A Whisper with its tokenizer and settings."""

    def __init__(
        self, model: Whisper, tokenizer: TextTokenizer, tokens: WhisperTokens, settings: WhisperSettings
    ) -> None:
        self.model, self.tokenizer, self.tokens, self.settings = model, tokenizer, tokens, settings
        self.mel = WhisperMel(model.config.num_mel_bins).to(self.device)

    @classmethod
    def load(
        cls,
        source: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        vocabulary: Path | None = None,
    ) -> "WhisperTranscriber":
        """A folder in Hugging Face's or CTranslate2's layout, or with OpenAI's file; or that file itself.

        `vocabulary` is a folder with the byte-pair ranks of OpenAI's files, for one without a tokenizer beside it.
        """
        source = Path(source)
        model = Whisper.load(source, device, dtype)
        folder = source.parent if source.is_file() else source
        tokenizer, tokens = load_tokenizer(vocabulary or folder, model.config.vocab_size)
        if tokens.timestamps > model.config.vocab_size:
            raise CheckpointError(f"the tokenizer of {folder} has more ids than the model's {model.config.vocab_size}")
        return cls(model, tokenizer, tokens, WhisperSettings.read(folder, model.config, tokens))

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.decoder.embed_tokens.weight.device

    def language(self, samples: Tensor) -> dict[str, float]:
        """The probability of each language in the first window, likeliest first.  # [time]"""
        mel = self.log_mel(samples)
        (probabilities,) = language_probabilities(self.model, self.tokens, self.encode(self.window(mel, 0, "full")))
        return dict(sorted(probabilities.items(), key=lambda item: -item[1]))

    def own_language(self, samples: Tensor) -> str:
        """The language used if the options have none: the model's default, or the detected one.  # [time]"""
        return self.default_language or next(iter(self.language(samples)))

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes of the languages that the model knows."""
        return tuple(self.tokens.languages) if self.tokens.is_multilingual else ("en",)

    @property
    def default_language(self) -> str | None:
        """The only language of the model, or the default of its settings; None: it is detected."""
        if not self.tokens.is_multilingual:
            return "en"
        only = next(iter(self.tokens.languages)) if len(self.tokens.languages) == 1 else None
        return only or self.settings.language

    def likeliest_language(self, question: DetectLanguage) -> str:
        """The language of one encoded window."""
        (probabilities,) = language_probabilities(self.model, self.tokens, question.memory)
        return question.likeliest(probabilities)

    def segments(
        self,
        samples: Tensor,
        options: TranscriptionOptions | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Iterator[TranscriptSegment]:
        """Yield segments as soon as they are final, and end before the next pass once no longer wanted.  # [time]"""
        return run_steps(self.transcription_steps(samples, options), self._answer, is_wanted)

    def _answer(self, question: Question) -> Answer:
        if isinstance(question, DetectLanguage):
            return self.likeliest_language(question)
        return self.encode(question.mel) if isinstance(question, EncodeWindow) else self.answer(question)

    def transcription_steps(self, samples: Tensor, options: TranscriptionOptions | None = None) -> TranscriptionSteps:
        """Transcribe with all model calls left to the caller, so that many recordings can be batched.  # [time]

        Yields segments, and requests: `EncodeWindow` (send its `WindowMemory`), `DetectLanguage` (send the language)
        and `WriteText` (send a `Text`). Without a language in the options, that of the first window is detected.
        """
        if samples.ndim != 1:
            raise InputError(f"a transcript is of one channel of samples, not of a tensor {list(samples.shape)}")
        options = self._with_defaults(options or TranscriptionOptions(), len(samples) / WhisperMel.RATE)
        mel = self.log_mel(samples)
        content = mel.shape[-1] - self.model.config.window_frames
        earlier: list[int] = self.tokenizer.encode(f" {options.prompt.strip()}") if options.prompt else []
        seek, spoken_until = 0, 0.0
        while seek < content:
            size = min(self.model.config.window_frames, content - seek)
            memory = yield EncodeWindow(self.window(mel, seek, options.padding, size))
            assert isinstance(memory, WindowMemory)
            if options.language is None:
                options = replace(options, language=str((yield DetectLanguage(memory, options.languages))))
            segments, frames, trusted = yield from self._transcribe_window(memory, seek, size, options, earlier)
            for segment in segments:
                if not is_hallucination(segment, spoken_until, options.max_silence):
                    spoken_until = segment.words[-1].end if segment.words else segment.end
                    yield replace(segment, language=options.language)
            follows = options.follow_earlier and trusted
            earlier = [*earlier, *(id_ for segment in segments for id_ in segment.tokens)] if follows else []
            seek += max(1, frames)

    def _transcribe_window(
        self, memory: WindowMemory, seek: int, size: int, options: TranscriptionOptions, earlier: list[int]
    ) -> Generator[Question, Answer, tuple[list[TranscriptSegment], int, bool]]:
        """The segments of a window, the frames by which to advance, and whether they may prompt the next window."""
        prompt = self._prompt(options, earlier)
        text, temperature = yield from self._write(memory, options, prompt, size, is_first=seek == 0)
        if self.is_silence(text):
            return [], size, True
        offset = seek / MEL_FRAMES_PER_SECOND
        cut = cut_segments(text.tokens, self.tokens, size, options.timestamps)
        segments = [
            self._segment(part.tokens, part.start + offset, part.end + offset, text, temperature)
            for part in cut.segments
        ]
        if options.logprobs:
            segments = self._with_logprobs(segments, memory, options, prompt, text)
        segments = [segment for segment in segments if segment.text.strip() and segment.end > segment.start]
        if options.word_times:
            segments = self._timed(segments, memory, options, offset, size)
        return segments, cut.frames, temperature <= self.settings.forget_prompt_above

    @torch.inference_mode()
    def log_mel(self, samples: Tensor) -> Tensor:
        """The normalised log-mel of a recording followed by a window of silence.  # [time] → [mel, frame]"""
        window = int(self.model.config.window_seconds * WhisperMel.RATE)
        total = (len(samples) + window) // WhisperMel.HOP
        log_mel = torch.full((self.model.config.num_mel_bins, total), SILENCE_LOG_MEL, device=self.device)
        state, end = self.mel.initial_state(), 0
        fading = samples.new_zeros(min(window, FADING_SAMPLES))
        *blocks, last = samples.split(MEL_BLOCK_SECONDS * WhisperMel.RATE)
        for block in (*blocks, torch.cat([last, fading])):  # the last frames overlap the silence after the recording
            frames, state = self.mel.step(state, block[None].to(self.device))
            begin, end = end, min(end + frames.shape[-1], total)
            log_mel[:, begin:end] = frames[0, :, : end - begin]
        peak = log_mel[:, : end + 1].amax()  # all later frames are equal
        log_mel[:, end:] = whisper_normalise(log_mel[None, :, -1:], peak)[0]
        block_frames = MEL_BLOCK_SECONDS * MEL_FRAMES_PER_SECOND
        for piece in log_mel[:, :end].split(block_frames, dim=1):  # in place: a second copy of hours is large
            piece.copy_(whisper_normalise(piece[None], peak)[0])
        return log_mel

    def _with_defaults(self, options: TranscriptionOptions, seconds: float) -> TranscriptionOptions:
        """The options with the model's defaults filled in; the language stays None where it has to be detected."""
        only = options.languages[0] if len(options.languages) == 1 else None
        language = options.language or only or (None if self._detects(options.languages) else self.default_language)
        if language is not None:
            self.tokens.prompt(language)  # raises for an unknown language
        timestamps = options.timestamps
        if timestamps is None:
            timestamps = self.settings.writes_times and seconds > self.settings.untimed_up_to
        return replace(options, language=language, timestamps=timestamps)

    def _detects(self, languages: Sequence[str]) -> bool:
        """Whether one of several languages is to be detected, rather than the model's default taken."""
        known = [language for language in languages if language in self.languages]
        if languages and not known:
            raise InputError(f"this model knows none of the languages {', '.join(languages)}")
        return self.tokens.is_multilingual and len(self.tokens.languages) > 1 and bool(known)

    def window(self, mel: Tensor, seek: int, padding: Padding, size: int | None = None) -> Tensor:
        """The frames of a window, `size` of them sound; with "trim", as few more as the model needs.  # [1, mel, frame]

        Models whose padding is silence were trained on trimmed windows, and need no more than are there.
        """
        frames = self.model.config.window_frames
        if padding == "trim" and size is not None:
            min_frames = round(self.settings.min_window_seconds * MEL_FRAMES_PER_SECOND)
            is_float32 = self.model.encoder.conv1.weight.dtype == torch.float32
            step = TRIM_FRAMES if is_float32 else BF16_TRIM_FRAMES
            tail = 0 if self.settings.window_fill == "silence" else round(TRIM_TAIL_SECONDS * MEL_FRAMES_PER_SECOND)
            frames = min(frames, -(-max(size + tail, min_frames) // step) * step)
        if size is None or size >= frames or self.settings.window_fill == "silence":
            return mel[None, :, seek : seek + frames]
        return functional.pad(mel[None, :, seek : seek + size], (0, frames - size))

    @torch.inference_mode()
    def encode(self, mel: Tensor) -> WindowMemory:
        return self.model.decoder.cross_kv(self.model.encoder(mel))

    def _prompt(self, options: TranscriptionOptions, earlier: list[int]) -> list[int]:
        """The prompt of a window after the tokens of an earlier text, of which the last ones are kept."""
        half = self.model.config.max_target_positions // 2
        return self.tokens.prompt(options.language, options.task, bool(options.timestamps), earlier[-(half - 1) :])

    def _write(
        self, memory: WindowMemory, options: TranscriptionOptions, prompt: list[int], size: int, is_first: bool
    ) -> Generator[Question, Answer, tuple[Text, float]]:
        """The text of the first temperature at which it is trusted; else that of the last."""
        half = self.model.config.max_target_positions // 2
        prefix = self.tokenizer.encode(f" {options.prefix.strip()}") if options.prefix and is_first else []
        if len(prompt) + len(prefix) + 8 > self.model.config.max_target_positions:
            raise InputError(f"the prefix has {len(prefix)} tokens, which leaves no room for a transcript")
        guess = tuple(self.tokenizer.encode(options.guess)) if is_first and not prefix else ()
        max_tokens = half
        if options.padding == "trim":
            spoken = round(size / MEL_FRAMES_PER_SECOND * MAX_TOKENS_PER_SECOND)
            max_tokens = min(half, max(MIN_TOKENS, spoken))
        temperatures = self.settings.temperatures if options.temperatures is None else options.temperatures
        for temperature in temperatures:
            best_of = self.settings.best_of if temperature > 0 else 1
            text = yield WriteText(memory, (*prompt, *prefix), options, temperature, best_of, max_tokens, guess=guess)
            assert isinstance(text, Text)
            if self.is_trusted(text) or temperature == temperatures[-1]:
                return replace(text, tokens=[*prefix, *text.tokens]), temperature
        raise InputError("no temperature was given to decode at; 0.0 alone is greedy")

    def answer(self, question: WriteText) -> Text:
        """Decode a text on this thread."""
        rules, options = self.rules(question.options, question.is_started), question.options
        if question.beams > 1:
            return beam_search(
                self.model, self.tokens, question.memory, question.prompt, rules, question.beams, question.max_tokens
            )
        (text,) = decode(
            self.model,
            self.tokens,
            question.memory,
            [question.prompt],
            rules,
            question.temperature,
            question.best_of,
            question.max_tokens,
            options.seed,
            question.guess if question.temperature == 0 else (),
        )
        return text

    def rules(self, options: TranscriptionOptions, is_started: bool = False) -> list[LogitRule]:
        """The logit rules in the order of openai-whisper; `is_started`: the prompt ends within the text."""
        suppressed = list(self.settings.suppressed)
        if not options.timestamps:
            suppressed += range(self.tokens.notimestamps, self.model.config.vocab_size)
        rules: list[LogitRule] = [Suppress(suppressed)]
        if not is_started:
            rules.insert(0, SuppressAtStart(self.settings.suppressed_at_start))
        if options.hotwords:
            words = [self.tokenizer.encode(f" {word.strip()}") for word in options.hotwords]
            rules.insert(0, Hotwords(words, self.settings.hotword_bonus))
        if options.timestamps:
            rules.append(TimestampRules(self.tokens, self.settings.latest_start))
        return rules

    def is_trusted(self, text: Text) -> bool:
        """Whether a text is neither repetitive nor unlikely, or is silence."""
        if self.is_silence(text):
            return True
        min_logprob, max_compression = self.settings.min_logprob, self.settings.max_compression
        is_loop = max_compression is not None and compression(self.text_of(text.tokens)) > max_compression
        return not is_loop and (min_logprob is None or text.average_logprob >= min_logprob)

    def is_silence(self, text: Text) -> bool:
        """Whether the model detects no speech and the text is not likely enough to contradict it."""
        settings = self.settings
        if settings.no_speech is None or text.no_speech <= settings.no_speech:
            return False
        if settings.min_logprob is None or not settings.likely_text_is_speech:
            return True
        return text.average_logprob <= settings.min_logprob

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens without special tokens and timestamps."""
        return self.tokenizer.decode([token for token in tokens if token < self.tokens.endoftext])

    def _segment(
        self, tokens: Sequence[int], start: float, end: float, text: Text, temperature: float
    ) -> TranscriptSegment:
        spelled = self.text_of(tokens)
        return TranscriptSegment(
            start, end, spelled, tuple(tokens), temperature, text.average_logprob, compression(spelled), text.no_speech
        )

    def _with_logprobs(
        self,
        segments: list[TranscriptSegment],
        memory: WindowMemory,
        options: TranscriptionOptions,
        prompt: Sequence[int],
        text: Text,
    ) -> list[TranscriptSegment]:
        """The segments of one window with the log-probabilities of their tokens."""
        values = iter(token_logprobs(self.model, memory, prompt, text.tokens, self.rules(options)))
        result = []
        for segment in segments:  # consecutive pieces of the text
            scored = [(token, next(values)) for token in segment.tokens]
            logprobs = (
                ScoredToken(self.tokenizer.decode([token]), self.tokenizer.bytes_of(token), logprob)
                for token, logprob in scored
                if token < self.tokens.endoftext
            )
            result.append(replace(segment, logprobs=tuple(logprobs)))
        return result

    def _timed(
        self,
        segments: list[TranscriptSegment],
        memory: WindowMemory,
        options: TranscriptionOptions,
        offset: float,
        frames: int,
    ) -> list[TranscriptSegment]:
        """The segments of one window with the times of their words."""
        assert options.language is not None
        words = word_times(
            self.model,
            self.tokens,
            memory,
            [segment.tokens for segment in segments],
            self.settings.alignment_heads,
            self.text_of,
            options.language,
            positions=max(1, frames // CONV_STRIDE),
        )
        return [
            replace(
                segment,
                words=tuple(replace(word, start=word.start + offset, end=word.end + offset) for word in timed),
            )
            for segment, timed in zip(segments, words, strict=True)
        ]


def compression(text: str) -> float:
    """The zlib compression ratio: above 2.4, a text repeats itself."""
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw)) if raw else 0.0


def is_hallucination(segment: TranscriptSegment, spoken_until: float, max_silence: float | None) -> bool:
    """Whether a segment is a hallucination: unlikely, too short or too long words after a silence."""
    if max_silence is None or not segment.words:
        return False
    words = segment.words[:8]
    score = sum(_anomaly(word) for word in words)
    is_strange = score >= 3 or score + 0.01 >= len(words)
    return is_strange and words[0].start - spoken_until > max_silence


def _anomaly(word: TimedWord) -> float:
    length = word.end - word.start
    score = 1.0 if word.probability < 0.15 else 0.0
    score += max(0.0, (0.133 - length) * 15)
    return score + max(0.0, length - 2.0)
