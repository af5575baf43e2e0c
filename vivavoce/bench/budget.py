"""`viva bench budget`: what a conversation costs a CPU, stage by stage, and how many of them it has time for.

Times are of the processor, not of the clock, so that they mean something on a machine that is busy. Stages that many
conversations share in one call are measured with as many as are asked for.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vivavoce import hub
from vivavoce.audio.echo import EchoGuard
from vivavoce.audio.level import buzz
from vivavoce.audio.vad import WINDOW, WINDOW_SECONDS, voice_activity
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import stage
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech.codec import EAR_RATE, VOICE_RATE
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, Turn
from vivavoce.nn.process_settings import torch_threads
from vivavoce.s2s.loading import load_moss_speech
from vivavoce.s2s.moss_speech import MossSpeechBackend

HISTORY_SECONDS = 6.0
REPEATS = 12
WORDS_PER_SECOND = 14.0  # rows of text that a second of speech is written down in


@dataclass(frozen=True)
class StageCost:
    """Milliseconds of the processor for a second of conversation, alone and beside others."""

    stage: str
    when: str
    alone_ms: float
    shared_ms: float


def run(model: str = "mini-speech", sessions: int = 8, out: Path | None = None) -> dict[str, Any]:
    """Measure every stage, print a table, and say how many sessions that speak at once fit into this machine."""
    if sessions < 1:
        raise InputError(f"a budget is for at least 1 session, not {sessions}")
    with torch_threads.held(1):
        with stage(f"loading {model}"):
            pipeline = load_moss_speech(hub.resolve(model), device="cpu")
        with stage("measuring"), torch.inference_mode():
            costs = [*_listening(pipeline, sessions), *_speaking(pipeline, sessions), *_always()]
    result = _result(model, sessions, costs)
    _show(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "budget.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


def _result(model: str, sessions: int, costs: list[StageCost]) -> dict[str, Any]:
    speaking = [cost for cost in costs if cost.when != "listens"]
    listening = [cost for cost in costs if cost.when != "speaks"]
    cores = os.cpu_count() or 1
    return {
        "what": "processor time of a conversation",
        "model": model,
        "sessions": sessions,
        "cores": cores,
        "costs": [asdict(cost) for cost in costs],
        "speaks_alone_ms": sum(cost.alone_ms for cost in speaking),
        "speaks_shared_ms": sum(cost.shared_ms for cost in speaking),
        "listens_shared_ms": sum(cost.shared_ms for cost in listening),
        "cores_for_all_speaking": sessions * sum(cost.shared_ms for cost in speaking) / 1e3,
        "cores_for_all_listening": sessions * sum(cost.shared_ms for cost in listening) / 1e3,
    }


def _listening(pipeline: MossSpeechBackend, sessions: int) -> list[StageCost]:
    """While the user speaks: codes of the ear, each prefilled as it comes."""
    ear, samples = pipeline.codec.ear, torch.from_numpy(buzz(HISTORY_SECONDS, EAR_RATE).samples[0])
    seconds = ear.samples_per_code / EAR_RATE
    pieces = samples.split(ear.samples_per_code)[:-1]

    def heard(streams: int) -> float:
        states = [ear.initial_state() for _ in range(streams)]
        times = []
        for piece in pieces:
            spent, (_, states) = _spent(ear.step_batch, states, [piece] * streams)
            times.append(spent)
        return float(np.median(times)) / streams / seconds

    def prefilled(streams: int) -> float:
        core = pipeline.core
        sequences = [core.open(_past(pipeline)) for _ in range(streams)]
        _settle(pipeline)
        times = []
        for number in range(REPEATS):
            for sequence in sequences:
                core.append(sequence, pipeline.prompt.codes([number]))
            times.append(_spent(core.step)[0])
        for sequence in sequences:
            core.close(sequence)
        return float(np.median(times)) / streams / seconds

    return [
        StageCost("ear", "listens", heard(1), heard(sessions)),
        StageCost("language model, reading", "listens", prefilled(1), prefilled(sessions)),
    ]


def _speaking(pipeline: MossSpeechBackend, sessions: int) -> list[StageCost]:
    """While the machine speaks: rows, mel, sound, and the words of what is said."""
    frame = pipeline.policy.grain.frame_seconds
    rows = {streams: _rows(pipeline, streams, "speech") / streams for streams in (1, sessions)}
    words = {streams: _rows(pipeline, streams, "text") / streams for streams in (1, sessions)}
    together = min(sessions, pipeline.voice.most)
    voices = {streams: _voice(pipeline, streams) for streams in (1, together)}
    return [
        StageCost("language model, speaking", "speaks", rows[1] / frame, rows[sessions] / frame),
        StageCost("flow", "speaks", voices[1][0], voices[together][0]),
        StageCost("vocoder", "speaks", voices[1][1], voices[together][1]),
        StageCost("words of the reply", "speaks", words[1] * WORDS_PER_SECOND, words[sessions] * WORDS_PER_SECOND),
    ]


def _rows(pipeline: MossSpeechBackend, streams: int, modality: str) -> float:
    """Milliseconds for the next row of so many replies."""
    core, is_speech = pipeline.core, modality == "speech"
    past = _past(pipeline) + pipeline.prompt.open_reply("speech" if is_speech else "text")
    sequences = [core.open(past) for _ in range(streams)]
    _settle(pipeline)
    for sequence in sequences:
        core.generate(sequence, Generation(GREEDY, max_new_rows=4 * REPEATS, min_new_rows=4 * REPEATS))
    core.step()
    times = [spent for spent, made in (_spent(core.step) for _ in range(REPEATS)) if len(made) == streams]
    for sequence in sequences:
        core.close(sequence)
    # A reply of text may end early; a row of it costs what a row of speech does.
    return float(np.median(times)) if times else _rows(pipeline, streams, "speech")


def _voice(pipeline: MossSpeechBackend, streams: int) -> tuple[float, float]:
    """Milliseconds of flow and vocoder for a second of sound, in chunks as they are once a reply runs."""
    codec, grain = pipeline.codec, pipeline.policy.grain
    size = 2 * grain.frames
    codes = torch.arange(REPEATS * size) % codec.flow.config.vocabulary
    states = [codec.start(pipeline.voice_of(None), pipeline.options.left_chunks) for _ in range(streams)]
    _, states = codec.step_batch(states, [codes[: size + grain.lookahead]] * streams, [False] * streams)
    flows, vocoders = [state.flow for state in states], [state.vocoder for state in states]
    last, times = [False] * streams, []
    for piece in codes.split(size)[1:]:
        mel_spent, (mels, flows) = _spent(codec.flow.step_batch, flows, [piece] * streams, last)
        given = [mel[None] for mel in mels]
        sound_spent, (sounds, vocoders) = _spent(codec.vocoder.step_batch, vocoders, given, last)
        seconds = streams * sounds[0].shape[-1] / VOICE_RATE
        times.append((mel_spent / seconds, sound_spent / seconds))
    flow, vocoder = np.median(np.array(times), axis=0)
    return float(flow), float(vocoder)


def _always() -> list[StageCost]:
    """Every 32 ms of the microphone, whoever speaks."""
    activity, guard = voice_activity(), EchoGuard()
    window = buzz(1.0, EAR_RATE).samples[0][:WINDOW]
    listening, room = activity.initial_state(), guard.initial_state()
    spent = {
        "voice activity": _median(activity.step, listening, window),
        "echo": _median(guard.step, room, window, window),
    }
    return [StageCost(name, "always", each / WINDOW_SECONDS, each / WINDOW_SECONDS) for name, each in spent.items()]


def _past(pipeline: MossSpeechBackend) -> list[Row]:
    codes = [number % 64 for number in range(round(HISTORY_SECONDS / pipeline.policy.grain.frame_seconds))]
    turns = [Turn("system", DEFAULT_SYSTEM["speech"]), Turn("user", codes)]
    return [row for turn in turns for row in pipeline.prompt.turn(turn)]


def _settle(pipeline: MossSpeechBackend) -> None:
    while pipeline.core.has_work:
        pipeline.core.step()


def _median(action: Callable[..., Any], *given: Any) -> float:
    return float(np.median([_spent(action, *given)[0] for _ in range(10 * REPEATS)]))


def _spent(action: Callable[..., Any], *given: Any) -> tuple[float, Any]:
    """Milliseconds of this thread's processor, and what came of it."""
    begun = time.thread_time()
    result = action(*given)
    return 1e3 * (time.thread_time() - begun), result


def _show(result: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    sessions = result["sessions"]
    table = Table(box=SIMPLE_HEAD, title=f"{result['model']}: ms of a core for a second", title_justify="left")
    table.add_column("stage", no_wrap=True)
    table.add_column("when")
    for name in ("alone", f"one of {sessions}"):
        table.add_column(name, justify="right")
    for cost in result["costs"]:
        table.add_row(cost["stage"], cost["when"], f"{cost['alone_ms']:.1f}", f"{cost['shared_ms']:.1f}")
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{sessions} sessions need {result['cores_for_all_speaking']:.2f} cores while all are spoken to, "
        f"{result['cores_for_all_listening']:.2f} while all speak; this machine has {result['cores']}. "
        "What the event loop does for them comes on top."
    )
