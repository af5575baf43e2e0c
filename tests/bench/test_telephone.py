"""`viva bench telephone`: its callers against a real server, its lossy network, and its bounds."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.server.conftest import running  # noqa: F401 - a fixture
from tests.server.scripted import tone
from vivavoce.bench.telephone import PARTS, TelephoneOptions, requirements
from vivavoce.bench.telephone_caller import CallFailedError, SipCaller, SocketCaller
from vivavoce.bench.telephone_line import EchoPath, LineSettings
from vivavoce.bench.telephone_media import STREAM_RATE, heard_over
from vivavoce.bench.telephone_sipp import SippPlan, measure_sipp
from vivavoce.cli import app
from vivavoce.errors import InputError
from vivavoce.server.sip.options import SipOptions

QUESTION = tone(500, 0.5)


@pytest.fixture
def telephone(running):  # noqa: F811
    """Starts a server that takes a number of calls from one address."""

    async def start(calls):
        return await running(sip=SipOptions(listen=("127.0.0.1:0",), rtp_ports="20000-29999", calls_per_source=calls))

    return start


def sip_port(server):
    return server.app.state.server.sip.signalling.transports.local("udp")[1]


async def test_callers_measure_replies_over_sip_and_over_a_socket(telephone):
    server = await telephone(calls=1)
    port = sip_port(server)
    async with SipCaller(port, LineSettings(echo_db=-60.0)) as call:
        turn = await call.ask(QUESTION, 16_000)
        assert turn.v2v_seconds is not None and turn.v2v_seconds > 0.2, "after the silence that ends a turn"
        assert 0.2 < turn.reply_seconds < 1.0 and not call.is_hung_up
        with pytest.raises(CallFailedError, match="486"):
            async with SipCaller(port):
                pass
        (served,) = server.app.state.server.sip.calls.values()
        await served.media.session.close(1000, "hung up")
        assert (await call.ask(QUESTION, 16_000)).v2v_seconds is None
        assert call.is_hung_up
    async with SocketCaller(f"{server.ws}/v1/realtime") as socket:
        turn = await socket.ask(QUESTION, 16_000)
        assert turn.v2v_seconds is not None and turn.transcript == "You said: tone 500"


async def test_a_lossy_network_loses_and_the_stream_conceals():
    sound = np.concatenate([tone(400, 1.0, STREAM_RATE), np.zeros(STREAM_RATE // 5, np.float32)])
    for line in (LineSettings(), LineSettings(loss=0.05, jitter_seconds=0.06)):
        heard = await heard_over(line, sound)
        loud = np.abs(heard) > 0.05
        assert 0.7 * STREAM_RATE < np.convolve(loud, np.ones(400), "same").astype(bool).sum() < 1.4 * STREAM_RATE


@pytest.mark.debian("sipp")
@pytest.mark.parametrize("served", [2, 1])
async def test_sipp_counts_its_calls_and_the_server_the_replies(telephone, served):
    server = await telephone(calls=served)
    plan = SippPlan(sip_port(server), calls=2, turns=2, reply_seconds=2.0)
    figures = await measure_sipp(server.http, plan, [tone(500, 0.5, 24_000)])
    assert (figures["successful"], figures["failed"], figures["asked"]) == (served, 2 - served, 4)
    assert figures["answered"] == 2 * served and figures["calls_at_once"] == served
    assert 100 < figures["v2v_ms_mean"] <= figures["v2v_ms_p95_at_most"]


def test_a_line_echoes_after_its_delay_whatever_the_jitter():
    sound = np.random.default_rng(0).standard_normal(1_600).astype(np.float32)
    path, echo, packets = EchoPath(LineSettings(echo_db=-20.0, echo_seconds=0.12), 8_000), [], 0
    for tick in range(20):
        while packets < min(10, (tick // 3) * 3 + 1):  # three at once, after two ticks without any
            path.receive((2**32 - 320 + 160 * packets) % 2**32, sound[160 * packets : 160 * packets + 160])
            packets += 1
        echo.append(path.next(160))
    expected = np.concatenate([np.zeros(960, np.float32), 0.1 * sound, np.zeros(640, np.float32)])
    np.testing.assert_allclose(np.concatenate(echo), expected, rtol=1e-5)


def test_bounds_are_checked_where_they_were_measured():
    calls = {"dropped": 0, "refused": 0, "asked": 4, "answered": 4}
    sipp = {"calls": 2, "successful": 2, "asked": 4, "answered": 4}
    result = {
        "load": calls,
        "sipp": sipp,
        "model": calls | {"answered": 3},
        "sipp-model": sipp | {"successful": 1},
        "latency": {"sip": {"v2v_ms_p50": 350.0}, "websocket": {"v2v_ms_p50": 300.0}},
        "loss": calls | {"dropped": 1, "opinion_score": {"clean": 3.0, "lossy": 2.8}},
        "echo": {"self_interruptions": 1},
        "answers": {"sip": 0.9, "websocket": 0.96},
    }
    assert list(requirements(result).values()) == [True, True, False, False, True, False, True, False, False]
    assert set(requirements({}).values()) == {None}


def test_unknown_parts_are_refused_and_those_of_sipp_without_it(monkeypatch):
    with pytest.raises(InputError, match="there is no part 'fax'"):
        TelephoneOptions(parts=("fax",))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="sip-tester"):
        TelephoneOptions(parts=("sipp",))
    assert TelephoneOptions().measured == [part for part in PARTS if not part.startswith("sipp")]


@pytest.mark.full
def test_the_command_measures_every_part(tmp_path):
    small = ("--calls", "2", "--model-calls", "1", "--turns", "1", "--replies", "2", "--questions", "1")
    result = CliRunner().invoke(app, ["bench", "telephone", *small, "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "telephone.json").read_text(encoding="utf8"))
    assert (
        set(TelephoneOptions().measured) < set(figures)
        and figures["load"]["calls"] == 2
        and figures["echo"]["asked"] == 2
    )
    assert figures["answers"]["questions"] == 1 and figures["requirements"]["all scripted calls are served"]
