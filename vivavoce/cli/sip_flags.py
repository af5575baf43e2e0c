"""Flags of `viva serve` for calls over SIP, and the table of `SipOptions` that they make."""

from typing import Annotated, Any

import typer

PANEL = "SIP"
FLAGS = (
    *("public_host", "rtp_ports", "calls_per_source", "answers", "needs_srtp", "registrar", "registrar_password"),
    *("trunk", "trunk_account", "max_outgoing_calls", "dials_per_minute", "max_outgoing_seconds"),
)

Sip = Annotated[
    list[str] | None,
    typer.Option(
        "--sip",
        rich_help_panel=PANEL,
        help="Take calls over SIP at this address: 127.0.0.1:5060 (UDP and TCP), udp:…, tcp:… or tls:…. Default: none.",
    ),
]
SipAccounts = Annotated[
    list[str] | None,
    typer.Option("--sip-account", rich_help_panel=PANEL, envvar="VIVA_SIP_ACCOUNT", help="name:password of a caller."),
]
SipAllow = Annotated[
    list[str] | None,
    typer.Option("--sip-allow", rich_help_panel=PANEL, help="An address or network whose calls need no account."),
]
SipRegistrar = Annotated[
    str | None,
    typer.Option("--sip-registrar", rich_help_panel=PANEL, help="sip:user@host of a registrar to register with."),
]
SipRegistrarPassword = Annotated[
    str | None,
    typer.Option(
        "--sip-registrar-password", rich_help_panel=PANEL, envvar="VIVA_SIP_PASSWORD", help="The password there."
    ),
]
SipPublicHost = Annotated[
    str | None,
    typer.Option("--sip-public-host", rich_help_panel=PANEL, help="The IP address that peers reach, behind NAT."),
]
SipRtpPorts = Annotated[
    str | None,
    typer.Option("--sip-rtp-ports", rich_help_panel=PANEL, help="Ports for audio. Default: 10000-20000."),
]
SipCallsPerSource = Annotated[
    int | None,
    typer.Option(
        "--sip-calls-per-source", rich_help_panel=PANEL, min=1, help="Calls of one address at a time. Default: 16."
    ),
]
SipTargets = Annotated[
    list[str] | None,
    typer.Option(
        "--sip-target",
        rich_help_panel=PANEL,
        help="To whom calls may be transferred: sip:*@example.com, tel:+4930*. Default: nobody.",
    ),
]
SipDials = Annotated[
    list[str] | None,
    typer.Option(
        "--sip-dial",
        rich_help_panel=PANEL,
        help="What may be dialled: sip:*@example.com, tel:+4930*. Default: nothing.",
    ),
]
SipTrunk = Annotated[
    str | None,
    typer.Option(
        "--sip-trunk", rich_help_panel=PANEL, help="sip:host that calls telephone numbers. Default: the registrar."
    ),
]
SipTrunkAccount = Annotated[
    str | None,
    typer.Option(
        "--sip-trunk-account", rich_help_panel=PANEL, envvar="VIVA_SIP_TRUNK_ACCOUNT", help="name:password there."
    ),
]
SipMaxOutgoingCalls = Annotated[
    int | None,
    typer.Option("--sip-max-outgoing-calls", rich_help_panel=PANEL, min=1, help="At a time. Default: 4."),
]
SipDialsPerMinute = Annotated[
    float | None,
    typer.Option("--sip-dials-per-minute", rich_help_panel=PANEL, help="Outgoing calls a minute. Default: 10."),
]
SipMaxOutgoingSeconds = Annotated[
    float | None,
    typer.Option("--sip-max-outgoing-seconds", rich_help_panel=PANEL, help="Of one outgoing call. Default: 3600."),
]
SipAnswers = Annotated[
    str | None,
    typer.Option(
        "--sip-answers",
        rich_help_panel=PANEL,
        help="auto: answer at once; webhook: once realtime.call.incoming was accepted. Default: auto.",
    ),
]
SipNeedsSrtp = Annotated[
    bool | None, typer.Option("--sip-needs-srtp", rich_help_panel=PANEL, help="Refuse calls without encrypted audio.")
]
CallRecords = Annotated[
    str | None,
    typer.Option(rich_help_panel=PANEL, help="File to which a line of JSON is added for each telephone call."),
]

CallSilenceSeconds = Annotated[
    float | None,
    typer.Option(rich_help_panel=PANEL, help="Silence of a call after which the model speaks. Default: it waits."),
]
CallSilencePrompts = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=PANEL, help="How often it speaks without an answer before the call is ended. Default: 2."
    ),
]
CallEndPhrases = Annotated[
    list[str] | None,
    typer.Option(
        "--call-end-phrase",
        rich_help_panel=PANEL,
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
