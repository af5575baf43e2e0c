"""`viva bench …`: each command measures one part of the system and writes JSON and a plot."""

from pathlib import Path
from typing import Annotated

import typer

from vivavoce.cli.options import (
    DeviceSpec,
    Json,
    NoiseFolder,
    Padding,
    ShapeOption,
    Snr,
    made_folder,
    print_json,
    progress_to,
    share_cores,
)
from vivavoce.errors import InputError

app = typer.Typer(no_args_is_help=True, help="Benchmarks; every figure in the docs names the command that measures it.")
Model = Annotated[str, typer.Option(help="A speech-to-speech model with a bundled codec.")]
Out = Annotated[
    Path | None, typer.Option(file_okay=False, callback=made_folder, help="Write JSON and a plot to this folder.")
]


def counts_text(text: str) -> str:
    if not all(part.strip().isdecimal() and int(part) > 0 for part in text.split(",")):
        raise typer.BadParameter(f"{text!r} is not a list of positive numbers such as 1,8,32")
    return text


@app.command("lm")
def bench_lm(
    device: DeviceSpec = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    shape: Annotated[
        ShapeOption, typer.Option(help="The published shape, or a small one that fits any machine.")
    ] = ShapeOption.true,
    batch: Annotated[str, typer.Option(callback=counts_text, help="Batch sizes, comma-separated.")] = "1,8,32,64,128",
    context: Annotated[int, typer.Option(min=1, help="Rows already in the cache at each measured step.")] = 1024,
    prefill: Annotated[int, typer.Option(min=1, help="Rows of the measured prefill.")] = 512,
    peer: Annotated[bool, typer.Option("--peer/--no-peer", help="Also measure the eager transformers layers.")] = True,
    weights: Annotated[str, typer.Option(help="float, int8, int4 or fp8, comma-separated.")] = "float",
    kv: Annotated[str, typer.Option(help="Format of the KV cache: float or fp8.")] = "float",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Step and prefill time of the language model, against the memory-bandwidth limit and eager transformers."""
    with progress_to(as_json):
        from vivavoce.bench.lm import run

        batches = [int(part) for part in batch.split(",")]
        result = run(
            device=device,
            dtype=dtype,
            shape=shape.value,
            batches=batches,
            context=context,
            prefill=prefill,
            peer=peer,
            out=out,
            weights=[name.strip() for name in weights.split(",")],
            kv=kv,
        )
    if as_json:
        print_json(result)


@app.command("chat")
def bench_chat(
    model: Annotated[str, typer.Argument(help="A .gguf file, a folder or a hub id of a chat model.")],
    device: DeviceSpec = "auto",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    reply: Annotated[int, typer.Option(min=1, help="Tokens of the reply.")] = 64,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Tokens a second of a local chat model, beside its memory floor and llama.cpp (`llama-bench`, if installed)."""
    with progress_to(as_json):
        from vivavoce.bench.chat import run

        result = run(model, device, prompt, reply, out=out)
    if as_json:
        print_json(result)


@app.command("codec")
def bench_codec(
    device: DeviceSpec = "auto",
    dtype: Annotated[str, typer.Option(help="Of the flow decoder: auto, float32, bfloat16 or float16.")] = "auto",
    shape: Annotated[
        ShapeOption, typer.Option(help="The published shape, or a small one that fits any machine.")
    ] = ShapeOption.true,
    sessions: Annotated[
        str, typer.Option(callback=counts_text, help="Concurrent sessions, comma-separated.")
    ] = "1,8,32",
    hops: Annotated[int, typer.Option(min=10, help="Hops of the long reply.")] = 200,
    left_chunks: Annotated[int, typer.Option(min=0, help="Left context of the flow decoder, in chunks.")] = 8,
    speech: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A recording to measure the speech encoder with.")
    ] = None,
    pace: Annotated[float, typer.Option(min=0.1, help="Milliseconds per code of the language model.")] = 7.0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """MOSS-Speech's codec: time to first audio, cost per hop in a long reply, concurrent sessions, chunk policies."""
    with progress_to(as_json):
        from vivavoce.bench.codec import run

        result = run(
            device=device,
            dtype=dtype,
            shape=shape.value,
            sessions=[int(part) for part in sessions.split(",")],
            hops=hops,
            left_chunks=left_chunks,
            seconds_per_code=pace / 1000,
            speech=speech,
            out=out,
        )
    if as_json:
        print_json(result)


@app.command("answer")
def bench_answer(
    model: Model = "mini-speech",
    judge: Annotated[
        str | None,
        typer.Option(
            "--judge",
            "--moonshine",
            help="Recogniser that transcribes the replies, by name or folder: moonshine-base-en, whisper-base, …",
        ),
    ] = None,
    language: Annotated[str, typer.Option(help="Language of the bundled and of Kokoro's questions: en or zh.")] = "en",
    count: Annotated[
        int | None, typer.Option(min=1, help="Synthesize this many questions. Default: use the bundled ones.")
    ] = None,
    snr: Snr = None,
    noise: NoiseFolder = None,
    denoise: Annotated[
        bool, typer.Option("--denoise", help="Suppress noise before the model hears the question.")
    ] = False,
    text: Annotated[
        bool, typer.Option("--text", help="Ask the phrasings for evaluation alone, as text, and score the text.")
    ] = False,
    kokoro: Annotated[
        bool,
        typer.Option(
            "--kokoro",
            help="Ask in held-out voices of Kokoro-82M: --count questions, or those for evaluation alone.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the questions.")] = 0,
    device: DeviceSpec = "auto",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Share of correct answers to held-out questions and voices, and the speech quality of the replies."""
    if text and (judge is not None or count is not None or snr is not None or kokoro):
        raise InputError("--text asks and answers without sound: leave out --judge, --count, --snr and --kokoro")
    if language != "en" and (text or (count is not None and not kokoro)):
        raise InputError("--text and the synthesis programs are English: leave out --text, and add --kokoro to --count")
    with progress_to(as_json):
        from vivavoce.bench import answer, answer_questions, answer_text

        if text:
            result = answer_text.run(model, device, out)
        else:
            questions = answer_questions.kokoro_questions(count, seed, device, language) if kokoro else None
            result = answer.run(model, judge, count, snr, device, seed, out, questions, noise, denoise, language)
    if as_json:
        print_json(result)


@app.command("turn")
def bench_turn(
    url: Annotated[
        str, typer.Argument(help="URL of an OpenAI-Realtime server, such as ws://127.0.0.1:8000/v1/realtime.")
    ],
    model: Annotated[str | None, typer.Option(help="The name of the model.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="VIVA_API_KEY", help="The server's key.")] = None,
    scene: Annotated[list[str] | None, typer.Option(help="One of the scenes; may be repeated. Default: all.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns per scene.")] = 4,
    sessions: Annotated[int, typer.Option(min=1, help="Concurrent calls of the load test, besides the scenes.")] = 1,
    at_once: Annotated[int, typer.Option(min=1, help="Concurrent calls of the scenes.")] = 2,
    speech: Annotated[Path | None, typer.Option(file_okay=False, help="Folder of your own recorded questions.")] = None,
    silence_ms: Annotated[int, typer.Option(min=0, help="Milliseconds of silence that end a turn.")] = 200,
    detection: Annotated[str, typer.Option(help="server_vad or semantic_vad.")] = "server_vad",
    instructions: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    keep_sound: Annotated[bool, typer.Option("--keep-sound", help="Write each call to a stereo WAV.")] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Turn-taking of any OpenAI-Realtime server: latency, yielding, backchannels, noise, echo, bad networks."""
    with progress_to(as_json):
        from vivavoce.bench.turn import run

        result = run(
            *(
                url,
                model,
                api_key,
                scene,
                turns,
                sessions,
                speech,
                silence_ms,
                detection,
                instructions,
                out,
                keep_sound,
            ),
            at_once=at_once,
        )
    if as_json:
        print_json(result)


@app.command("tts")
def bench_tts(
    device: DeviceSpec = "auto",
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="plain, float32, int8, int8-amx, bfloat16, float16 or onnx; with a Kokoro --model auto, float32, "
            "onnxruntime or onnxruntime-int8; may be repeated. Default: all that fit."
        ),
    ] = None,
    threads: Annotated[str, typer.Option(callback=counts_text, help="CPU threads, comma-separated.")] = "1,2",
    streams: Annotated[
        str | None, typer.Option(help="Concurrent texts, comma-separated. Default on a GPU: 1,16,64.")
    ] = None,
    frames: Annotated[int, typer.Option(min=5, help="Frames of 80 ms per text.")] = 60,
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny shape, to check that everything runs.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="Name of a model, or kokoro for random weights of Kokoro's shape; without it random weights of "
            "MOSS-TTS-Nano's."
        ),
    ] = None,
    onnx: Annotated[
        Path | None, typer.Option(file_okay=False, help="Also measure ONNX Runtime, with graphs in this folder.")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Text to speech: time to first audio and real-time factor per backend and thread count."""
    with progress_to(as_json):
        from vivavoce.bench.tts import run

        result = run(
            device=device,
            backends=backend,
            threads=[int(part) for part in threads.split(",")],
            streams=None if streams is None else [int(part) for part in counts_text(streams).split(",")],
            frames=frames,
            shape="tiny" if tiny else "true",
            model=model,
            onnx=onnx,
            out=out,
        )
    if as_json:
        print_json(result)


@app.command("cosyvoice")
def bench_cosyvoice(
    device: DeviceSpec = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny shape, to check that everything runs.")] = False,
    streams: Annotated[str, typer.Option(callback=counts_text, help="Concurrent texts, comma-separated.")] = "1,16",
    only: Annotated[str, typer.Option(help="Some of finite,hops,first_sound,together,parts,memory.")] = "",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """CosyVoice 3 of the published shape: time to first audio alone and under load, and the cost of each part."""
    with progress_to(as_json):
        from vivavoce.bench.cosyvoice import run

        wanted = [name for name in only.split(",") if name]
        result = run(device, dtype, tiny, [int(part) for part in streams.split(",")], only=wanted, out=out)
    if as_json:
        print_json(result)


@app.command("asr")
def bench_asr(
    model: Annotated[str, typer.Option(help="Bundled name, folder or hub id of a Whisper.")] = "mini-asr",
    draft: Annotated[list[str] | None, typer.Option(help="Folder of a draft; may be repeated.")] = None,
    heads: Annotated[str | None, typer.Option(help="A folder of `viva train medusa`.")] = None,
    width: Annotated[int, typer.Option(min=1, help="Also measure heads with this many branches per position.")] = 1,
    speech: Annotated[
        Path | None, typer.Option(help="A folder of recordings with texts, or a corpus. Default: bundled.")
    ] = None,
    max_recordings: Annotated[
        int | None, typer.Option("--max-recordings", "--most", min=1, help="Use at most this many recordings.")
    ] = None,
    batch: Annotated[
        str, typer.Option(callback=counts_text, help="Concurrent recordings, comma-separated.")
    ] = "1,4,16",
    padding: Annotated[Padding, typer.Option(help="Padding of windows; the other is also measured.")] = Padding.trim,
    moonshine: Annotated[Path | None, typer.Option(file_okay=False, help="Unpacked npm package of Moonshine.")] = None,
    peer: Annotated[bool, typer.Option("--peer/--no-peer", help="Also measure faster-whisper.")] = True,
    live: Annotated[bool, typer.Option("--live/--no-live", help="Also measure live streams.")] = True,
    shape: Annotated[
        str | None, typer.Option(help="Only measure the speed of a published shape (large-v2, …) with random weights.")
    ] = None,
    device: DeviceSpec = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Word errors, speed and latency of recognition: plain, with drafts, and faster-whisper."""
    with progress_to(as_json):
        batches = [int(part) for part in batch.split(",")]
        if shape is not None:
            from vivavoce.bench.asr_shape import run as run_shape

            result = run_shape(shape, device, dtype, batches, out=out)
        else:
            from vivavoce.bench.asr import run

            result = run(
                model, draft or (), heads, width, speech, max_recordings, batches, moonshine, device, dtype, peer, live,
                padding.value, out,
            )  # fmt: skip
    if as_json:
        print_json(result)


@app.command("cascade")
def bench_cascade(
    language: Annotated[str, typer.Option(help="Language of the questions: en or zh.")] = "en",
    asr: Annotated[
        str | None, typer.Option(help="Recogniser. Default: Moonshine base, or Whisper base for zh.")
    ] = None,
    chat: Annotated[str, typer.Option(help="Chat model.")] = "qwen2.5-coder-0.5b-instruct",
    tts: Annotated[str | None, typer.Option(help="TTS model. Default: hibari, or Kokoro for zh.")] = None,
    judge: Annotated[str, typer.Option(help="Recogniser that judges the answers; empty: none.")] = "whisper-base",
    questions: Annotated[int | None, typer.Option(min=1, help="Ask at most this many questions.")] = None,
    early: Annotated[bool, typer.Option(help="Recognise and prefill while the question is spoken.")] = True,
    sounds: Annotated[
        Path | None, typer.Option(file_okay=False, callback=made_folder, help="Keep the spoken questions here.")
    ] = None,
    device: DeviceSpec = "auto",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """General questions, spoken to a recogniser, a chat model and a TTS model: latency by stage, and the answers."""
    share_cores()
    with progress_to(as_json):
        from vivavoce.bench.cascade import run

        result = run(language, asr, chat, tts, judge or None, questions, early, sounds, device, out)
    if as_json:
        print_json(result)


@app.command("recognisers")
def bench_recognisers(
    model: Annotated[
        list[str] | None,
        typer.Option(help="A recogniser: bundled name, name of `viva models`, folder or hub id; may be repeated."),
    ] = None,
    speech: Annotated[
        Path | None,
        typer.Option(
            help="A folder of recordings with texts, a corpus, or the root of Debian's asterisk-core-sounds-en "
            "(/ where it is installed). Default: bundled."
        ),
    ] = None,
    max_recordings: Annotated[int | None, typer.Option(min=1, help="Use at most this many recordings.")] = None,
    language: Annotated[str | None, typer.Option(help="A code such as en or zh. Default: detected.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text assumed to precede the audio.")] = None,
    beams: Annotated[int, typer.Option(min=1, help="Beam width of Whispers; 1 is greedy.")] = 1,
    snr: Snr = None,
    noise: NoiseFolder = None,
    denoise: Annotated[
        bool, typer.Option("--denoise", help="Also measure with noise suppressed, as `viva transcribe --denoise` does.")
    ] = False,
    device: DeviceSpec = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16, or int8 on CPUs.")] = "auto",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Word errors, character errors and speed of recognisers on recordings of people, or on the bundled ones."""
    with progress_to(as_json):
        from vivavoce.bench.recognisers import run

        result = run(
            model or ["mini-asr"],
            *(speech, max_recordings, language, prompt, beams, device, dtype, out, snr, noise, denoise),
        )
    if as_json:
        print_json(result)
