"""`viva say` and `viva voices …`."""

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vivavoce.cli.options import DeviceSpec, Json, complete_model, print_json, table
from vivavoce.errors import InputError

if TYPE_CHECKING:
    from vivavoce.audio.io import Sound
    from vivavoce.tts.interface import SpeechModel
    from vivavoce.tts.output import SoundSink

app = typer.Typer()
voices = typer.Typer(no_args_is_help=True, help="Voices kept on this machine: add, list and remove them.")
app.add_typer(voices, name="voices")

SpeechModelName = Annotated[
    str, typer.Option("--model", help="Bundled name, folder or hub id.", autocompletion=complete_model)
]
VoiceFolder = Annotated[Path | None, typer.Option("--voices", file_okay=False, help="Another folder of kept voices.")]
STANDARD_STREAM = "-"
SHORTEST_LETTER = 0.02  # seconds, of the fastest speaker


@app.command()
def say(
    text: Annotated[str | None, typer.Argument(help="What to say; - or nothing: read standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", dir_okay=False, help="A text file to say.")] = None,
    voice: Annotated[str | None, typer.Option(help="A voice's name, or a recording to sound like.")] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="A sound file, or - for standard output; else it is played.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="wav, flac, mp3, opus or pcm (16 bit); else by the file's ending.")
    ] = None,
    speed: Annotated[float, typer.Option(help="0.5 to 2, at the voice's own pitch.")] = 1.0,
    pause: Annotated[float, typer.Option(help="0 to 10 times the usual silence between sentences.")] = 1.0,
    rate: Annotated[
        int | None, typer.Option(min=1000, max=384_000, help="Samples a second; else the model's own.")
    ] = None,
    mono: Annotated[bool, typer.Option("--mono", help="One channel.")] = False,
    continues: Annotated[
        bool, typer.Option("--continue", help="Go on from the voice's recording; its words must be kept with it.")
    ] = False,
    instructions: Annotated[
        str, typer.Option(help="How to say it, for models that can be told: happy, sichuan, or in your own words.")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another take.")] = 0,
    model: SpeechModelName = "mini-tts",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16, or int8 on CPUs.")] = "auto",
    voice_folder: VoiceFolder = None,
    device: DeviceSpec = "auto",
    as_json: Json = False,
) -> None:
    """Say a text: its sound goes to a file, to standard output or to the loudspeaker from the first frame on."""
    from vivavoce.tts.frame_model import FrameTTS
    from vivavoce.tts.interface import SpeakingStyle, open_speech_model, read_text
    from vivavoce.tts.output import shaped
    from vivavoce.tts.style import told as told_to
    from vivavoce.tts.voices import VoiceStore

    wanted = read_text(text, file, sys.stdin.buffer.read)
    started = time.monotonic()
    speaks = open_speech_model(model, device, dtype)
    if voice_folder is not None:
        speaks.shelf = VoiceStore(speaks.shelf.built_in, voice_folder)
    tuned = ExitStack()
    if isinstance(speaks, FrameTTS):
        speaks.warm_up()
        tuned.enter_context(speaks.tuned_threads())
    loaded = time.monotonic()
    at, channels = rate or speaks.rate, 1 if mono else speaks.channels
    manner = told_to(speaks, instructions, SpeakingStyle(speed, pause, seed, continues=continues))
    pieces = shaped(speaks.stream(wanted, _voice(voice, speaks), manner), speaks.channels, speaks.rate, at, mono)
    target, first, samples = _target(out, format, at, channels), None, 0
    try:
        for piece in pieces:
            first = first or time.monotonic()
            samples += piece.shape[1]
            target.write(piece)
    finally:
        target.close()
        tuned.close()
    seconds, ended = samples / at, time.monotonic()
    told = {
        "seconds": seconds, "rate": at, "channels": channels, "load_seconds": loaded - started,
        "first_sound_seconds": (first or ended) - loaded, "real_time_factor": (ended - loaded) / max(seconds, 1e-9),
    }  # fmt: skip
    if as_json and out != STANDARD_STREAM:
        print_json(told)
    else:
        Console(stderr=True, highlight=False).print(
            f"{seconds:.2f} s at {at} Hz, first sound after {told['first_sound_seconds'] * 1e3:.0f} ms, "
            f"RTF {told['real_time_factor']:.2f}"
        )
    if seconds * speed < SHORTEST_LETTER * len(wanted):
        words = "; --continue needs the very words of the recording" if continues else ""
        Console(stderr=True, highlight=False).print(f"→ too short to be all of the text: try another --seed{words}")


def _target(out: str | None, format: str | None, rate: int, channels: int) -> "SoundSink":
    from vivavoce.tts.output import Player, sink

    if out is None and format is None:
        return Player(rate, channels)
    if out is None or out == STANDARD_STREAM:
        return sink(sys.stdout.buffer, format or "wav", rate, channels)
    file = Path(out)
    return sink(file, format or file.suffix.removeprefix(".").lower() or "wav", rate, channels)


def _voice(given: str | None, speaks: "SpeechModel") -> "str | Sound | None":
    """A kept voice's name, or the sound of a recording."""
    if given is None or given in speaks.shelf or not Path(given).is_file():
        return given
    from vivavoce.audio.io import read

    return read(given, mono=False)


@voices.command("add")
def voices_add(
    name: Annotated[str, typer.Argument(help="What to call the voice.")],
    recording: Annotated[
        Path | None, typer.Argument(dir_okay=False, help="Three to eight seconds of its speech.")
    ] = None,
    wav: Annotated[Path | None, typer.Option("--wav", dir_okay=False, help="The recording, as an option.")] = None,
    consent: Annotated[
        str, typer.Option(help="What the speaker agreed to, in words or as the id of a recorded consent.")
    ] = "",
    text: Annotated[str, typer.Option(help="What the recording says, for models that want to know.")] = "",
    model: SpeechModelName = "mini-tts",
    voice_folder: VoiceFolder = None,
    device: DeviceSpec = "auto",
    as_json: Json = False,
) -> None:
    """Keep a voice of a recording; any model here can speak with it then."""
    from vivavoce.audio.io import read
    from vivavoce.tts.interface import open_speech_model
    from vivavoce.tts.voices import VoiceStore

    file = recording or wav
    if file is None or (recording and wav):
        raise InputError("a voice is made of one recording; give it as FILE or with --wav")
    speaks = open_speech_model(model, device)
    if voice_folder is not None:
        speaks.shelf = VoiceStore(speaks.shelf.built_in, voice_folder)
    kept = speaks.add_voice(name, read(file, mono=False), consent, text)
    if as_json:
        print_json({"name": kept.name, "frames": len(kept.codes), "consent": kept.consent, "text": kept.text})
        return
    Console(highlight=False).print(f"{escape(name)} is kept in {escape(str(speaks.shelf.folder))}")
    if not consent:
        Console(stderr=True).print("→ note the speaker's agreement with --consent: nobody's voice without their word")


@voices.command("list")
def voices_list(voice_folder: VoiceFolder = None, as_json: Json = False) -> None:
    """The voices that were added here, and who agreed to what."""
    from vivavoce.tts.voices import VoiceStore

    shelf = VoiceStore(folder=voice_folder)
    kept = [shelf.get(name) for name in shelf.names()]
    if as_json:
        columns = ("name", "codec", "consent", "created", "text")
        print_json([{column: getattr(voice, column) for column in columns} for voice in kept])
        return
    listed = table(f"Voices in {shelf.folder}", "voice", "added", "consent", "says")
    for voice in kept:
        listed.add_row(voice.name, time.strftime("%Y-%m-%d", time.localtime(voice.created)), voice.consent, voice.text)
    Console().print(listed)


@voices.command("remove")
def voices_remove(name: str, voice_folder: VoiceFolder = None) -> None:
    """Forget a voice and its recording."""
    from vivavoce.tts.voices import VoiceStore

    VoiceStore(folder=voice_folder).remove(name)
    Console(highlight=False).print(f"{escape(name)} is gone")
