"""`viva encode`, `viva speak-codes` and `viva resynthesise`: encode and decode audio with a codec."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vivavoce.cli.options import DeviceSpec
from vivavoce.errors import VivaError

if TYPE_CHECKING:
    from vivavoce.models.codecs import Codec

app = typer.Typer()

CodecFolder = Annotated[
    str,
    typer.Option("--codec", help="Folder or hub id of a MOSS-Speech-Codec, XY-Tokenizer or BigVGAN, or mini-speech."),
]
BUNDLED_CODEC = "mini-speech"
OutFile = Annotated[Path, typer.Option("--out", "-o", dir_okay=False, help="The file to write.")]
VoiceFile = Annotated[
    Path | None,
    typer.Option(
        "--voice", help="A recording of the output voice, at most 30 s; for the published MOSS-Speech-Codec only."
    ),
]


@app.command()
def encode(sound: Path, out: OutFile, codec: CodecFolder = BUNDLED_CODEC, device: DeviceSpec = "auto") -> None:
    """Encode a sound file to codes (JSON)."""
    from vivavoce.audio.io import read
    from vivavoce.models.codecs import CodeFile

    opened = _open_codec(codec, device)
    codes = opened.encode(read(sound))
    CodeFile(opened.name, codes.cpu()).write(out)
    Console().print(f"{codes.shape[1]} frames of {codes.shape[0]} code(s) in {out}", highlight=False)


@app.command("speak-codes")
def speak_codes(
    codes: Path, out: OutFile, codec: CodecFolder = BUNDLED_CODEC, voice: VoiceFile = None, device: DeviceSpec = "auto"
) -> None:
    """Decode codes (JSON of `viva encode`) to a sound file."""
    from vivavoce.audio.io import read, write
    from vivavoce.models.codecs import CodeFile

    given = CodeFile.read(codes)
    opened = _open_codec(codec, device)
    if given.codec != opened.name:
        raise VivaError(f"{codes} was encoded by {given.codec}, but {codec} is {opened.name}")
    sound = opened.decode(given.codes, None if voice is None else read(voice))
    write(out, sound)
    Console().print(f"{sound.seconds:.2f} s at {sound.rate} Hz in {out}", highlight=False)


@app.command()
def resynthesise(
    sound: Path,
    out: OutFile,
    codec: CodecFolder = BUNDLED_CODEC,
    voice: VoiceFile = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Write a plot of both spectrograms.")] = None,
    device: DeviceSpec = "auto",
) -> None:
    """Encode and decode a sound file, to hear the loss of a codec."""
    from vivavoce.audio.io import read, write

    original = read(sound)
    opened = _open_codec(codec, device)
    decoded = opened.resynthesise(original, None if voice is None else read(voice))
    write(out, decoded)
    if plot is not None:
        from vivavoce.evaluation.scoring import plot_spectrograms

        plot_spectrograms(original, decoded, opened.name, plot)
    Console().print(f"{decoded.seconds:.2f} s at {decoded.rate} Hz in {out}", highlight=False)


def _open_codec(name: str, device: str) -> "Codec":
    from vivavoce import hub
    from vivavoce.device import pick
    from vivavoce.models.codecs import open_codec

    folder = Path(name) if Path(name).is_file() else hub.resolve(name)  # one XY-Tokenizer is published as a file
    return open_codec(folder, pick(device).torch_device)
