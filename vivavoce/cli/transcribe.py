"""`viva transcribe FILE…`: transcripts of files, folders or standard input."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from vivavoce.cli.options import DeviceSpec, Json, Padding, complete_model, made_folder, print_json
from vivavoce.errors import InputError, VivaError

if TYPE_CHECKING:
    from vivavoce.asr import Transcriber, Transcript

STANDARD_INPUT = "-"
SOUND_ENDINGS = frozenset(
    (".wav", ".flac", ".ogg", ".opus", ".mp3", ".m4a", ".mp4", ".aac", ".webm", ".aiff", ".aif", ".wma", ".mkv", ".mov")
)


class Format(StrEnum):
    """The format of a transcript."""

    text = "text"
    json = "json"
    verbose_json = "verbose_json"
    srt = "srt"
    vtt = "vtt"


class BackendChoice(StrEnum):
    """The implementation that transcribes."""

    auto = "auto"
    ours = "ours"
    faster_whisper = "faster-whisper"
    moonshine = "moonshine"


def transcribe(
    files: Annotated[list[str], typer.Argument(help="Sound files, folders of them, or - for standard input.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Bundled name, name of `viva models`, folder, OpenAI's .pt file or hub id. Default: the best in the "
            "cache, else mini-asr.",
            autocompletion=complete_model,
        ),
    ] = None,
    backend: Annotated[BackendChoice, typer.Option(help="The implementation that transcribes.")] = BackendChoice.auto,
    language: Annotated[str | None, typer.Option(help="A code such as en or zh. Default: detected.")] = None,
    translate: Annotated[
        bool, typer.Option("--translate", help="Translate into English, if the model supports it.")
    ] = False,
    format: Annotated[Format, typer.Option("--format", "-f", help="The format of the transcript.")] = Format.text,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            file_okay=False,
            callback=made_folder,
            help="Write one file per recording to this folder. Default: stdout.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text assumed to precede the audio, for names and spellings.")
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="Text that the transcript starts with.")] = None,
    hotword: Annotated[list[str] | None, typer.Option(help="An expected word; may be repeated.")] = None,
    word_times: Annotated[
        bool, typer.Option("--word-times", help="Add the time of every word (verbose_json).")
    ] = False,
    beams: Annotated[int, typer.Option(min=1, help="Beam width; 1 is greedy.")] = 1,
    padding: Annotated[
        Padding, typer.Option(help="full: compute whole windows; trim: only their audio.")
    ] = Padding.full,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft model: mini-asr-draft, a folder of `viva train draft`, or a smaller Whisper."),
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Medusa heads: mini-asr-heads, or a folder of `viva train medusa`.")
    ] = None,
    lookup: Annotated[
        bool, typer.Option("--lookup", help="Draft by prompt lookup: n-grams of the text so far.")
    ] = False,
    gate: Annotated[
        bool, typer.Option("--gate/--no-gate", help="Drop segments in which no speech is detected.")
    ] = True,
    denoise: Annotated[
        bool, typer.Option("--denoise", help="Suppress noise before the recording is transcribed.")
    ] = False,
    device: DeviceSpec = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16, or int8 on CPUs.")] = "auto",
    as_json: Json = False,
) -> None:
    """Transcribe files, folders or standard input; a file that fails does not stop the others."""
    from vivavoce.asr import Transcriber
    from vivavoce.asr.default import MINIATURE, default_recogniser, explain
    from vivavoce.asr.drafts import DraftChoice

    sources = list(sounds_of(files))
    started = time.monotonic()
    choice = DraftChoice(draft, heads, lookup)
    if model is None:
        is_special = translate or lookup or word_times or bool(prompt or prefix or hotword)
        model = MINIATURE if draft or heads else default_recogniser(language, is_special)
        _print_error(explain(model))
    transcriber = Transcriber.load(model, backend.value, device, dtype, choice, gate)
    loaded = time.monotonic() - started
    options: dict[str, Any] = {
        "language": language, "task": "translate" if translate else "transcribe", "prompt": prompt, "prefix": prefix,
        "hotwords": hotword or (), "word_times": word_times, "padding": padding.value, "beams": beams,
    }  # fmt: skip
    results = []
    with progress() as bar:
        for name, source in sources:
            result = _transcribe_file(name, source, transcriber, options, bar, denoise)
            if (transcript := result.pop("transcript", None)) is not None:
                _deliver(name, render_as(transcript, format, word_times), format, out, len(sources) > 1, as_json)
            results.append(result)
    summary = {"model": model, "load_seconds": round(loaded, 3), "files": results}
    _finish(summary, transcriber if choice.is_any else None, as_json)


def _finish(summary: dict[str, Any], drafting: "Transcriber | None", as_json: bool) -> None:
    """Print the report of drafts and the JSON; exit code 1 where a file failed."""
    if drafting is not None:
        report = drafting.report()
        summary["drafts"] = report.as_dict()
        _print_error(report.line())
    if as_json:
        print_json(summary)
    if any("error" in result for result in summary["files"]):
        raise typer.Exit(1)


def sounds_of(names: list[str]) -> Iterator[tuple[str, Path | bytes]]:
    """Name and source of every audio file: files, those in folders in order, and standard input."""
    for name in names:
        path = Path(name).expanduser()
        if name == STANDARD_INPUT:
            yield name, sys.stdin.buffer.read()
        elif path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in SOUND_ENDINGS)
            if not inside:
                raise InputError(f"{path} holds no sound file ({', '.join(sorted(SOUND_ENDINGS))})")
            yield from ((str(file), file) for file in inside)
        else:
            yield name, path


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress bar on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} s"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar


def _transcribe_file(
    name: str,
    source: Path | bytes,
    transcriber: "Transcriber",
    options: dict[str, Any],
    bar: Progress,
    denoise: bool = False,
) -> dict[str, Any]:
    """The transcript of one file with its figures, or its error, which is printed."""
    from vivavoce.asr import RATE, transcribe
    from vivavoce.audio.denoise import denoised
    from vivavoce.audio.io import Sound, read

    try:
        sound = read(source, rate=RATE)
        if denoise:
            sound = Sound(denoised(sound.samples[0]).mixed, RATE)
        task: TaskID = bar.add_task(name, total=sound.seconds)
        started = time.monotonic()
        try:
            transcript = transcribe(
                sound, transcriber, **options, on_segment=lambda segment: bar.update(task, completed=segment.end)
            )
        finally:
            bar.remove_task(task)
    except VivaError as error:
        _print_error(str(error) if name in str(error) else f"{name}: {error}")
        return {"file": name, "error": str(error)}
    seconds = time.monotonic() - started
    return {
        "file": name,
        "text": transcript.text,
        "language": transcript.language,
        "duration": round(transcript.seconds, 3),
        "seconds": round(seconds, 3),
        "rtf": round(seconds / max(transcript.seconds, 1e-9), 4),
        "segments": [
            {"start": round(segment.start, 3), "end": round(segment.end, 3), "text": segment.text}
            for segment in transcript.segments
        ],
        "transcript": transcript,
    }


def _print_error(line: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(line, markup=False)


def _deliver(name: str, rendered: str, format: Format, out: Path | None, has_several: bool, is_quiet: bool) -> None:
    """Write a transcript to its file, or to stdout under its name."""
    if out is not None:
        ending = {"text": "txt", "verbose_json": "json"}.get(format.value, format.value)
        stem = "stdin" if name == STANDARD_INPUT else Path(name).stem
        (out / f"{stem}.{ending}").write_text(rendered, encoding="utf8")
    elif not is_quiet:
        typer.echo((f"{name}: " if has_several and format is Format.text else "") + rendered.rstrip("\n"))


def render_as(transcript: "Transcript", format: Format, word_times: bool = False) -> str:
    """A transcript in one of the formats."""
    import json
    from dataclasses import replace

    from vivavoce.server.rest.transcripts import render, wire_segment

    segments = [replace(wire_segment(segment), language=transcript.language) for segment in transcript.segments]
    result = render(segments, format.value, transcript.seconds, word_times)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, indent=2) + "\n"
