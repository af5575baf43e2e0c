"""Outgoing calls: what may be dialled, how calls are answered, refused, redirected, challenged and given up."""

import asyncio
import json

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from tests.server.harness import DEADLINE, connected, eventually
from tests.server.scripted import pitch, tone, watermark
from tests.server.sip.callee import Callee, dial, found
from tests.server.sip.phone import LINE, metric
from vivavoce.audio.tones import CALL_PROGRESS, cadence
from vivavoce.cli import app
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import free_port
from vivavoce.server.sip.digest import Account, digest_response, parse_digest
from vivavoce.server.sip.options import SipOptions

KEY = "key-of-the-application"
LOCAL = {"dials": ("sip:*@127.0.0.1",), "dials_per_minute": 1000.0}


@pytest.fixture
async def dialling(served):
    return await served(sip=LOCAL)


async def ended(server, call_id: str) -> dict:
    """How a call has ended."""
    async with asyncio.timeout(DEADLINE):
        while (call := await found(server, call_id))["status"] != "ended":
            await asyncio.sleep(0.01)
    return call


async def test_a_call_is_answered_talked_in_and_hung_up_by_the_callee(served, tmp_path):
    records = tmp_path / "calls.jsonl"
    server = await served(sip=LOCAL, call_records=str(records))
    async with Callee(server) as phone:
        session = {"type": "realtime", "instructions": "Be brief."}
        response = await dial(server, phone.uri, session=session, dtmf="42", headers={"X-Account": "7"})
        assert response.status_code == 201
        call = response.json()
        assert call["object"] == "realtime.call" and call["status"] == "dialing" and call["direction"] == "outgoing"
        assert response.headers["Location"] == f"/v1/realtime/calls/{call['id']}"
        async with connected(server, f"?call_id={call['id']}") as client:
            await client.until("session.created")
            invite = await phone.invited()
            assert invite.header("X-Account") == "7" and invite.line.startswith(f"INVITE {phone.uri} ")
            phone.respond(invite, 180)
            assert (await client.until("viva.call.progress"))["status"] == "ringing"
            assert (await found(server, call["id"]))["status"] == "ringing"
            phone.respond(invite, 200, body=phone.offer())
            ack = await phone.request_of_server("ACK", None)
            assert ack.header("To").endswith(f"tag={phone.tag}") and ack.header("CSeq") == "1 ACK"
            assert (await client.until("viva.call.progress"))["status"] == "answered"
            assert await phone.keys(2) == "42"
            assert server.host.opened[0].settings.instructions == "Be brief."
            listed = (await listing(server))["data"]
            assert [each["id"] for each in listed] == [call["id"]] and listed[0]["codec"] == "PCMU"
            await phone.speak(np.concatenate([tone(500, 0.5, LINE.rate), np.zeros(LINE.rate * 7 // 10, np.float32)]))
            done = (await client.until("response.done"))["response"]
            assert done["output"][0]["content"][0]["transcript"] == "You said: tone 500"
            assert abs(pitch(await phone.hear(0.35), LINE.rate) - watermark("You said: tone 500")) < 5
            phone.request("BYE")
            assert (await phone.response("BYE")).code == 200
            assert (await client.until("viva.call.ended"))["reason"] == "callee"
            await client.closed()
    assert (await ended(server, call["id"]))["reason"] == "callee" and not (await listing(server))["data"]
    (line,) = records.read_text().splitlines()
    record = json.loads(line)
    assert record["direction"] == "outgoing" and record["called"] == phone.uri and record["duration_seconds"] > 1
    assert metric(server, 'calls_dialled_total{outcome="answered"}') == 1


async def listing(server) -> dict:
    async with httpx.AsyncClient(base_url=server.http) as client:
        return (await client.get("/v1/realtime/calls")).json()


REFUSALS = [(486, "busy"), (600, "busy"), (603, "declined"), (480, "unavailable"), (404, "not_found")]
REFUSALS += [(488, "not_acceptable"), (503, "congestion"), (500, "server_error"), (403, "forbidden"), (420, "refused")]


async def test_refusals_have_clear_reasons(dialling):
    async with Callee(dialling) as phone:
        for code, reason in REFUSALS:
            dialled = asyncio.create_task(dial(dialling, phone.uri, wait_until_answered=True))
            invite = await phone.invited()
            phone.respond(invite, code)
            response = await dialled
            assert response.status_code == 502 and response.json()["error"]["code"] == reason
            ack = await phone.request_of_server("ACK", None)
            assert ack.header("Via").split(";rport")[0] == invite.header("Via").split(";rport")[0]
            assert metric(dialling, f'calls_dialled_total{{outcome="{reason}"}}') >= 1
    await eventually(lambda: not len(dialling.sessions), "no session is left")


async def test_only_what_is_allowed_is_dialled(served):
    server = await served(sip=LOCAL | {"max_outgoing_calls": 1}, api_keys=(KEY,))
    async with Callee(server) as phone:
        for target in (
            "sip:bob@127.0.0.2",
            "tel:+1900123",
            f"{phone.uri};maddr=127.0.0.2",
            f"{phone.uri}?Replaces=1",
            f"sips:bob@127.0.0.1:{phone.port}",
        ):
            assert (await dial(server, target, KEY)).status_code == 403, target
        assert (await dial(server, "bob", KEY)).status_code == 400
        assert (await dial(server, phone.uri)).status_code == 401
        for wrong in ({"headers": {"Via": "x"}}, {"headers": {"X-A": "b\r\nVia: x"}}, {"dtmf": "1;"}):
            assert (await dial(server, phone.uri, KEY, **wrong)).status_code == 400, wrong
        assert (await dial(server, phone.uri, KEY, ringing_timeout=0)).status_code == 400
        async with httpx.AsyncClient(base_url=server.http, headers={"Authorization": f"Bearer {KEY}"}) as client:
            secret = (await client.post("/v1/realtime/client_secrets", json={})).json()["value"]
        assert (await dial(server, phone.uri, secret)).status_code == 403, "a page does not place calls"
        call = (await dial(server, phone.uri, KEY)).json()
        assert (await dial(server, phone.uri, KEY)).status_code == 429, "one at a time"
        phone.respond(await phone.invited(), 486)
        await eventually(lambda: not server.app.state.server.sip.calls, "the call has ended")
        assert (await found(server, call["id"], KEY))["reason"] == "busy"
    nothing = await served()
    assert (await dial(nothing, "sip:bob@127.0.0.1")).status_code == 403, "without --sip-dial nothing is"


async def test_the_rate_of_calls_is_limited(served):
    server = await served(sip=LOCAL | {"dials_per_minute": 2.0})
    async with Callee(server) as phone:
        codes = []
        for _ in range(3):
            codes.append((await dial(server, phone.uri)).status_code)
            if codes[-1] == 201:
                phone.respond(await phone.invited(), 486)
                await phone.request_of_server("ACK", None)
        assert codes == [201, 201, 429]


@pytest.mark.parametrize("code", [401, 407])
async def test_challenges_of_a_trunk_are_answered(served, code):
    names = {401: ("WWW-Authenticate", "Authorization"), 407: ("Proxy-Authenticate", "Proxy-Authorization")}
    asks, answers = names[code]
    options = {
        "dials": ("tel:+4930*",),
        "trunk": f"sip:127.0.0.1:{(port := free_port())}",
        "trunk_account": "ann:sesame",
    }
    server = await served(sip=LOCAL | options)
    async with Callee(server, port=port) as phone:
        call = (await dial(server, "tel:+49-30-123")).json()
        invite = await phone.invited()
        assert invite.line.startswith(f"INVITE sip:+4930123@127.0.0.1:{port};user=phone ")
        assert "sip:ann@127.0.0.1" in invite.header("From")
        challenge = 'Digest realm="pbx", nonce="n1", algorithm=MD5, qop="auth"'
        phone.respond(invite, code, f"{asks}: {challenge}")
        again = await phone.invited()
        given, uri = parse_digest(again.header(answers)), again.line.split(" ")[1]
        expected = digest_response(Account("ann", "sesame"), "INVITE", given, uri, given["nc"], given["cnonce"])
        assert given["response"] == expected and again.header("CSeq") == "2 INVITE"
        phone.respond(again, code, f"{asks}: {challenge.replace('n1', 'n2')}")
        third = await phone.invited()
        phone.respond(third, code, f"{asks}: {challenge.replace('n1', 'n3')}")
        last = await ended(server, call["id"])
        assert last["reason"] == "unauthorized" and last["status_code"] == code
        await dial(server, "tel:+49-30-123")
        phone.respond(await phone.invited(), code, f"{asks}: {challenge}")
        assert "Digest" in (await phone.answered()).header(answers), "the ACK has the credentials too"


async def test_passwords_go_to_the_trunk_alone(served):
    options = {"trunk": "sip:trunk.example.com", "trunk_account": "ann:sesame"}
    server = await served(sip=LOCAL | options)
    async with Callee(server) as phone:
        call = (await dial(server, phone.uri)).json()
        phone.respond(await phone.invited(), 401, 'WWW-Authenticate: Digest realm="x", nonce="n"')
        assert (await ended(server, call["id"]))["reason"] == "unauthorized"


async def test_a_call_that_rings_for_too_long_is_cancelled(dialling):
    async with Callee(dialling) as phone:
        call = (await dial(dialling, phone.uri, ringing_timeout=1)).json()
        invite = await phone.invited()
        phone.respond(invite, 180)
        cancel = await phone.request_of_server("CANCEL")
        assert cancel.header("Via") == invite.header("Via") and cancel.header("CSeq") == "1 CANCEL"
        phone.respond(invite, 487)
        await phone.request_of_server("ACK", None)
        assert (await ended(dialling, call["id"]))["reason"] == "no_answer"


async def test_a_hang_up_while_it_rings_cancels_and_a_late_answer_is_released(dialling):
    async with Callee(dialling) as phone:
        call = (await dial(dialling, phone.uri)).json()
        invite = await phone.invited()
        async with httpx.AsyncClient(base_url=dialling.http) as client:
            assert (await client.post(f"/v1/realtime/calls/{call['id']}/hangup")).status_code == 200
        phone.respond(invite, 180)  # only now can it be cancelled
        await phone.request_of_server("CANCEL")
        phone.respond(invite, 200, body=phone.offer())
        await phone.request_of_server("ACK", None)
        await phone.request_of_server("BYE")
        assert (await ended(dialling, call["id"]))["reason"] == "server"


async def test_a_peer_that_does_not_answer_is_given_up(served, quick_timers):
    server = await served(sip=LOCAL)
    async with Callee(server) as phone:
        call = (await dial(server, phone.uri)).json()
        last = await ended(server, call["id"])
        assert last["reason"] == "no_response" and last["status_code"] == 408
        await phone.invited()
        await phone.invited()  # it was repeated
    assert not len(server.sessions)


async def test_redirections_are_followed_within_the_allowed(dialling):
    async with Callee(dialling) as first, Callee(dialling) as second:
        call = (await dial(dialling, first.uri)).json()
        first.respond(await first.invited(), 302, f"Contact: <sip:x@192.0.2.1>, <{second.uri}>")
        second.respond(await second.invited(), 486)
        assert (await ended(dialling, call["id"]))["reason"] == "busy"
        call = (await dial(dialling, first.uri)).json()
        first.respond(await first.invited(), 302, "Contact: <sip:premium@192.0.2.1>")
        assert (await ended(dialling, call["id"]))["reason"] == "redirect_refused"


async def test_a_second_answer_is_released(dialling):
    async with Callee(dialling) as phone:
        await dial(dialling, phone.uri)
        invite = await phone.invited()
        phone.respond(invite, 200, body=phone.offer())
        await phone.request_of_server("ACK", None)
        phone.respond(invite, 200, body=phone.offer(), tag="other")
        ack = await phone.request_of_server("ACK", None)
        bye = await phone.request_of_server("BYE")
        assert ack.header("To").endswith("tag=other") and bye.header("To").endswith("tag=other")
        phone.respond(invite, 200, body=phone.offer())  # the first one again
        assert (await phone.request_of_server("ACK", None)).header("To").endswith(f"tag={phone.tag}")
        assert len(dialling.app.state.server.sip.calls) == 1


async def test_a_busy_tone_in_early_media_ends_the_call(dialling):
    async with Callee(dialling) as phone:
        call = (await dial(dialling, phone.uri)).json()
        async with connected(dialling, f"?call_id={call['id']}") as client:
            await client.until("session.created")
            invite = await phone.invited()
            phone.respond(invite, 183, body=phone.offer())
            assert (await client.until("viva.call.progress"))["status"] == "early_media"
            speaking = asyncio.create_task(phone.speak(cadence(CALL_PROGRESS["us"]["busy"], 15.0, LINE.rate)))
            assert (await client.until("viva.call.progress"))["status"] == "busy"
            await phone.request_of_server("CANCEL")
            phone.respond(invite, 487)
            speaking.cancel()
        assert (await ended(dialling, call["id"]))["reason"] == "busy"
        assert not dialling.host.opened[0].total_ms, "the session has heard nothing of it"


async def test_a_machine_is_hung_up_on_where_that_is_asked_for(dialling):
    async with Callee(dialling) as phone:
        call = (await dial(dialling, phone.uri, answering_machine="hang_up")).json()
        await phone.answered()
        noise = 0.1 * np.random.default_rng(1).standard_normal(15 * LINE.rate).astype(np.float32)
        speaking = asyncio.create_task(phone.speak(noise))
        await phone.request_of_server("BYE")
        speaking.cancel()
        last = await ended(dialling, call["id"])
        assert last["reason"] == "answering_machine" and last["answered_by"] == "machine"
        assert not dialling.host.opened[0].total_ms


async def test_an_answer_without_sdp_is_hung_up(dialling):
    async with Callee(dialling) as phone:
        call = (await dial(dialling, phone.uri)).json()
        phone.respond(await phone.invited(), 200)
        await phone.request_of_server("ACK", None)
        await phone.request_of_server("BYE")
        assert (await ended(dialling, call["id"]))["reason"] == "invalid_sdp"


async def test_a_call_is_not_longer_than_allowed_and_a_stopping_server_ends_it(dialling):
    async with Callee(dialling) as phone:
        call = (await dial(dialling, phone.uri, max_call_duration=1)).json()
        await phone.answered()
        await phone.request_of_server("BYE")
        assert (await ended(dialling, call["id"]))["reason"] == "max_duration"
        await dial(dialling, phone.uri)
        invite = await phone.invited()
        phone.respond(invite, 180)
        closing = asyncio.create_task(dialling.app.state.server.sip.close())
        await phone.request_of_server("CANCEL")
        phone.respond(invite, 487)
        await closing


@pytest.mark.parametrize(
    "options",
    [
        {"dials": ("sip:*@*",)},
        {"dials": ("bob",)},
        {"trunk": "tel:+49"},
        {"trunk_account": "ann"},
        {"max_outgoing_calls": 0},
        {"listen": (), "dials": ("tel:+49*",)},
    ],
)
def test_options_of_outgoing_calls_are_checked(options):
    with pytest.raises(InputError):
        SipOptions(**{"listen": ("127.0.0.1:0",), **options}).check(has_certificate=False, has_webhook=False)


async def test_the_command_follows_a_call_to_its_end(dialling):
    async with Callee(dialling) as phone:
        command = ["call", phone.uri, "--url", dialling.http, "--instructions", "Be brief.", "--json"]
        calling = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, app, command))
        await phone.answered()
        phone.request("BYE")
        result = await calling
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["reason"] == "callee" and "ended: callee" in result.stderr
        assert dialling.host.opened[0].settings.instructions == "Be brief."
        calling = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, app, command))
        phone.respond(await phone.invited(), 603)
        with pytest.raises(InputError, match=r"declined \(603\)"):
            raise (await calling).exception
        outside = await asyncio.to_thread(CliRunner().invoke, app, ["call", "sip:a@192.0.2.1", "--url", dialling.http])
        with pytest.raises(InputError, match="does not allow calls"):
            raise outside.exception


async def test_the_page_learns_whether_there_are_telephone_calls(dialling, running):
    plain = await running()
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{dialling.http}/about")).json()["has_telephone"] is True
        assert (await client.get(f"{plain.http}/about")).json()["has_telephone"] is False
