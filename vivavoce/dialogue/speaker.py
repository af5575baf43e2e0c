"""Whose voice: the first turns enrol the user; what others say neither stops a reply nor becomes a turn.

A sound is compared with the enrolled voices by the cosine of speaker embeddings. Short sounds are judged with wide
margins: where the cosine is between them, more speech is waited for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from vivavoce.audio.vad import WINDOW_MS
from vivavoce.dialogue.items import Samples

Embed = Callable[[Samples], Samples]
"""The unit vector of a voice, of samples at 16 kHz."""
Answer = Callable[[Samples | None], None]
RequestVoice = Callable[[Samples, Answer], None]
"""Computes the embedding of a sound beside the event loop; None: it failed."""

ENROL_MS = 1500  # of speech, in one turn or several
MAX_WEIGHT_MS = 30_000  # of earlier speech in the mean of a voice
MAX_EMBEDDED_MS = 6000
MIN_EMBEDDED_MS = 256
ASK_AT_MS = (384, 512, 768, 1024)  # of speech over a reply
AGAIN_MS = 1024  # of further speech, after which another speaker's is compared again
PIECE_MS = 640  # of speech before a pause, from which on it is judged by itself
SURE_PIECE_MS = 1000  # from which on a piece of another voice leaves a turn that is the user's
MAX_VOICES = 2
REFUSED_IN_A_ROW = 2  # turns of one voice, as loud as the user, after which its next one is accepted
AS_LOUD_DB = -6.0  # relative to the user's level
MARGINS = (
    # speech ms, another voice below, the user's from, and between them where no more speech comes
    (256, 0.02, 0.38, 0.12),
    (512, 0.14, 0.42, 0.22),
    (1024, 0.24, 0.48, 0.30),
    (2048, 0.30, 0.52, 0.34),
)  # by Kokoro's training voices: nine of ten pairs of two are below the last column, on the telephone of one hardly any


class SpeakerVerdict(Enum):
    """Whose voice it is."""

    USER = "user"
    OTHER = "other"
    UNSURE = "unsure"


def verdict_of(score: float, speech_ms: int, is_last: bool) -> SpeakerVerdict:
    """The verdict on the cosine of so much speech; with `is_last` there will be no more."""
    lengths = [row[0] for row in MARGINS]
    other, user, middle = (float(np.interp(speech_ms, lengths, [row[n] for row in MARGINS])) for n in (1, 2, 3))
    if is_last:
        return SpeakerVerdict.USER if score >= middle else SpeakerVerdict.OTHER
    return SpeakerVerdict.USER if score >= user else SpeakerVerdict.OTHER if score < other else SpeakerVerdict.UNSURE


@dataclass(frozen=True)
class VoiceSample:
    """The embedding of some speech, and how much and how loud it was."""

    vector: Samples = field(repr=False)
    speech_ms: int
    level_db: float = 0.0


def joined_voice(samples: Sequence[VoiceSample]) -> VoiceSample:
    """One sample for several of one voice."""
    total = sum(each.speech_ms for each in samples)
    vector = np.sum([each.vector * each.speech_ms for each in samples], axis=0)
    level = sum(each.level_db * each.speech_ms for each in samples) / total
    return VoiceSample((vector / max(float(np.linalg.norm(vector)), 1e-9)).astype(np.float32), total, level)


@dataclass
class EnrolledVoices:
    """The voices that are the user's, and those of turns that were refused."""

    voices: list[VoiceSample] = field(default_factory=list)
    _first: list[VoiceSample] = field(default_factory=list)  # too little so far
    _refused: list[VoiceSample] = field(default_factory=list)  # since the last turn of the user

    @property
    def is_enrolled(self) -> bool:
        """Whether a voice is known."""
        return bool(self.voices)

    def score(self, vector: Samples) -> float:
        """The cosine with the nearest voice."""
        return max(float(vector @ voice.vector) for voice in self.voices)

    def accept(self, sample: VoiceSample) -> None:
        """A turn of the user: it enrols, or refines the nearest voice."""
        self._refused.clear()
        if not self.voices:
            self._first.append(sample)
            if sum(each.speech_ms for each in self._first) >= ENROL_MS:
                self.voices.append(joined_voice(self._first))
            return
        near = max(range(len(self.voices)), key=lambda index: float(sample.vector @ self.voices[index].vector))
        known = self.voices[near]
        weighted = VoiceSample(known.vector, min(known.speech_ms, MAX_WEIGHT_MS), known.level_db)
        if verdict_of(self.score(sample.vector), sample.speech_ms, is_last=False) is SpeakerVerdict.USER:
            self.voices[near] = joined_voice([weighted, sample])

    def refuse(self, sample: VoiceSample) -> bool:
        """A turn of another voice: whether it is refused. One voice that keeps speaking as loud as the user becomes
        a second voice of the user's, so that nobody is locked out."""
        is_as_loud = sample.level_db >= max(voice.level_db for voice in self.voices) + AS_LOUD_DB
        like = [
            each
            for each in self._refused
            if verdict_of(float(each.vector @ sample.vector), min(each.speech_ms, sample.speech_ms), is_last=True)
            is SpeakerVerdict.USER
        ]
        if is_as_loud and len(like) >= REFUSED_IN_A_ROW and len(like) == len(self._refused):
            self.voices = [*self.voices, joined_voice([*like, sample])][-MAX_VOICES:]
            self._refused.clear()
            return False
        self._refused = [*like, sample] if is_as_loud else self._refused
        return True


@dataclass(frozen=True)
class _Piece:
    """A part of a turn between two pauses, as a range of its windows."""

    begin: int
    end: int
    sample: VoiceSample


class SpeakerWatch:
    """Collects the speech of a turn or over a reply, and says whose it is."""

    def __init__(self, request: RequestVoice, voices: EnrolledVoices | None = None) -> None:
        self._request = request
        self.voices = voices or EnrolledVoices()
        self.is_asked = False
        """Whether an embedding is being computed: later audio waits for it."""
        self._generation = 0
        self.clear()

    def clear(self) -> None:
        """What was heard is over, or was judged."""
        self._generation += 1
        self.is_asked = False
        self._speech: list[Samples] = []
        self._levels: list[float] = []
        self._verdict = SpeakerVerdict.UNSURE
        self._ask_ms = ASK_AT_MS[0]
        self._asked_ms = -1
        self._pieces: list[_Piece] = []
        self._begin = 0

    def hear(self, samples: Samples, level_db: float) -> None:
        """Add a window of speech."""
        self._speech.append(samples)
        self._levels.append(level_db)

    @property
    def speech_ms(self) -> int:
        """Of speech that was not judged yet."""
        return len(self._speech) * WINDOW_MS

    def over_reply(self, is_over: bool) -> SpeakerVerdict:
        """Whose the speech over a reply is; UNSURE while more of it, or an answer, is needed."""
        if not self.voices.is_enrolled or self._verdict is SpeakerVerdict.USER:
            return SpeakerVerdict.USER
        if is_over and self.speech_ms < MIN_EMBEDDED_MS:
            return SpeakerVerdict.USER if self._asked_ms < 0 else self._verdict
        is_last = is_over and self._verdict is SpeakerVerdict.UNSURE and self._asked_ms < self.speech_ms
        if self.speech_ms >= self._ask_ms or is_last:
            self._ask_over_reply(is_over)
            return SpeakerVerdict.UNSURE
        return self._verdict

    def _ask_over_reply(self, is_over: bool) -> None:
        speech_ms = self.speech_ms
        again = self._verdict is SpeakerVerdict.OTHER  # the user may have begun to speak since

        def answer(sample: VoiceSample | None) -> None:
            self._asked_ms = speech_ms
            if sample is None:
                self._verdict = SpeakerVerdict.USER
                return
            is_last = is_over or speech_ms >= ASK_AT_MS[-1]
            self._verdict = verdict_of(self.voices.score(sample.vector), sample.speech_ms, is_last)
            later = [each for each in ASK_AT_MS if each > speech_ms]
            self._ask_ms = later[0] if later and self._verdict is SpeakerVerdict.UNSURE else speech_ms + AGAIN_MS

        self._ask(self._speech[-AGAIN_MS // WINDOW_MS :] if again else self._speech, answer)

    def begin_turn(self, joined: int) -> None:
        """A turn begins with what was heard; its first `joined` windows were accepted before."""
        self._begin = joined
        self._pieces = []

    def pause_turn(self, windows: int) -> None:
        """The turn of so many windows pauses: what was said since the last pause is embedded."""
        if self.speech_ms < MIN_EMBEDDED_MS:
            return
        begin = self._begin

        def answer(sample: VoiceSample | None) -> None:
            if sample is None:
                return
            self._pieces = [each for each in self._pieces if each.begin < begin]
            self._pieces.append(_Piece(begin, windows, sample))
            if sample.speech_ms >= PIECE_MS:
                self._speech, self._levels, self._begin = [], [], windows

        self._ask(self._speech, answer)

    def end_turn(self, joined: int) -> list[tuple[int, int]] | None:
        """Ranges of windows that others spoke, in a turn that has ended; None: the whole turn is theirs."""
        pieces, known = self._pieces, self.voices
        self.clear()
        if not pieces:
            return []
        whole = joined_voice([piece.sample for piece in pieces])
        if not known.is_enrolled:
            known.accept(whole)
            return []
        verdicts = [verdict_of(known.score(piece.sample.vector), piece.sample.speech_ms, False) for piece in pieces]
        is_users = verdict_of(known.score(whole.vector), whole.speech_ms, is_last=True) is SpeakerVerdict.USER
        if not is_users and SpeakerVerdict.USER not in verdicts:
            if not known.refuse(whole):
                return []
            return [(joined, pieces[-1].end)] if joined else None
        foreign = [
            each
            for each, verdict in zip(pieces, verdicts, strict=True)
            if verdict is SpeakerVerdict.OTHER and each.sample.speech_ms >= SURE_PIECE_MS
        ]
        own = [each.sample for each in pieces if each not in foreign]
        if own:
            known.accept(joined_voice(own))
        return [(each.begin, each.end) for each in foreign] if own else []

    def _ask(self, speech: Sequence[Samples], answer: Callable[[VoiceSample | None], None]) -> None:
        speech = speech[-MAX_EMBEDDED_MS // WINDOW_MS :]
        level = 10 * float(np.log10(np.mean(10.0 ** (np.array(self._levels) / 10))))
        self.is_asked, generation = True, self._generation

        def answered(vector: Samples | None) -> None:
            if generation == self._generation:
                self.is_asked = False
                answer(None if vector is None else VoiceSample(vector, len(speech) * WINDOW_MS, level))

        self._request(np.concatenate(speech), answered)
