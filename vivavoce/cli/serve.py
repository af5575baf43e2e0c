"""`viva serve`: the command line of the server; flags override the config file."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vivavoce.cli.options import StackName, complete_device, complete_model, print_json, share_cores
from vivavoce.cli.sip_flags import (
    CallEndPhrases,
    CallRecords,
    CallSilencePrompts,
    CallSilenceSeconds,
    Sip,
    SipAccounts,
    SipAllow,
    SipAnswers,
    SipCallsPerSource,
    SipDials,
    SipDialsPerMinute,
    SipMaxOutgoingCalls,
    SipMaxOutgoingSeconds,
    SipNeedsSrtp,
    SipPublicHost,
    SipRegistrar,
    SipRegistrarPassword,
    SipRtpPorts,
    SipTargets,
    SipTrunk,
    SipTrunkAccount,
    sip_table,
)
from vivavoce.errors import InputError, optional_packages
from vivavoce.log import configure

if TYPE_CHECKING:
    from vivavoce.server.hosting import Served, ServingOptions

logger = logging.getLogger(__name__)

MODELS, TURNS, MODERATION, SERVER = "Models", "Turns", "Moderation", "Server"
HIDDEN = "…"
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


def serve(
    config: ConfigFile = None,
    stack: StackName = None,
    model: Model = None,
    codec: Codec = None,
    voice: VoiceFile = None,
    chat: Chat = None,
    chat_model: ChatModel = None,
    chat_key: ChatKey = None,
    chat_images: ChatImages = None,
    tool_model: ToolModel = None,
    asr: Asr = None,
    asr_backend: AsrBackend = None,
    asr_gate: AsrGate = None,
    tts: Tts = None,
    turns_as_text: TurnsAsText = None,
    audio_only: AudioOnly = None,
    device: OneDevice = None,
    kv: KeysAndValues = None,
    instructions: Instructions = None,
    turn: Detector = None,
    silence_ms: SilenceMs = None,
    threshold: Threshold = None,
    eagerness: Eagerness = None,
    smart_turn: SmartTurn = None,
    speaker: Speaker = None,
    denoise: Denoise = None,
    barge_in: BargeIn = None,
    filler_seconds: FillerSeconds = None,
    moderate_words: WordFile = None,
    moderate_regex: Patterns = None,
    moderate_url: ModerateUrl = None,
    moderate_key: ModerateKey = None,
    moderate_hold_ms: HoldMs = None,
    moderate_pass_on_failure: PassOnFailure = None,
    host: Address = None,
    port: Port = None,
    doors: DoorCount = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    api_key: ApiKeys = None,
    allow_origin: Origins = None,
    allow_host: Hosts = None,
    max_sessions: MaxSessions = None,
    idle_seconds: IdleSeconds = None,
    resume_seconds: ResumeSeconds = None,
    drain_seconds: DrainSeconds = None,
    allow_mcp: AllowMcp = None,
    tool: BuiltInTools = None,
    embedding: Embedding = None,
    greeting: Greeting = None,
    greeting_instructions: GreetingInstructions = None,
    greeting_interruptible: GreetingInterruptible = None,
    prompts: Prompts = None,
    webhook_url: WebhookUrl = None,
    webhook_secret: WebhookSecret = None,
    record: Record = None,
    ice_server: IceServers = None,
    media_streams: MediaStreams = None,
    audiosocket: AudioSocket = None,
    audiosocket_token: AudioSocketTokens = None,
    sip: Sip = None,
    sip_account: SipAccounts = None,
    sip_allow: SipAllow = None,
    sip_registrar: SipRegistrar = None,
    sip_registrar_password: SipRegistrarPassword = None,
    sip_public_host: SipPublicHost = None,
    sip_rtp_ports: SipRtpPorts = None,
    sip_calls_per_source: SipCallsPerSource = None,
    sip_target: SipTargets = None,
    sip_dial: SipDials = None,
    sip_trunk: SipTrunk = None,
    sip_trunk_account: SipTrunkAccount = None,
    sip_max_outgoing_calls: SipMaxOutgoingCalls = None,
    sip_dials_per_minute: SipDialsPerMinute = None,
    sip_max_outgoing_seconds: SipMaxOutgoingSeconds = None,
    sip_answers: SipAnswers = None,
    sip_needs_srtp: SipNeedsSrtp = None,
    call_records: CallRecords = None,
    call_silence_seconds: CallSilenceSeconds = None,
    call_silence_prompts: CallSilencePrompts = None,
    call_end_phrase: CallEndPhrases = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    log_content: LogContent = None,
    devices: Devices = None,
    codec_devices: CodecDevices = None,
    ray: OnRay = False,
    replicas: Replicas = 1,
    ray_address: RayAddress = None,
    show: Show = False,
) -> None:
    """Serve conversations over the OpenAI Realtime protocol (WebSocket and WebRTC), with a web page."""
    flags = _option_table(locals())
    if model is None:  # a stack, or models that were named one by one
        share_cores()
    from vivavoce.server.hosting import read_serving_options

    options = read_serving_options(config, flags)
    options.server.check()
    if show:
        print_json(_without_secrets(asdict(options)))
    else:
        configure(options.server.log_level, options.server.log_format)
        if devices is not None:
            if ray:
                raise InputError("--devices and --ray are two ways to run replicas; give one of them")
            _run_on_devices(options, devices.split(","), codec_devices.split(",") if codec_devices else [])
        else:
            _run(options, replicas if ray else None, ray_address)


def _run(options: "ServingOptions", replicas: int | None, ray_address: str | None) -> None:
    """Serve in this process, or by replicas on Ray."""
    from vivavoce.runtime import event_loop
    from vivavoce.server.hosting import load, serve, serve_fleet

    console = Console(highlight=False)
    if replicas is not None:
        console.print(f"serving with Ray on {options.server.address(options.server.port)}; stop with Ctrl-C")
        serve_fleet(options, replicas, ray_address)
        return
    options.server.check_address()
    logger.info("loading the models")
    hosted = load(options)

    def announce(address: str) -> None:
        what = "its audio endpoints" if options.audio_only else "open it in a browser and speak"
        console.print(f"{_what_answers(hosted)} on {address} — {what}")

    event_loop.run(serve(hosted, options.server, announce))


def _run_on_devices(options: "ServingOptions", devices: list[str], codec_devices: list[str]) -> None:
    """Serve by a replica on each device of this machine."""
    from vivavoce.runtime import event_loop

    with optional_packages():
        from vivavoce.server.hosting.devices import serve_devices

    options.server.check_address()
    console = Console(highlight=False)
    what = f"{len(devices)} replicas" if len(devices) > 1 else "one replica"

    def announce(address: str) -> None:
        console.print(f"{what} on {address} — open it in a browser and speak")

    event_loop.run(serve_devices(options, devices, codec_devices, announce))


def _what_answers(hosted: "Served") -> str:
    """The stack and its models, or the models that were named one by one."""
    card = next(iter(hosted.models), None)
    return hosted.name if card is None or not card.stack else f"{card.stack} ({' → '.join(card.parts)})"


def _option_table(flags: dict[str, Any]) -> dict[str, Any]:
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


def _without_secrets(options: dict[str, Any]) -> dict[str, Any]:
    options["chat_key"] = options["chat_key"] and HIDDEN
    options["moderation"]["key"] = options["moderation"]["key"] and HIDDEN
    options["server"]["webhook_secret"] = options["server"]["webhook_secret"] and HIDDEN
    options["server"]["audiosocket_tokens"] = [HIDDEN for _ in options["server"]["audiosocket_tokens"]]
    sip = options["server"]["sip"]
    sip["accounts"] = [HIDDEN for _ in sip["accounts"]]
    for name in ("registrar_password", "trunk_account"):
        sip[name] = sip[name] and HIDDEN
    options["server"]["api_keys"] = [HIDDEN for _ in options["server"]["api_keys"]]
    return options
