"""Flags of `viva serve`, and the table of `ServingOptions` that they make."""

from pathlib import Path
from typing import Annotated, Any

import typer

from vivavoce.cli.options import complete_device, complete_model
from vivavoce.cli.sip_flags import sip_table

MODELS, TURNS, MODERATION, SERVER = "Models", "Turns", "Moderation", "Server"
SERVING_FLAGS = (  # flags with the names of `ServingOptions`
    *("model", "codec", "voice", "device", "instructions", "chat", "chat_model", "chat_key", "asr", "tts"),
    *("tool_model", "stack", "asr_backend", "asr_gate", "turns_as_text", "audio_only", "chat_images", "smart_turn"),
    "denoise",
)
SERVER_FLAGS = (  # flags with the names of `ServerOptions`
    *("host", "port", "doors", "tls_cert", "tls_key", "max_sessions", "idle_seconds", "resume_seconds"),
    *("drain_seconds", "greeting", "greeting_instructions", "webhook_url", "webhook_secret", "record"),
    *("prompts", "embedding", "media_streams", "audiosocket", "call_records", "call_silence_seconds"),
    *("call_silence_prompts", "log_level", "log_format", "log_content"),
)

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
    str | None, typer.Option(rich_help_panel=MODELS, help="The model's codec, if it is not bundled with it.")
]
VoiceFile = Annotated[
    Path | None,
    typer.Option(rich_help_panel=MODELS, dir_okay=False, help="A recording of the voice to answer with."),
]
Chat = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=MODELS,
        help="Serve a cascade with this chat model: an address such as http://localhost:11434/v1, smollm2, a .gguf "
        "file or a folder.",
    ),
]
ToolModel = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=MODELS,
        help="Decides on the tool calls of a speech-to-speech model: a chat model, named as for --chat, or `self`.",
    ),
]
ChatModel = Annotated[str | None, typer.Option(rich_help_panel=MODELS, help="The model's name at the --chat URL.")]
ChatKey = Annotated[
    str | None, typer.Option(rich_help_panel=MODELS, envvar="VIVA_CHAT_KEY", help="The API key for the --chat URL.")
]
ChatImages = Annotated[
    bool | None,
    typer.Option("--chat-images", rich_help_panel=MODELS, help="The chat endpoint sees: pass images on to it."),
]
Asr = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=MODELS,
        autocompletion=complete_model,
        help="The ASR model of /v1/audio/transcriptions and of the cascade (a URL is possible). Default: mini-asr.",
    ),
]
AsrGate = Annotated[
    bool | None,
    typer.Option(
        "--asr-gate/--no-asr-gate",
        rich_help_panel=MODELS,
        help="Drop segments of /v1/audio/transcriptions in which no speech is detected. Default: on.",
    ),
]
AsrBackend = Annotated[
    str | None,
    typer.Option(rich_help_panel=MODELS, help="ASR backend: auto, ours, faster-whisper or moonshine."),
]
Tts = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=MODELS,
        autocompletion=complete_model,
        help="The TTS model of /v1/audio/speech and of the cascade (a URL is possible). Default: mini-tts.",
    ),
]
TurnsAsText = Annotated[
    bool | None,
    typer.Option(
        "--turns-as-text",
        rich_help_panel=MODELS,
        help="Give the speech-to-speech model what --asr writes down of the user's turns, instead of their sound.",
    ),
]
AudioOnly = Annotated[
    bool | None,
    typer.Option("--audio-only", rich_help_panel=MODELS, help="Serve only /v1/audio/*, with --asr, --tts or both."),
]
OneDevice = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=MODELS, autocompletion=complete_device, help="auto, cpu, cuda, cuda:1, npu, npu:0 or mps."
    ),
]
Instructions = Annotated[
    str | None,
    typer.Option(rich_help_panel=MODELS, help="Default instructions of a session; @FILE reads them from a file."),
]
Detector = Annotated[
    str | None, typer.Option(rich_help_panel=TURNS, help="End-of-turn detection: silence or semantic.")
]
SilenceMs = Annotated[
    int | None,
    typer.Option(rich_help_panel=TURNS, min=0, help="Milliseconds of silence that end a turn. Default: 500."),
]
Threshold = Annotated[
    float | None,
    typer.Option(rich_help_panel=TURNS, min=0.0, max=1.0, help="Speech probability threshold. Default: 0.5."),
]
KeysAndValues = Annotated[
    str | None,
    typer.Option("--kv", rich_help_panel=MODELS, help="KV cache of MOSS-Speech: float, or fp8 in half the memory."),
]
Eagerness = Annotated[
    str | None, typer.Option(rich_help_panel=TURNS, help="Eagerness of semantic detection: low, medium, high or auto.")
]
SmartTurn = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=TURNS,
        help="End-of-turn model: a folder of `viva train turn-end`, a smart-turn-v3 ONNX file, or `installed` for "
        "pipecat's. Default: the bundled one.",
    ),
]
Speaker = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=TURNS,
        help="`enrol`: the first turns enrol the user, and other voices are ignored (viva models fetch campplus). "
        "Default: any.",
    ),
]
Denoise = Annotated[
    bool | None,
    typer.Option(
        "--denoise/--no-denoise",
        rich_help_panel=TURNS,
        help="Suppress noise in the audio of clients that send no noise_reduction. Default: no.",
    ),
]
BargeIn = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=TURNS,
        help="What decides which sounds interrupt a reply: model (default), rules, or a file of `viva train barge-in`.",
    ),
]
WordFile = Annotated[
    Path | None,
    typer.Option(rich_help_panel=MODERATION, dir_okay=False, help="File of words, one per line, that end a reply."),
]
Patterns = Annotated[
    list[str] | None, typer.Option(rich_help_panel=MODERATION, help="A regular expression that ends a reply.")
]
ModerateUrl = Annotated[
    str | None,
    typer.Option(rich_help_panel=MODERATION, help="URL of an endpoint compatible with OpenAI's moderations."),
]
ModerateKey = Annotated[
    str | None,
    typer.Option(rich_help_panel=MODERATION, envvar="VIVA_MODERATE_KEY", help="The API key for --moderate-url."),
]
HoldMs = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=MODERATION,
        min=0,
        help="Milliseconds by which audio is delayed, besides waiting for the check of its text.",
    ),
]
PassOnFailure = Annotated[
    bool | None,
    typer.Option("--moderate-pass-on-failure", rich_help_panel=MODERATION, help="Send replies whose check fails."),
]
Address = Annotated[
    str | None,
    typer.Option("--host", rich_help_panel=SERVER, help="Address to bind; any other than loopback needs an API key."),
]
Port = Annotated[
    int | None, typer.Option(rich_help_panel=SERVER, min=0, max=65535, help="Port to bind. Default: 8000.")
]
DoorCount = Annotated[
    int | None,
    typer.Option(
        "--doors",
        rich_help_panel=SERVER,
        min=0,
        help="Processes that serve the sockets; 0: the engine's own. Default: by cores, 0 on fewer than 8.",
    ),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(rich_help_panel=SERVER, envvar="VIVA_API_KEY", help="An API key that clients must send."),
]
TlsCertificate = Annotated[
    str | None, typer.Option("--tls-cert", rich_help_panel=SERVER, help="PEM certificate chain, for HTTPS and WSS.")
]
TlsKey = Annotated[
    str | None,
    typer.Option("--tls-key", rich_help_panel=SERVER, help="PEM private key, if it is not in the certificate's file."),
]
Origins = Annotated[list[str] | None, typer.Option(rich_help_panel=SERVER, help="An allowed browser origin.")]
Hosts = Annotated[list[str] | None, typer.Option(rich_help_panel=SERVER, help="An allowed Host header.")]
MaxSessions = Annotated[
    int | None,
    typer.Option(
        "--max-sessions",
        "--most-sessions",
        rich_help_panel=SERVER,
        min=1,
        help="Maximum number of concurrent sessions. Default: 64.",
    ),
]
IdleSeconds = Annotated[
    float | None, typer.Option(rich_help_panel=SERVER, min=1.0, help="Idle time that ends a session. Default: 300.")
]
ResumeSeconds = Annotated[
    float | None,
    typer.Option(rich_help_panel=SERVER, min=0.0, help="Time within which a client may reconnect. Default: 30."),
]
DrainSeconds = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=SERVER, min=0.0, help="Time for replies in progress when the server is stopped. Default: 20."
    ),
]
AllowMcp = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-mcp",
        rich_help_panel=SERVER,
        help="An MCP server that clients may name: its address, or name=command for a program (stdio:name).",
    ),
]
BuiltInTools = Annotated[
    list[str] | None,
    typer.Option(
        "--tool",
        rich_help_panel=SERVER,
        help="A built-in tool: clock, clock=TIME_ZONE, calculator, folder=DIR, hang-up or http=HOST,HOST.",
    ),
]
Embedding = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=SERVER,
        help="An embedding model, such as all-minilm-l6-v2, with which the files of --tool folder=DIR are searched.",
    ),
]
FillerSeconds = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=TURNS,
        min=0.0,
        help="Silence, while a tool or a chat model works, before a few words are spoken; 0: never. Default: 0.8.",
    ),
]
Greeting = Annotated[
    str | None, typer.Option(rich_help_panel=SERVER, help="What sessions are greeted with, in these words.")
]
GreetingInstructions = Annotated[
    str | None, typer.Option(rich_help_panel=SERVER, help="How the model is to greet, in words of its own.")
]
GreetingInterruptible = Annotated[
    bool | None,
    typer.Option(
        "--greeting-interruptible/--no-greeting-interruptible",
        rich_help_panel=SERVER,
        help="Whether speech interrupts the greeting. Default: yes.",
    ),
]
Prompts = Annotated[
    str | None, typer.Option(rich_help_panel=SERVER, help="Folder of stored prompts that sessions name by their id.")
]
WebhookUrl = Annotated[
    str | None, typer.Option(rich_help_panel=SERVER, help="URL that is sent session.started and session.ended.")
]
WebhookSecret = Annotated[
    str | None,
    typer.Option(rich_help_panel=SERVER, envvar="VIVA_WEBHOOK_SECRET", help="The secret that signs them (whsec_…)."),
]
Record = Annotated[
    str | None,
    typer.Option(rich_help_panel=SERVER, help="Folder for recordings and transcripts of all sessions. Default: none."),
]
IceServers = Annotated[list[str] | None, typer.Option(rich_help_panel=SERVER, help="URL of a STUN or TURN server.")]
MediaStreams = Annotated[
    bool | None,
    typer.Option(
        "--media-streams",
        rich_help_panel=SERVER,
        help="Take telephone calls of Twilio, Telnyx, Plivo, Vonage, Exotel and Asterisk at /v1/media-streams.",
    ),
]
AudioSocket = Annotated[
    int | None,
    typer.Option(rich_help_panel=SERVER, min=0, max=65_535, help="TCP port for Asterisk's AudioSocket. Default: none."),
]
AudioSocketTokens = Annotated[
    list[str] | None,
    typer.Option(rich_help_panel=SERVER, envvar="VIVA_AUDIOSOCKET_TOKEN", help="A UUID that Asterisk may name."),
]
LogLevel = Annotated[
    str | None, typer.Option(rich_help_panel=SERVER, help="debug, info, warning or error. Default: info.")
]
LogFormat = Annotated[str | None, typer.Option(rich_help_panel=SERVER, help="text, or json for one object per line.")]
LogContent = Annotated[
    bool | None, typer.Option("--log-content", rich_help_panel=SERVER, help="Log transcripts and replies.")
]
Devices = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=SERVER, help="A replica on each of these devices, as 0,1; --max-sessions is per replica."
    ),
]
CodecDevices = Annotated[
    str | None, typer.Option(rich_help_panel=SERVER, help="With --devices: devices that run the model's codec, as 2.")
]
OnRay = Annotated[bool, typer.Option("--ray", rich_help_panel=SERVER, help="Serve with replicas on Ray.")]
Replicas = Annotated[
    int,
    typer.Option(
        rich_help_panel=SERVER, min=1, help="With --ray: maximum number of replicas; --max-sessions is per replica."
    ),
]
RayAddress = Annotated[
    str | None, typer.Option(rich_help_panel=SERVER, help="With --ray: address of the cluster. Default: this machine.")
]
Show = Annotated[bool, typer.Option("--show", help="Print the options as JSON and exit.")]


def option_table(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags as a table of `ServingOptions`, in which None means not set."""
    is_semantic = flags["eagerness"] is not None or flags["smart_turn"] is not None
    return {
        **{name: flags[name] for name in SERVING_FLAGS},
        "engine": {"kv": flags["kv"]},
        "conversation": {name: flags[name] for name in ("filler_seconds", "speaker", "barge_in")},
        "turn": {
            "detector": flags["turn"] or ("semantic" if is_semantic else None),
            "silence_duration_ms": flags["silence_ms"],
            "threshold": flags["threshold"],
            "eagerness": flags["eagerness"],
        },
        "moderation": {
            **{name: flags[f"moderate_{name}"] for name in ("words", "url", "key", "hold_ms")},
            "regex": flags["moderate_regex"] or None,
            "passes_on_failure": flags["moderate_pass_on_failure"],
        },
        "server": {
            **{name: flags[name] for name in SERVER_FLAGS},
            "api_keys": flags["api_key"] or None,
            "allowed_origins": flags["allow_origin"] or None,
            "allowed_hosts": flags["allow_host"] or None,
            "ice_servers": flags["ice_server"] or None,
            "allow_mcp": flags["allow_mcp"] or None,
            "tools": flags["tool"] or None,
            "audiosocket_tokens": flags["audiosocket_token"] or None,
            "call_end_phrases": flags["call_end_phrase"] or None,
            "greeting_may_be_interrupted": flags["greeting_interruptible"],
            "sip": sip_table(flags),
        },
    }
