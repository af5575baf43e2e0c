import pytest

from vivavoce.server.sip import signalling
from vivavoce.server.sip.options import SipOptions
from vivavoce.server.sip.transactions import Timers


@pytest.fixture
def served(running):
    """Starts a server that takes calls over SIP on loopback."""

    async def start(**options):
        sip = {"listen": ("127.0.0.1:0",), "rtp_ports": "20000-29999"} | options.pop("sip", {})
        return await running(sip=SipOptions(**sip), **options)

    return start


@pytest.fixture
def quick_timers(monkeypatch):
    """Retransmissions after 20 ms instead of 500."""
    monkeypatch.setattr(signalling, "TIMERS", Timers(t1=0.02, t2=0.1))
