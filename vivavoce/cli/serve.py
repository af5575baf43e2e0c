"""`viva serve`: the command line of the server; flags override the config file."""

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vivavoce.cli import serve_flags as flags
from vivavoce.cli import sip_flags
from vivavoce.cli.options import StackName, print_json, share_cores
from vivavoce.errors import InputError, optional_packages
from vivavoce.log import configure

if TYPE_CHECKING:
    from vivavoce.server.hosting import Served, ServingOptions

logger = logging.getLogger(__name__)

HIDDEN = "…"


def serve(
    config: flags.ConfigFile = None,
    stack: StackName = None,
    model: flags.Model = None,
    codec: flags.Codec = None,
    voice: flags.VoiceFile = None,
    chat: flags.Chat = None,
    chat_model: flags.ChatModel = None,
    chat_key: flags.ChatKey = None,
    chat_images: flags.ChatImages = None,
    tool_model: flags.ToolModel = None,
    asr: flags.Asr = None,
    asr_backend: flags.AsrBackend = None,
    asr_gate: flags.AsrGate = None,
    tts: flags.Tts = None,
    turns_as_text: flags.TurnsAsText = None,
    audio_only: flags.AudioOnly = None,
    device: flags.OneDevice = None,
    kv: flags.KeysAndValues = None,
    instructions: flags.Instructions = None,
    turn: flags.Detector = None,
    silence_ms: flags.SilenceMs = None,
    threshold: flags.Threshold = None,
    eagerness: flags.Eagerness = None,
    smart_turn: flags.SmartTurn = None,
    speaker: flags.Speaker = None,
    denoise: flags.Denoise = None,
    barge_in: flags.BargeIn = None,
    filler_seconds: flags.FillerSeconds = None,
    moderate_words: flags.WordFile = None,
    moderate_regex: flags.Patterns = None,
    moderate_url: flags.ModerateUrl = None,
    moderate_key: flags.ModerateKey = None,
    moderate_hold_ms: flags.HoldMs = None,
    moderate_pass_on_failure: flags.PassOnFailure = None,
    host: flags.Address = None,
    port: flags.Port = None,
    doors: flags.DoorCount = None,
    tls_cert: flags.TlsCertificate = None,
    tls_key: flags.TlsKey = None,
    api_key: flags.ApiKeys = None,
    allow_origin: flags.Origins = None,
    allow_host: flags.Hosts = None,
    max_sessions: flags.MaxSessions = None,
    idle_seconds: flags.IdleSeconds = None,
    resume_seconds: flags.ResumeSeconds = None,
    drain_seconds: flags.DrainSeconds = None,
    allow_mcp: flags.AllowMcp = None,
    tool: flags.BuiltInTools = None,
    embedding: flags.Embedding = None,
    greeting: flags.Greeting = None,
    greeting_instructions: flags.GreetingInstructions = None,
    greeting_interruptible: flags.GreetingInterruptible = None,
    prompts: flags.Prompts = None,
    webhook_url: flags.WebhookUrl = None,
    webhook_secret: flags.WebhookSecret = None,
    record: flags.Record = None,
    ice_server: flags.IceServers = None,
    media_streams: flags.MediaStreams = None,
    audiosocket: flags.AudioSocket = None,
    audiosocket_token: flags.AudioSocketTokens = None,
    sip: sip_flags.Sip = None,
    sip_account: sip_flags.SipAccounts = None,
    sip_allow: sip_flags.SipAllow = None,
    sip_registrar: sip_flags.SipRegistrar = None,
    sip_registrar_password: sip_flags.SipRegistrarPassword = None,
    sip_public_host: sip_flags.SipPublicHost = None,
    sip_rtp_ports: sip_flags.SipRtpPorts = None,
    sip_calls_per_source: sip_flags.SipCallsPerSource = None,
    sip_target: sip_flags.SipTargets = None,
    sip_dial: sip_flags.SipDials = None,
    sip_trunk: sip_flags.SipTrunk = None,
    sip_trunk_account: sip_flags.SipTrunkAccount = None,
    sip_max_outgoing_calls: sip_flags.SipMaxOutgoingCalls = None,
    sip_dials_per_minute: sip_flags.SipDialsPerMinute = None,
    sip_max_outgoing_seconds: sip_flags.SipMaxOutgoingSeconds = None,
    sip_answers: sip_flags.SipAnswers = None,
    sip_needs_srtp: sip_flags.SipNeedsSrtp = None,
    call_records: sip_flags.CallRecords = None,
    call_silence_seconds: sip_flags.CallSilenceSeconds = None,
    call_silence_prompts: sip_flags.CallSilencePrompts = None,
    call_end_phrase: sip_flags.CallEndPhrases = None,
    log_level: flags.LogLevel = None,
    log_format: flags.LogFormat = None,
    log_content: flags.LogContent = None,
    devices: flags.Devices = None,
    codec_devices: flags.CodecDevices = None,
    ray: flags.OnRay = False,
    replicas: flags.Replicas = 1,
    ray_address: flags.RayAddress = None,
    show: flags.Show = False,
) -> None:
    """Serve conversations over the OpenAI Realtime protocol (WebSocket and WebRTC), with a web page."""
    table = flags.option_table(locals())
    if model is None:  # a stack, or models that were named one by one
        share_cores()
    from vivavoce.server.hosting import read_serving_options

    options = read_serving_options(config, table)
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
