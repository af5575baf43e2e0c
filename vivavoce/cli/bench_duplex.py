"""`viva bench duplex`, `overlap`, `vad`, `turn-end` and `speakers`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from vivavoce.cli.bench import Out
from vivavoce.cli.options import Json, NoiseFolder, Snr, print_json, progress_to

app = typer.Typer()


@app.command("duplex")
def bench_duplex(
    url: Annotated[
        str,
        typer.Argument(
            help="URL of an OpenAI-Realtime server, such as ws://127.0.0.1:8000/v1/realtime, or simulated:mini-speech "
            "for that model in this process, on a clock of CPU time."
        ),
    ],
    model: Annotated[str | None, typer.Option(help="The name of the model.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="VIVA_API_KEY", help="The server's key.")] = None,
    scene: Annotated[list[str] | None, typer.Option(help="One of the scenes; may be repeated. Default: all.")] = None,
    language: Annotated[list[str] | None, typer.Option(help="en or zh; may be repeated. Default: both.")] = None,
    condition: Annotated[
        list[str] | None,
        typer.Option(help="headset, room, telephone, loss or noise; may be repeated. Default: all in turn."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Calls of each scene in each language.")] = 5,
    parallel: Annotated[int, typer.Option(min=1, help="Concurrent calls.")] = 2,
    detection: Annotated[str, typer.Option(help="server_vad, semantic_vad or default: the server's own.")] = "default",
    silence_ms: Annotated[int, typer.Option(min=0, help="Silence that ends a turn, with server_vad.")] = 500,
    instructions: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    sounds: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="ESC-50: recorded coughs, knocks and keys.")
    ] = None,
    people: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Voices (RAVDESS, TESS) that interrupt."),
    ] = None,
    speaker: Annotated[
        Literal["any", "enrol"], typer.Option(help="Of simulated:MODEL: `enrol` ignores voices other than the first.")
    ] = "any",
    barge_in: Annotated[
        str, typer.Option(help="What decides on barge-in with simulated:MODEL: rules, model, or a file of weights.")
    ] = "model",
    smart_turn: Annotated[
        str | None, typer.Option(help="The turn model of semantic_vad with simulated:MODEL, as of `viva serve`.")
    ] = None,
    require: Annotated[str, typer.Option(help='Bounds such as "R_Y>=.95,pause.early<=.05"; exit 1 if not met.')] = "",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Turn-taking of any OpenAI-Realtime server on speech, pauses, noise, echo and other voices, in two languages."""
    with progress_to(as_json):
        from vivavoce.bench.duplex.lab import LabOptions, run
        from vivavoce.bench.duplex.scenes import CONDITIONS

        options = LabOptions(
            scenes=None if scene is None else tuple(scene),
            languages=tuple(language or ("en", "zh")),
            conditions=tuple(condition or CONDITIONS),
            count=count,
            detection=detection,
            silence_ms=silence_ms,
            instructions=instructions,
            parallel=parallel,
            esc50=sounds,
            people=people,
            speaker=speaker,
            barge_in=barge_in,
            smart_turn=smart_turn,
        )
        result = run(url, model, api_key, options, require, out)
    if as_json:
        print_json(result)
    if not all(each["met"] for each in result["requirements"]):
        raise typer.Exit(1)


@app.command("overlap")
def bench_overlap(
    sounds: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="ESC-50: recorded coughs, knocks and keys.")
    ] = None,
    people: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Voices (RAVDESS, TESS) that interrupt."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A barge-in model, written by `viva train barge-in`."),
    ] = None,
    share: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of the calls, for a quick look.")] = 1.0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Which sounds over a reply stop it, and how soon, by the rules and by the trained model; without a server."""
    with progress_to(as_json):
        from vivavoce.bench.overlap import run

        result = run(sounds, people, weights, share, out)
    if as_json:
        print_json(result)


@app.command("vad")
def bench_vad(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Labelled recordings, laid out as TEN-VAD's testset.")
    ],
    snr: Snr = None,
    noise: NoiseFolder = None,
    denoise: Annotated[bool, typer.Option("--denoise", help="Also measure with noise suppressed.")] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Precision and recall of the voice activity detector on labelled speech, beside TEN-VAD if it is installed."""
    with progress_to(as_json):
        from vivavoce.bench.vad import run

        result = run(folder, out, snr, noise, denoise)
    if as_json:
        print_json(result)


@app.command("turn-end")
def bench_turn_end(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Spoken turns, made by `viva train turn-end-data`.")
    ],
    weights: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of `viva train turn-end`. Default: the bundled model."),
    ] = None,
    people: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Also Asterisk's prompts, from Debian's packages below here."),
    ] = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Use at most this many turns of each.")] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Latency after true ends of turns, and pauses within sentences that are taken for ends, on held-out voices."""
    with progress_to(as_json):
        from vivavoce.bench.turn_end import run

        result = run(folder, weights, people, max_turns, out)
    if as_json:
        print_json(result)


@app.command("speakers")
def bench_speakers(
    folder: Annotated[
        Path,
        typer.Argument(exists=True, file_okay=False, help="Recordings in one folder for each speaker, as RAVDESS's."),
    ],
    model: Annotated[str, typer.Option(help="The speaker embeddings.")] = "campplus",
    per_speaker: Annotated[int, typer.Option(min=2, help="Recordings of each speaker.")] = 20,
    skip: Annotated[
        list[str] | None, typer.Option(help="Pattern of files to leave out, such as '03-02-*'; may be repeated.")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Equal error rate of speaker embeddings: of whole recordings, of short ones, and of enrolment by several."""
    with progress_to(as_json):
        from vivavoce.bench.speakers import run

        result = run(folder, model, per_speaker, skip or (), out)
    if as_json:
        print_json(result)
