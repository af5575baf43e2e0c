"""Flags of `viva serve` for calls over SIP, and the table of `SipOptions` that they make."""

from typing import Annotated, Any

import typer

PANEL = "SIP"
FLAGS = (
    *("public_host", "rtp_ports", "calls_per_source", "answers", "needs_srtp", "registrar", "registrar_password"),
    *("trunk", "trunk_account", "max_outgoing_calls", "dials_per_minute", "max_outgoing_seconds"),
)


def _option(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=PANEL, **settings)


Sip = Annotated[
    list[str] | None,
    _option(
        "--sip",
        help="Take calls over SIP at this address: 127.0.0.1:5060 (UDP and TCP), udp:…, tcp:… or tls:…. Default: none.",
    ),
]
SipAccounts = Annotated[
    list[str] | None,
    _option("--sip-account", envvar="VIVA_SIP_ACCOUNT", help="name:password of a caller."),
]
SipAllow = Annotated[
    list[str] | None,
    _option("--sip-allow", help="An address or network whose calls need no account."),
]
SipRegistrar = Annotated[
    str | None,
    _option("--sip-registrar", help="sip:user@host of a registrar to register with."),
]
SipRegistrarPassword = Annotated[
    str | None,
    _option("--sip-registrar-password", envvar="VIVA_SIP_PASSWORD", help="The password there."),
]
SipPublicHost = Annotated[
    str | None,
    _option("--sip-public-host", help="The IP address that peers reach, behind NAT."),
]
SipRtpPorts = Annotated[
    str | None,
    _option("--sip-rtp-ports", help="Ports for audio. Default: 10000-20000."),
]
SipCallsPerSource = Annotated[
    int | None,
    _option("--sip-calls-per-source", min=1, help="Calls of one address at a time. Default: 16."),
]
SipTargets = Annotated[
    list[str] | None,
    _option(
        "--sip-target",
        help="To whom calls may be transferred: sip:*@example.com, tel:+4930*. Default: nobody.",
    ),
]
SipDials = Annotated[
    list[str] | None,
    _option(
        "--sip-dial",
        help="What may be dialled: sip:*@example.com, tel:+4930*. Default: nothing.",
    ),
]
SipTrunk = Annotated[
    str | None,
    _option("--sip-trunk", help="sip:host that calls telephone numbers. Default: the registrar."),
]
SipTrunkAccount = Annotated[
    str | None,
    _option("--sip-trunk-account", envvar="VIVA_SIP_TRUNK_ACCOUNT", help="name:password there."),
]
SipMaxOutgoingCalls = Annotated[
    int | None,
    _option("--sip-max-outgoing-calls", min=1, help="At a time. Default: 4."),
]
SipDialsPerMinute = Annotated[
    float | None,
    _option("--sip-dials-per-minute", help="Outgoing calls a minute. Default: 10."),
]
SipMaxOutgoingSeconds = Annotated[
    float | None,
    _option("--sip-max-outgoing-seconds", help="Of one outgoing call. Default: 3600."),
]
SipAnswers = Annotated[
    str | None,
    _option(
        "--sip-answers",
        help="auto: answer at once; webhook: once realtime.call.incoming was accepted. Default: auto.",
    ),
]
SipNeedsSrtp = Annotated[bool | None, _option("--sip-needs-srtp", help="Refuse calls without encrypted audio.")]
CallRecords = Annotated[
    str | None,
    _option(help="File to which a line of JSON is added for each telephone call."),
]

CallSilenceSeconds = Annotated[
    float | None,
    _option(help="Silence of a call after which the model speaks. Default: it waits."),
]
CallSilencePrompts = Annotated[
    int | None,
    _option(help="How often it speaks without an answer before the call is ended. Default: 2."),
]
CallEndPhrases = Annotated[
    list[str] | None,
    _option(
        "--call-end-phrase",
        help='Words such as "goodbye" with which a turn of either side ends the call. Default: none.',
    ),
]


def sip_table(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags as a table of `SipOptions`, in which None means not set."""
    return {
        **{name: flags[f"sip_{name}"] for name in FLAGS},
        "listen": flags["sip"] or None,
        "accounts": flags["sip_account"] or None,
        "allow": flags["sip_allow"] or None,
        "targets": flags["sip_target"] or None,
        "dials": flags["sip_dial"] or None,
    }
