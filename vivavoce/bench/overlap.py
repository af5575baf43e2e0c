"""`viva bench overlap`: which sounds over a reply stop it, and how soon, by the rules and by the trained model.

The sounds are those of the duplex lab's scenes, in voices, rooms and recordings that no training has. They go through
the real audio front end and the barge-in decision on the sound's own time: no server, no clock, the same figures on any
machine. What the reply does after the decision is measured by `viva bench duplex`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vivavoce.audio.io import Sound
from vivavoce.audio.level import from_db
from vivavoce.audio.vad import RATE, voice_activity
from vivavoce.bench.duplex import scenes, texts
from vivavoce.bench.duplex.lab import speech_folder
from vivavoce.bench.duplex.scenes import DuplexScene, SceneSounds
from vivavoce.bench.duplex.speech import SpokenTexts
from vivavoce.bench.turn_caller import NOISE_SECONDS, QUIET_ROOM_DBFS
from vivavoce.bench.turn_sounds import RATE as WIRE_RATE
from vivavoce.bench.turn_sounds import SPEECH_DBFS, at_level, gather, room_noise
from vivavoce.dialogue.barge_in import OverlapClassifier, OverlapJudge, UserLevel
from vivavoce.dialogue.front_end import AudioWindow
from vivavoce.dialogue.model_barge_in import ModelClassifier
from vivavoce.dialogue.overlap_model import BUNDLED
from vivavoce.evaluation.overlaps import Samples, Stop, heard_each, judge, user_level

REPLY_DBFS = -20.0
GAP_SECONDS = 0.2  # between the sentences of a reply
BEGINS = (1.1, 1.5, 1.9, 1.3)
"""Seconds into the reply at which the sound is heard."""
TAIL_SECONDS = 0.5
TOGETHER = 32  # calls that go through the front end together
ECHO_SECONDS = 4.0  # of a reply that only its echo may stop
CONDITIONS = ("headset", "room", "telephone", "noise")
COUNTS = {  # calls of each language
    "interruption": 40,
    "user backchannel": 30,
    "vocal tic": 80,
    "noise": 100,
    "side talk": 24,
    "background": 50,
    "echo": 50,
    "echo interruption": 30,
}


@dataclass(frozen=True)
class Overlap:
    """A call up to the end of a sound over its reply, as the front end gives it."""

    kind: str
    language: str
    condition: str
    name: str
    begin: float
    """Seconds into the call."""
    levels: UserLevel = field(repr=False)
    windows: list[AudioWindow] = field(repr=False)


def kind_of(scene: DuplexScene) -> str:
    """The row of the table that a scene belongs to."""
    if scene.name == "interruption":
        is_spoken = scene.over_name in texts.INTERRUPTIONS[scene.language]
        return "interruption" if is_spoken else "interruption, people"
    if scene.name == "vocal tic" and scene.number % 4 == 3:
        return "filler word"
    if scene.name in ("vocal tic", "noise"):
        return scene.over_name.rsplit(" ", 1)[0]
    return scene.name


def overlaps(made: Sequence[DuplexScene]) -> Iterator[Overlap]:
    """The calls of scenes, through the front end."""
    activity = voice_activity()
    replies = [each.sound for each in gather().questions]
    known: dict[tuple[str, str, str], UserLevel] = {}  # by text, voice and condition
    for start in range(0, len(made), TOGETHER):
        group = made[start : start + TOGETHER]
        calls = [_call(scene, replies) for scene in group]
        for scene, (begin, _, _), windows in zip(
            group, calls, heard_each([call[1:] for call in calls], activity), strict=True
        ):
            asked = scene.exchange.question
            before = asked.sound if scene.usual is None else scene.usual
            key = (asked.text if scene.usual is None else scene.over_name, asked.voice, scene.condition)
            if key not in known:
                question = _at_16k(before + _noise(scene, len(before)))
                known[key] = user_level(heard_each([(question, question[:0])], activity, echo_guard=False)[0])
            yield Overlap(kind_of(scene), scene.language, scene.condition, scene.over_name, begin, known[key], windows)


def _call(scene: DuplexScene, replies: Sequence[Samples]) -> tuple[float, Samples, Samples]:
    """When the sound over the reply begins, the microphone's sound and the reply."""
    sound = scene.exchange.over.sound if scene.exchange.over is not None else np.zeros(0, np.float32)
    begin = BEGINS[scene.number % len(BEGINS)] if len(sound) else 0.0
    seconds = begin + len(sound) / WIRE_RATE + TAIL_SECONDS if len(sound) else ECHO_SECONDS
    output = _reply(replies, scene.number, seconds)
    microphone = _with_room(scene, output)
    first = round(begin * WIRE_RATE)
    microphone[first : first + len(sound)] += sound
    return begin, _at_16k(microphone), _at_16k(output)


def _reply(sentences: Sequence[Samples], number: int, seconds: float) -> Samples:
    """The loudspeaker's sound: sentences from the number-th on."""
    gap = np.zeros(round(GAP_SECONDS * WIRE_RATE), np.float32)
    pieces: list[Samples] = []
    while sum(map(len, pieces)) < seconds * WIRE_RATE:
        pieces += [sentences[(number + len(pieces)) % len(sentences)], gap]
    return at_level(np.concatenate(pieces)[: round(seconds * WIRE_RATE)], REPLY_DBFS)


def _with_room(scene: DuplexScene, output: Samples) -> Samples:
    """What the microphone hears apart from the user: noise, and the loudspeaker's echo."""
    environment = scene.scene.environment
    microphone = _noise(scene, len(output)).copy()
    if environment.echo_db is not None:
        response = environment.echo_response
        echo = output if response is None else np.convolve(output, response)[: len(output)]
        late = round(environment.echo_delay * WIRE_RATE)
        microphone[late:] += np.float32(from_db(environment.echo_db)) * echo[: len(output) - late]
    return microphone


def _noise(scene: DuplexScene, size: int) -> Samples:
    snr = scene.scene.environment.snr_db
    bed = room_noise(NOISE_SECONDS, QUIET_ROOM_DBFS if snr is None else SPEECH_DBFS - snr, scene.seed)
    return np.resize(bed, size).astype(np.float32)


def _at_16k(samples: Samples) -> Samples:
    return Sound(samples[None], WIRE_RATE).resampled(RATE).samples[0].astype(np.float32)


def make_scenes(found: SceneSounds, share: float = 1.0, languages: Sequence[str] = ("en", "zh")) -> list[DuplexScene]:
    """The scenes; recorded sounds are other ones in each language."""
    made: list[DuplexScene] = []
    for name, usual in COUNTS.items():
        count = max(1, round(usual * share))
        for number, language in enumerate(languages):
            first = number * count if name in ("vocal tic", "noise", "interruption") else 0
            made += scenes.script(found, count, (name,), (language,), CONDITIONS, first)
    return made


def row_of(stops: Sequence[Stop]) -> dict[str, Any]:
    """The share of sounds that stopped the reply, and how soon."""
    times = [1e3 * each.seconds for each in stops if each.seconds is not None]
    return {
        "sounds": len(stops),
        "stopped": len(times) / max(1, len(stops)),
        "ms_p50": float(np.percentile(times, 50)) if times else None,
        "ms_p90": float(np.percentile(times, 90)) if times else None,
    }


def table_of(found: Sequence[Overlap], judges: Mapping[str, OverlapJudge]) -> list[dict[str, Any]]:
    """A row for each kind and language, with the figures of each way to decide."""
    stops = {name: [judge(each.windows, by, each.levels, each.begin) for each in found] for name, by in judges.items()}
    rows = []
    for kind in dict.fromkeys(each.kind for each in found):
        for language in dict.fromkeys(each.language for each in found):
            chosen = [index for index, each in enumerate(found) if (each.kind, each.language) == (kind, language)]
            if chosen:
                figures = {name: row_of([all_stops[index] for index in chosen]) for name, all_stops in stops.items()}
                rows.append({"kind": kind, "language": language, **figures})
    return rows


def run(
    sounds: Path | None = None,
    people: Path | None = None,
    weights: Path | None = None,
    share: float = 1.0,
    out: Path | None = None,
) -> dict[str, Any]:
    """Judge every overlap by the rules and by the model; print a table, write `overlap.json` to `out`."""
    from rich.console import Console
    from rich.table import Table

    judges: dict[str, OverlapJudge] = {"rules": OverlapClassifier()}
    if weights is not None or BUNDLED.is_file():
        judges["model"] = ModelClassifier(weights or BUNDLED)
    found = scenes.gather(SpokenTexts(speech_folder()), sounds, people)
    rows = table_of(list(overlaps(make_scenes(found, share))), judges)
    table = Table(title="sounds over a reply that stop it, and after how many milliseconds (p50, p90)")
    for title in ("sound", "", "count", *judges):
        table.add_column(title, justify="left" if title in ("sound", "") else "right")
    for row in rows:
        shown = [_shown(row[name]) for name in judges]
        table.add_row(row["kind"], row["language"], str(row[next(iter(judges))]["sounds"]), *shown)
    Console(stderr=True, width=110).print(table)
    result = {"what": "sounds over a reply, judged offline", "recorded": sounds is not None, "rows": rows}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "overlap.json").write_text(json.dumps(result, indent=1), encoding="utf8")
    return result


def _shown(figures: Mapping[str, Any]) -> str:
    if figures["ms_p50"] is None:
        return f"{figures['stopped']:.0%}"
    return f"{figures['stopped']:.0%} ({figures['ms_p50']:.0f}, {figures['ms_p90']:.0f})"
