"""`viva say` and `viva voices …`: text to speech, and the voices stored on this machine."""

import sys
import time
from contextlib import ExitStack, closing
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
voices = typer.Typer(no_args_is_help=True, help="Voices stored on this machine: add, list and remove them.")
app.add_typer(voices, name="voices")

SpeechModelName = Annotated[
    str, typer.Option("--model", help="Bundled name, folder or hub id.", autocompletion=complete_model)
]
VoiceFolder = Annotated[
    Path | None,
    typer.Option("--voices", file_okay=False, help="Folder of stored voices. Default: ~/.local/share/vivavoce/voices."),
]
STANDARD_STREAM = "-"
MIN_LETTER_SECONDS = 0.02  # of very fast speech


@app.command()
def say(
    text: Annotated[str | None, typer.Argument(help="The text to speak. Default, and -: standard input.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", dir_okay=False, help="Speak the text of this file.")
    ] = None,
    voice: Annotated[str | None, typer.Option(help="The name of a voice, or a recording of one.")] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="A sound file, or - for standard output. Default: play it.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="wav, flac, mp3, opus or pcm (16 bit). Default: by the file's extension.")
    ] = None,
    speed: Annotated[float, typer.Option(help="0.5 to 2, at unchanged pitch.")] = 1.0,
    pause: Annotated[float, typer.Option(help="Factor for the silence between sentences, 0 to 10.")] = 1.0,
    rate: Annotated[
        int | None, typer.Option(min=1000, max=384_000, help="Sample rate in Hz. Default: the model's.")
    ] = None,
    mono: Annotated[bool, typer.Option("--mono", help="Write one channel.")] = False,
    continues: Annotated[
        bool, typer.Option("--continue", help="Continue the voice's recording, whose transcript must be stored.")
    ] = False,
    instructions: Annotated[
        str, typer.Option(help="Speaking style, for models that support it: happy, sichuan, or free text.")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    model: Annotated[
        str | None,
        typer.Option(
            help="Bundled name, folder or hub id. Default: hibari where it is installed, else mini-tts.",
            autocompletion=complete_model,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16, or int8 on CPUs.")] = "auto",
    voice_folder: VoiceFolder = None,
    device: DeviceSpec = "auto",
    as_json: Json = False,
) -> None:
    """Speak a text to a file, to standard output or to the loudspeaker, while it is generated."""
    from vivavoce.tts.frame_model import FrameTTS
    from vivavoce.tts.hibari import default_speech_model
    from vivavoce.tts.interface import SpeakingStyle, VoiceStore, open_speech_model, read_text
    from vivavoce.tts.output import shaped

    words = read_text(text, file, sys.stdin.buffer.read)
    clock = SpeechClock()
    tts = open_speech_model(model or default_speech_model(), device, dtype)
    if voice_folder is not None:
        tts.voices = VoiceStore(tts.voices.built_in, voice_folder)
    with ExitStack() as stack:
        if isinstance(tts, FrameTTS):
            tts.warm_up()
            stack.enter_context(tts.tuned_threads())
        clock.loaded = time.monotonic()
        out_rate, channels = rate or tts.rate, 1 if mono else tts.channels
        style = SpeakingStyle(speed, pause, seed, continues=continues)
        if instructions:
            from vivavoce.tts.style import with_instructions

            style = with_instructions(tts, instructions, style)
        chunks = shaped(tts.stream(words, _voice(voice, tts), style), tts.channels, tts.rate, out_rate, mono)
        target = stack.enter_context(closing(_target(out, format, out_rate, channels)))
        for chunk in chunks:
            clock.wrote(chunk.shape[1])
            target.write(chunk)
    figures = clock.figures(out_rate, channels)
    _report(figures, as_json and out != STANDARD_STREAM)
    if figures["seconds"] * speed < MIN_LETTER_SECONDS * len(words):
        hint = "; --continue needs the exact transcript of the recording" if continues else ""
        Console(stderr=True, highlight=False).print(f"→ too short to be all of the text: try another --seed{hint}")


class SpeechClock:
    """Times and samples of one synthesis."""

    def __init__(self) -> None:
        self.started = self.loaded = time.monotonic()
        self._first: float | None = None
        self._samples = 0

    def wrote(self, samples: int) -> None:
        """Count samples that are ready to be written."""
        self._first = self._first or time.monotonic()
        self._samples += samples

    def figures(self, rate: int, channels: int) -> dict[str, float]:
        """The measurements that `viva say` prints."""
        seconds, ended = self._samples / rate, time.monotonic()
        return {
            "seconds": seconds, "rate": rate, "channels": channels, "load_seconds": self.loaded - self.started,
            "first_sound_seconds": (self._first or ended) - self.loaded,
            "real_time_factor": (ended - self.loaded) / max(seconds, 1e-9),
        }  # fmt: skip


def _report(figures: dict[str, float], as_json: bool) -> None:
    if as_json:
        print_json(figures)
        return
    Console(stderr=True, highlight=False).print(
        f"{figures['seconds']:.2f} s at {figures['rate']} Hz, first sound after "
        f"{figures['first_sound_seconds'] * 1e3:.0f} ms, RTF {figures['real_time_factor']:.2f}"
    )


def _target(out: str | None, format: str | None, rate: int, channels: int) -> "SoundSink":
    from vivavoce.tts.output import Player, sink

    if out is None and format is None:
        return Player(rate, channels)
    if out is None or out == STANDARD_STREAM:
        return sink(sys.stdout.buffer, format or "wav", rate, channels)
    file = Path(out)
    return sink(file, format or file.suffix.removeprefix(".").lower() or "wav", rate, channels)


def _voice(given: str | None, tts: "SpeechModel") -> "str | Sound | None":
    """A stored voice's name, or the audio of a recording."""
    if given is None or given in tts.voices or not Path(given).is_file():
        return given
    from vivavoce.audio.io import read

    return read(given, mono=False)


@voices.command("add")
def voices_add(
    name: Annotated[str, typer.Argument(help="The name of the voice.")],
    recording: Annotated[
        Path | None, typer.Argument(dir_okay=False, help="A recording of three to eight seconds.")
    ] = None,
    wav: Annotated[
        Path | None, typer.Option("--wav", dir_okay=False, help="The recording, if not given as an argument.")
    ] = None,
    consent: Annotated[
        str, typer.Option(help="What the speaker agreed to, in words or as the id of a recorded consent.")
    ] = "",
    text: Annotated[str, typer.Option(help="The transcript of the recording, which some models need.")] = "",
    model: SpeechModelName = "mini-tts",
    voice_folder: VoiceFolder = None,
    device: DeviceSpec = "auto",
    as_json: Json = False,
) -> None:
    """Store a voice from a recording, for all models on this machine."""
    from vivavoce.audio.io import read
    from vivavoce.tts.interface import VoiceStore, open_speech_model

    file = recording or wav
    if file is None or (recording and wav):
        raise InputError("a voice needs one recording: as an argument or with --wav")
    tts = open_speech_model(model, device)
    if voice_folder is not None:
        tts.voices = VoiceStore(tts.voices.built_in, voice_folder)
    stored = tts.add_voice(name, read(file, mono=False), consent, text)
    if as_json:
        print_json({"name": stored.name, "frames": len(stored.codes), "consent": stored.consent, "text": stored.text})
        return
    Console(highlight=False).print(f"{escape(name)} is stored in {escape(str(tts.voices.folder))}")
    if not consent:
        Console(stderr=True).print("→ record the speaker's consent with --consent; do not clone a voice without it")


@voices.command("list")
def voices_list(voice_folder: VoiceFolder = None, as_json: Json = False) -> None:
    """List the stored voices with the consent of their speakers."""
    from vivavoce.tts.interface import VoiceStore

    store = VoiceStore(folder=voice_folder)
    stored = [store.get(name) for name in store.names()]
    if as_json:
        columns = ("name", "codec", "consent", "created", "text")
        print_json([{column: getattr(voice, column) for column in columns} for voice in stored])
        return
    listed = table(f"Voices in {store.folder}", "voice", "added", "consent", "transcript")
    for voice in stored:
        listed.add_row(voice.name, time.strftime("%Y-%m-%d", time.localtime(voice.created)), voice.consent, voice.text)
    Console().print(listed)


@voices.command("remove")
def voices_remove(
    name: Annotated[str, typer.Argument(help="The name of the voice.")], voice_folder: VoiceFolder = None
) -> None:
    """Remove a voice and its recording."""
    from vivavoce.tts.interface import VoiceStore

    VoiceStore(folder=voice_folder).remove(name)
    Console(highlight=False).print(f"{escape(name)} was removed")
