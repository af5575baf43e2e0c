"""`viva encode`, `viva speak-codes`, `viva resynthesise`: a codec by itself."""

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
    typer.Option(
        "--codec", help="MOSS-Speech-Codec, XY-Tokenizer or BigVGAN: a folder or a hub id; mini-speech has one."
    ),
]
BUNDLED_CODEC = "mini-speech"
OutFile = Annotated[Path, typer.Option("--out", "-o", dir_okay=False, help="Where the result goes.")]
VoiceFile = Annotated[
    Path | None,
    typer.Option(
        "--voice", help="A recording of the voice to speak with, at most 30 s; the published MOSS-Speech only."
    ),
]


@app.command()
def encode(sound: Path, out: OutFile, codec: CodecFolder = BUNDLED_CODEC, device: DeviceSpec = "auto") -> None:
    """Turn a sound file into codes (JSON)."""
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
    """Turn codes (JSON of `viva encode`) into a sound file."""
    from vivavoce.audio.io import read, write
    from vivavoce.models.codecs import CodeFile

    given = CodeFile.read(codes)
    opened = _open_codec(codec, device)
    if given.codec != opened.name:
        raise VivaError(f"{codes} was made by {given.codec}, {codec} is {opened.name}")
    sound = opened.decode(given.codes, None if voice is None else read(voice))
    write(out, sound)
    Console().print(f"{sound.seconds:.2f} s at {sound.rate} Hz in {out}", highlight=False)


@app.command()
def resynthesise(
    sound: Path,
    out: OutFile,
    codec: CodecFolder = BUNDLED_CODEC,
    voice: VoiceFile = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="A picture: spectrograms before and after.")] = None,
    device: DeviceSpec = "auto",
) -> None:
    """Hear what a codec does to a sound: encode and decode it."""
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
