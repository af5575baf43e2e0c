"""`viva talk`: a conversation in the terminal."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vivavoce.cli.options import DeviceSpec, Json, StackName, print_json, share_cores
from vivavoce.errors import InputError, optional_packages

TALK_SILENCE_MS = 350  # that end a turn, unless --silence-ms says otherwise


def talk(
    stack: StackName = None,
    wav: Annotated[
        list[Path] | None,
        typer.Option(dir_okay=False, help="Play this recording as the microphone; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            dir_okay=False,
            help="With --wav: write both sides to this file instead of playing the reply.",
        ),
    ] = None,
    microphone: Annotated[str | None, typer.Option(help="Name or number of the microphone.")] = None,
    loudspeaker: Annotated[str | None, typer.Option(help="Name or number of the loudspeaker.")] = None,
    instructions: Annotated[
        str | None, typer.Option(help="What the model is told to be; @FILE reads it from a file.")
    ] = None,
    silence_ms: Annotated[
        int, typer.Option(min=0, help="Milliseconds of silence that end your turn.")
    ] = TALK_SILENCE_MS,
    speaker: Annotated[
        str | None, typer.Option(help="`enrol`: your first turns enrol your voice, and other voices are ignored.")
    ] = None,
    denoise: Annotated[bool, typer.Option("--denoise", help="Suppress noise in what the microphone records.")] = False,
    device: DeviceSpec = "auto",
    as_json: Json = False,
) -> None:
    """Talk in the terminal with microphone and loudspeaker; either side may interrupt. Ctrl-C ends it."""
    share_cores()
    with optional_packages():
        from vivavoce.runtime import event_loop
        from vivavoce.server.hosting import SpeechHost, load, read_serving_options
        from vivavoce.talk.audio import DeviceAudio, FileAudio
        from vivavoce.talk.screen import Screen
        from vivavoce.talk.session import talk as run

    if out is not None and not wav:
        raise InputError("--out belongs to --wav: name the recording that is played as the microphone")
    audio = FileAudio(wav, out) if wav else DeviceAudio(microphone, loudspeaker)
    table: dict[str, object] = {"stack": stack, "device": device, "instructions": instructions, "denoise": denoise}
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    screen = Screen(console)
    with screen.working("loading"):
        turn = {"turn": {"silence_duration_ms": silence_ms}, "conversation": {"speaker": speaker}}
        host = load(read_serving_options(None, {**table, **turn}))
    assert isinstance(host, SpeechHost)
    card = host.models[0]
    console.print(f"{card.stack}: {escape(' → '.join(card.parts))}, {' and '.join(card.languages)}")
    turns = event_loop.run(run(host, audio, screen))
    if as_json:
        print_json({"stack": card.stack, "models": card.parts, "turns": [turn.as_dict() for turn in turns]})
