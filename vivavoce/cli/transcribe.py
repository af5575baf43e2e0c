"""`viva transcribe FILE…`: what is said in files, folders or standard input, written down."""

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
    from vivavoce.asr import Transcript
    from vivavoce.asr.transcriber import Transcriber

STANDARD_INPUT = "-"
SOUND_ENDINGS = frozenset(
    (".wav", ".flac", ".ogg", ".opus", ".mp3", ".m4a", ".mp4", ".aac", ".webm", ".aiff", ".aif", ".wma", ".mkv", ".mov")
)


class Format(StrEnum):
    """How a transcript is written."""

    text = "text"
    json = "json"
    verbose_json = "verbose_json"
    srt = "srt"
    vtt = "vtt"


class BackendChoice(StrEnum):
    """Who transcribes."""

    auto = "auto"
    ours = "ours"
    faster_whisper = "faster-whisper"
    moonshine = "moonshine"


def transcribe(
    files: Annotated[list[str], typer.Argument(help="Sound files, folders of them, or - for standard input.")],
    model: Annotated[
        str, typer.Option(help="Bundled name, folder, OpenAI's .pt file or hub id.", autocompletion=complete_model)
    ] = "mini-asr",
    backend: Annotated[BackendChoice, typer.Option(help="Who transcribes.")] = BackendChoice.auto,
    language: Annotated[str | None, typer.Option(help="A code such as en or zh; else the model listens first.")] = None,
    translate: Annotated[bool, typer.Option("--translate", help="Into English, where the model can.")] = False,
    format: Annotated[Format, typer.Option("--format", "-f", help="What is written.")] = Format.text,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", file_okay=False, callback=made_folder, help="A folder for a file each; else stdout."
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text taken to stand before the sound: names, spellings.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Text that the sound surely begins with.")] = None,
    hotword: Annotated[list[str] | None, typer.Option(help="A word that is expected; may be given again.")] = None,
    word_times: Annotated[bool, typer.Option("--word-times", help="The time of every word (verbose_json).")] = False,
    beams: Annotated[int, typer.Option(min=1, help="Texts followed side by side; 1 is greedy.")] = 1,
    padding: Annotated[Padding, typer.Option(help="trim: short sounds do not pay for a whole window.")] = Padding.full,
    draft: Annotated[
        str | None, typer.Option(help="mini-asr-draft, a folder of `viva train draft`, or a smaller Whisper.")
    ] = None,
    heads: Annotated[str | None, typer.Option(help="mini-asr-heads, or a folder of `viva train medusa`.")] = None,
    lookup: Annotated[bool, typer.Option("--lookup", help="Guess that the text goes on as it did before.")] = False,
    gate: Annotated[bool, typer.Option("--gate/--no-gate", help="Leave out text where no speech is detected.")] = True,
    device: DeviceSpec = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16; int8 with faster-whisper.")] = "auto",
    as_json: Json = False,
) -> None:
    """Write down what is said in files, folders or standard input; a file that fails does not stop the others."""
    from vivavoce.asr.drafts import DraftChoice
    from vivavoce.asr.transcriber import Transcriber

    found = list(sounds_of(files))
    began = time.monotonic()
    choice = DraftChoice(draft, heads, lookup)
    listener = Transcriber.load(model, backend.value, device, dtype, choice, gate)
    loaded = time.monotonic() - began
    wish: dict[str, Any] = {
        "language": language, "task": "translate" if translate else "transcribe", "prompt": prompt, "prefix": prefix,
        "hotwords": hotword or (), "word_times": word_times, "padding": padding.value, "beams": beams,
    }  # fmt: skip
    results, failed = [], 0
    with progress() as bar:
        for name, source in found:
            try:
                result = _transcribed(name, source, listener, wish, bar)
            except VivaError as error:
                failed += 1
                told_of = str(error) if name in str(error) else f"{name}: {error}"
                Console(stderr=True, highlight=False, soft_wrap=True).print(told_of, markup=False)
                results.append({"file": name, "error": str(error)})
                continue
            results.append(result | {"transcript": None})
            _deliver(name, result, format, out, len(found) > 1, word_times, quiet=as_json)
            results[-1] = {key: value for key, value in result.items() if key != "transcript"}
    told: dict[str, Any] = {"model": model, "load_seconds": round(loaded, 3), "files": results}
    if choice.is_any:
        report = listener.report()
        told["drafts"] = report.as_dict()
        Console(stderr=True, highlight=False, soft_wrap=True).print(report.line())
    if as_json:
        print_json(told)
    if failed:
        raise typer.Exit(1)


def sounds_of(names: list[str]) -> Iterator[tuple[str, Path | bytes]]:
    """Every sound that is named, by its name: files, those of folders in order, and standard input."""
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
    """A bar on stderr where somebody watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} s"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar


def _transcribed(
    name: str, source: Path | bytes, listener: "Transcriber", wish: dict[str, Any], bar: Progress
) -> dict[str, Any]:
    """One sound's transcript with its figures."""
    from vivavoce.asr import RATE, transcribe
    from vivavoce.audio.io import read

    sound = read(source, rate=RATE)
    task: TaskID = bar.add_task(name, total=sound.seconds)
    began = time.monotonic()
    try:
        transcript = transcribe(
            sound, listener, **wish, on_segment=lambda segment: bar.update(task, completed=segment.end)
        )
    finally:
        bar.remove_task(task)
    seconds = time.monotonic() - began
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


def _deliver(
    name: str, result: dict[str, Any], format: Format, out: Path | None, many: bool, word_times: bool, quiet: bool
) -> None:
    """Write a transcript to its file, or to stdout under its name."""
    written = written_as(result["transcript"], format, word_times)
    if out is not None:
        ending = {"text": "txt", "verbose_json": "json"}.get(format.value, format.value)
        stem = "stdin" if name == STANDARD_INPUT else Path(name).stem
        (out / f"{stem}.{ending}").write_text(written, encoding="utf8")
    elif not quiet:
        typer.echo((f"{name}: " if many and format is Format.text else "") + written.rstrip("\n"))


def written_as(transcript: "Transcript", format: Format, word_times: bool = False) -> str:
    """A transcript in one of the formats."""
    import json

    from vivavoce.server.rest.audio import WireSegment, WireWord, rendered

    segments = [
        WireSegment(
            segment.text,
            segment.start,
            segment.end,
            tuple(WireWord(word.text, word.start, word.end) for word in segment.words),
            transcript.language,
        )
        for segment in transcript.segments
    ]
    made = rendered(segments, format.value, transcript.seconds, word_times)
    return made if isinstance(made, str) else json.dumps(made, ensure_ascii=False, indent=2) + "\n"
