"""`viva serve`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vivavoce.cli.options import complete_device, complete_model, print_json
from vivavoce.log import configure
from vivavoce.runtime import event_loop as quick_loop

MODELS, TURNS, MODERATION, SERVER = "Models", "Turns", "Moderation", "Server"
HIDDEN = "…"

ConfigFile = Annotated[
    Path | None, typer.Option("--config", dir_okay=False, help="A TOML or YAML file; flags override it.")
]
Model = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=MODELS,
        autocompletion=complete_model,
        help="Bundled name, folder or hub id of a speech-to-speech model. Default: mini-speech.",
    ),
]
Codec = Annotated[
    str | None, typer.Option(rich_help_panel=MODELS, help="Its codec, where the model does not carry one.")
]
VoiceFile = Annotated[
    Path | None,
    typer.Option(rich_help_panel=MODELS, dir_okay=False, help="A recording of the voice to answer with."),
]
Chat = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=MODELS,
        help="Serve a cascade that thinks with this: an address such as http://localhost:11434/v1, smollm2, a .gguf "
        "file or a folder.",
    ),
]
ChatModel = Annotated[str | None, typer.Option(rich_help_panel=MODELS, help="The model's name at that address.")]
ChatKey = Annotated[
    str | None, typer.Option(rich_help_panel=MODELS, envvar="VIVA_CHAT_KEY", help="The key for that address.")
]
Asr = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=MODELS,
        autocompletion=complete_model,
        help="A recogniser: the cascade's ear (default mini-asr; may be an address), and /v1/audio/transcriptions.",
    ),
]
AsrGate = Annotated[
    bool | None,
    typer.Option(
        "--asr-gate/--no-asr-gate",
        rich_help_panel=MODELS,
        help="Leave out text of /v1/audio/transcriptions where no speech is detected. Default: on.",
    ),
]
AsrBackend = Annotated[
    str | None,
    typer.Option(rich_help_panel=MODELS, help="auto, ours, faster-whisper or moonshine runs it."),
]
Tts = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=MODELS,
        autocompletion=complete_model,
        help="A text-to-speech model: the cascade's voice (default mini-tts; may be an address), and /v1/audio/speech.",
    ),
]
AudioOnly = Annotated[
    bool | None,
    typer.Option("--audio-only", rich_help_panel=MODELS, help="No conversations: /v1/audio/* by --asr, --tts or both."),
]
OneDevice = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=MODELS, autocompletion=complete_device, help="auto, cpu, cuda, cuda:1, npu, npu:0 or mps."
    ),
]
Instructions = Annotated[
    str | None,
    typer.Option(rich_help_panel=MODELS, help="What the model is told first, unless a client says; @FILE reads it."),
]
Detector = Annotated[str | None, typer.Option(rich_help_panel=TURNS, help="How a turn ends: silence or semantic.")]
SilenceMs = Annotated[
    int | None, typer.Option(rich_help_panel=TURNS, min=0, help="Silence that ends a turn. Default: 240.")
]
Threshold = Annotated[
    float | None, typer.Option(rich_help_panel=TURNS, min=0.0, max=1.0, help="Chance that counts as speech: 0.5.")
]
KeysAndValues = Annotated[
    str | None,
    typer.Option("--kv", rich_help_panel=MODELS, help="MOSS-Speech's keys and values: float, or fp8 in half the room."),
]
Eagerness = Annotated[str | None, typer.Option(rich_help_panel=TURNS, help="Of semantic: low, medium, high or auto.")]
SmartTurn = Annotated[
    str | None,
    typer.Option(rich_help_panel=TURNS, help="A smart-turn-v3 ONNX file, or `installed` for pipecat's: ends turns."),
]
WordFile = Annotated[
    Path | None,
    typer.Option(rich_help_panel=MODERATION, dir_okay=False, help="Words, one a line, that end a reply."),
]
Patterns = Annotated[
    list[str] | None, typer.Option(rich_help_panel=MODERATION, help="A regular expression that ends a reply.")
]
ModerateUrl = Annotated[
    str | None, typer.Option(rich_help_panel=MODERATION, help="An endpoint asked as OpenAI's moderations is.")
]
ModerateKey = Annotated[
    str | None, typer.Option(rich_help_panel=MODERATION, envvar="VIVA_MODERATE_KEY", help="The key for it.")
]
HoldMs = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=MODERATION,
        min=0,
        help="Sound held back besides; it waits for the check of its words anyway.",
    ),
]
PassOnFailure = Annotated[
    bool | None,
    typer.Option("--moderate-pass-on-failure", rich_help_panel=MODERATION, help="Go on where the check fails."),
]
Address = Annotated[
    str | None,
    typer.Option("--host", rich_help_panel=SERVER, help="Address to bind; other than loopback needs a key."),
]
Port = Annotated[int | None, typer.Option(rich_help_panel=SERVER, min=0, max=65535, help="Default: 8000.")]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(rich_help_panel=SERVER, envvar="VIVA_API_KEY", help="A key clients must show."),
]
Origins = Annotated[list[str] | None, typer.Option(rich_help_panel=SERVER, help="A browser origin to admit.")]
Hosts = Annotated[list[str] | None, typer.Option(rich_help_panel=SERVER, help="A name this server is called by.")]
MostSessions = Annotated[
    int | None,
    typer.Option(rich_help_panel=SERVER, min=1, help="Conversations at once; more are told to come back. Default: 64."),
]
IdleSeconds = Annotated[float | None, typer.Option(rich_help_panel=SERVER, min=1.0, help="Default: 300.")]
ResumeSeconds = Annotated[
    float | None, typer.Option(rich_help_panel=SERVER, min=0.0, help="How long a lost client may come back: 30.")
]
IceServers = Annotated[list[str] | None, typer.Option(rich_help_panel=SERVER, help="A STUN or TURN address.")]
LogLevel = Annotated[
    str | None, typer.Option(rich_help_panel=SERVER, help="debug, info, warning or error. Default: info.")
]
LogFormat = Annotated[str | None, typer.Option(rich_help_panel=SERVER, help="text, or json: an object a line.")]
LogContent = Annotated[bool | None, typer.Option("--log-content", rich_help_panel=SERVER, help="Log what is said.")]
OnRay = Annotated[bool, typer.Option("--ray", rich_help_panel=SERVER, help="Serve by replicas on Ray.")]
Replicas = Annotated[
    int, typer.Option(rich_help_panel=SERVER, min=1, help="With --ray: how many at most; sessions are for each.")
]
RayAddress = Annotated[
    str | None, typer.Option(rich_help_panel=SERVER, help="With --ray: a cluster's address. Default: this machine.")
]
Show = Annotated[bool, typer.Option("--show", help="Print what would be served as JSON, load nothing, and leave.")]


def serve(
    config: ConfigFile = None,
    model: Model = None,
    codec: Codec = None,
    voice: VoiceFile = None,
    chat: Chat = None,
    chat_model: ChatModel = None,
    chat_key: ChatKey = None,
    asr: Asr = None,
    asr_backend: AsrBackend = None,
    asr_gate: AsrGate = None,
    tts: Tts = None,
    audio_only: AudioOnly = None,
    device: OneDevice = None,
    kv: KeysAndValues = None,
    instructions: Instructions = None,
    turn: Detector = None,
    silence_ms: SilenceMs = None,
    threshold: Threshold = None,
    eagerness: Eagerness = None,
    smart_turn: SmartTurn = None,
    moderate_words: WordFile = None,
    moderate_regex: Patterns = None,
    moderate_url: ModerateUrl = None,
    moderate_key: ModerateKey = None,
    moderate_hold_ms: HoldMs = None,
    moderate_pass_on_failure: PassOnFailure = None,
    host: Address = None,
    port: Port = None,
    api_key: ApiKeys = None,
    allow_origin: Origins = None,
    allow_host: Hosts = None,
    most_sessions: MostSessions = None,
    idle_seconds: IdleSeconds = None,
    resume_seconds: ResumeSeconds = None,
    ice_server: IceServers = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    log_content: LogContent = None,
    ray: OnRay = False,
    replicas: Replicas = 1,
    ray_address: RayAddress = None,
    show: Show = False,
) -> None:
    """Serve conversations over the OpenAI Realtime protocol (WebSocket, WebRTC), with a page to speak to."""
    from vivavoce.server.hosting import load, read_choices, serve_fleet
    from vivavoce.server.hosting import serve as run

    semantic = "semantic" if eagerness is not None or smart_turn is not None else None
    flags = {
        **{"model": model, "codec": codec, "voice": voice, "device": device, "instructions": instructions},
        **{"chat": chat, "chat_model": chat_model, "chat_key": chat_key, "asr": asr, "tts": tts},
        "asr_backend": asr_backend,
        "asr_gate": asr_gate,
        "audio_only": audio_only,
        "smart_turn": smart_turn,
        "engine": {"kv": kv},
        "turn": {
            **{"detector": turn or semantic, "silence_duration_ms": silence_ms},
            **{"threshold": threshold, "eagerness": eagerness},
        },
        "moderation": {
            **{"words": moderate_words, "regex": moderate_regex or None, "url": moderate_url, "key": moderate_key},
            **{"hold_ms": moderate_hold_ms, "passes_on_failure": moderate_pass_on_failure},
        },
        "server": {
            **{"host": host, "port": port, "api_keys": api_key or None, "allowed_origins": allow_origin or None},
            **{"allowed_hosts": allow_host or None, "most_sessions": most_sessions, "idle_seconds": idle_seconds},
            **{"resume_seconds": resume_seconds, "ice_servers": ice_server or None, "log_content": log_content},
            **{"log_level": log_level, "log_format": log_format},
        },
    }
    choices = read_choices(config, flags)
    choices.server.check()
    if show:
        print_json(_without_secrets(asdict(choices)))
        return
    configure(choices.server.log_level, choices.server.log_format)
    address = f"http://{choices.server.host}:{choices.server.port}"
    if ray:
        Console(highlight=False).print(f"a fleet on {address}; Ctrl-C ends it")
        serve_fleet(choices, replicas, ray_address)
        return
    choices.server.check_address()
    hosted = load(choices)
    Console(highlight=False).print(f"{hosted.name} on {address} — open it in a browser and speak")
    quick_loop.run(run(hosted, choices.server))


def _without_secrets(choices: dict[str, Any]) -> dict[str, Any]:
    choices["chat_key"] = choices["chat_key"] and HIDDEN
    choices["moderation"]["key"] = choices["moderation"]["key"] and HIDDEN
    choices["server"]["api_keys"] = [HIDDEN for _ in choices["server"]["api_keys"]]
    return choices
