"""`viva bench turn-end DATA`: when turn detection ends turns, after true ends and at pauses within sentences.

The data are the held-out voices and sentences of `viva train turn-end-data`. Each speaker falls silent, and the time
until the turn is ended is measured by the sound itself, with the voice activity and the turn detection of a server: a
pause within a sentence is taken over if it lasts longer than that.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.io import float_to_pcm16
from vivavoce.audio.vad import RATE, WINDOW, WINDOW_MS, SmartTurn, smart_turn_file, speech_probabilities, voice_activity
from vivavoce.bench.recognisers import asterisk_prompts
from vivavoce.dialogue.settings import TurnSettings
from vivavoce.dialogue.turn_taker import TurnEvent, TurnState, TurnTaker
from vivavoce.models.turn_end import BUNDLED, TurnEndModel
from vivavoce.train.turn_end.corpus import TurnUtterance, is_program, read_shards
from vivavoce.train.turn_end.examples import Pause, pauses

Samples = NDArray[np.float32]
TurnModel = Callable[[Samples], float]
LEAD, SILENCE = 0.4, 8.5  # seconds of silence before and after the speech
FLOOR_DB = -70.0
SPEECH_DB = -26.0
PERSON = "a person"
PROGRAMS = "programs"
PAUSES = (0.4, 0.7, 1.0, 1.2)
CUTS_AN_UTTERANCE = 2
EAGERNESS: tuple[Literal["high", "auto", "low"], ...] = ("high", "auto", "low")


@dataclass(frozen=True)
class SilentPlace:
    """A place where a speaker falls silent, with the probabilities of speech of its windows."""

    place: Pause
    sound: Samples
    end_ms: float
    """When the speech ends."""
    probabilities: Samples

    @property
    def kind(self) -> str:
        """`end`, `cut` (at a word within a sentence) or `beginning` (spoken as one, with a hesitation)."""
        return "cut" if self.place.is_cut else self.place.kind


@dataclass(frozen=True)
class Detection:
    """A way to detect the end of a turn."""

    name: str
    settings: TurnSettings
    model: TurnModel | None = None


def silent_places(utterances: Iterable[TurnUtterance]) -> list[SilentPlace]:
    """The ends, cuts and beginnings of spoken turns."""
    found = []
    for utterance in utterances:
        end, *cuts = pauses(utterance)
        chosen = cuts[:: max(1, len(cuts) // CUTS_AN_UTTERANCE)][:CUTS_AN_UTTERANCE]
        found += [_silent(place) for place in (end, *chosen)]
    return found


def people_utterances(root: Path) -> list[TurnUtterance]:
    """Prompts of a telephone system, spoken by a person; the ends of their words are not known."""
    return [
        TurnUtterance("held_out", "en", prompt.text, PERSON, True, samples=float_to_pcm16(prompt.samples.numpy()))
        for prompt in asterisk_prompts(root)
    ]


def _silent(place: Pause) -> SilentPlace:
    speech = place.sound()
    speech *= 10 ** (SPEECH_DB / 20) / max(1e-6, float(np.sqrt(np.square(speech).mean())))
    speech[-WINDOW // 8 :] *= np.linspace(1, 0, WINDOW // 8, dtype=np.float32)
    lead, silence = round(LEAD * RATE), round(SILENCE * RATE)
    sound = np.concatenate([np.zeros(lead, np.float32), speech, np.zeros(silence, np.float32)])
    sound += np.random.default_rng(place.end).normal(0, 10 ** (FLOOR_DB / 20), len(sound)).astype(np.float32)
    return SilentPlace(place, sound, (lead + len(speech)) / RATE * 1e3, speech_probabilities(voice_activity(), sound))


def silence_until_end(place: SilentPlace, detection: Detection) -> float:
    """Milliseconds of silence after which the turn is ended; infinite if it is not."""
    taker, state, finished = TurnTaker(detection.settings), TurnState(), None
    begin = last = 0.0
    for index, probability in enumerate(place.probabilities, start=1):
        event, state = taker.step(state, float(probability), finished)
        if event is TurnEvent.BEGAN:
            begin = max(0, state.speech_from_ms - detection.settings.prefix_padding_ms)
        elif event is TurnEvent.WENT_ON:
            finished = None
        elif event is TurnEvent.LIKELY_OVER and detection.model is not None:
            finished = detection.model(place.sound[int(begin) * RATE // 1000 : index * WINDOW])
        elif event is TurnEvent.OVER:
            finished, last = None, index * WINDOW_MS
    return last - place.end_ms if last > place.end_ms else float("inf")


def detections(weights: Path = BUNDLED) -> list[Detection]:
    """Silence alone, a model of `viva train turn-end` at each eagerness, and Smart Turn where it is installed."""
    found = [
        Detection("server_vad, 500 ms", TurnSettings()),
        Detection("server_vad, 1000 ms", TurnSettings(silence_duration_ms=1000)),
    ]
    model = _remembered(TurnEndModel.load(weights))
    for eagerness in EAGERNESS:
        settings = TurnSettings(detector="semantic", eagerness=eagerness)
        found.append(Detection(f"semantic_vad, {eagerness}", settings, model))
    if smart_turn_file() is not None:
        found.append(Detection("semantic_vad, auto, Smart Turn", TurnSettings(detector="semantic"), SmartTurn()))
    return found


def _remembered(model: TurnModel) -> TurnModel:
    """A model that answers the same sound once: eagerness changes no answer."""
    answers: dict[bytes, float] = {}

    def answer(samples: Samples) -> float:
        key = samples.tobytes()
        if key not in answers:
            answers[key] = model(samples)
        return answers[key]

    return answer


def score(detection: Detection, places: Sequence[SilentPlace]) -> dict[str, Any]:
    """Latency after ends, and the share of pauses of each length that are taken over, by speakers and kind."""
    silences = [silence_until_end(place, detection) for place in places]
    rows = []
    for speakers in sorted({_speakers(place) for place in places}):
        by_kind: dict[str, list[float]] = {"end": [], "cut": [], "beginning": []}
        for place, silence in zip(places, silences, strict=True):
            if _speakers(place) == speakers:
                by_kind[place.kind].append(silence)
        ends = by_kind["end"]
        rows.append(
            {
                "speakers": speakers,
                "ends": len(ends),
                "latency_ms_p50": float(np.percentile(ends, 50)),
                "latency_ms_p90": float(np.percentile(ends, 90)),
                **{
                    f"{kind}s_taken": {str(pause): share_under(by_kind[kind], pause * 1e3) for pause in PAUSES}
                    for kind in ("cut", "beginning")
                },
                "cuts": len(by_kind["cut"]),
                "beginnings": len(by_kind["beginning"]),
            }
        )
    return {"name": detection.name, "speakers": rows}


def _speakers(place: SilentPlace) -> str:
    """The language of Kokoro's voices, or which other kind of voice spoke."""
    utterance = place.place.utterance
    if utterance.voice == PERSON:
        return PERSON
    return PROGRAMS if is_program(utterance) else utterance.language


def share_under(values: Sequence[float], limit: float) -> float:
    """The share of values up to a limit."""
    return sum(value <= limit for value in values) / max(1, len(values))


def run(
    folder: Path,
    weights: Path | None = None,
    people: Path | None = None,
    max_turns: int | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Score each way of detecting ends; print a table, write `turn_end.json` to `out`."""
    from rich.console import Console
    from rich.table import Table

    places = silent_places(
        [*read_shards(folder, "held_out")[:max_turns], *(people_utterances(people) if people else [])[:max_turns]]
    )
    scored = [score(each, places) for each in detections(weights or BUNDLED)]
    table = Table(
        title=f"{len(places)} held-out places of {folder.name}; pauses taken over: cut / spoken as a beginning"
    )
    for title in ("detection", "", "p50 ms", "p90 ms", *(f"{pause} s" for pause in PAUSES)):
        table.add_column(title, justify="left" if title in ("detection", "") else "right")
    for each in scored:
        for row in each["speakers"]:
            taken = [f"{row['cuts_taken'][str(p)]:.0%} / {row['beginnings_taken'][str(p)]:.0%}" for p in PAUSES]
            table.add_row(
                each["name"], row["speakers"], f"{row['latency_ms_p50']:.0f}", f"{row['latency_ms_p90']:.0f}", *taken
            )
    Console(stderr=True, width=120).print(table)
    result = {"what": "turn ends on held-out voices and sentences", "folder": folder.name, "detections": scored}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "turn_end.json").write_text(json.dumps(result, indent=1), encoding="utf8")
    return result
