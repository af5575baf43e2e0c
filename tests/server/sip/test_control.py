"""Who may call, and what an application does with calls: accept, reject, transfer; registration; TCP, TLS and SRTP."""

import asyncio
import base64
import re
import secrets
import ssl

import openai
import pytest

from tests.server.harness import DEADLINE, connected, eventually
from tests.server.sip.phone import Received, Telephone, metric
from tests.server.test_first_words import SECRET, receiver  # noqa: F401
from tests.server.test_tls import certificate  # noqa: F401
from vivavoce.server import webhooks
from vivavoce.server.sip.digest import Account, credentials

KEY = "key-of-the-application"


@pytest.fixture
async def exchange(served, receiver, monkeypatch):  # noqa: F811
    monkeypatch.setattr(webhooks, "RETRY_SECONDS", (0.01, 0.01, 0.01))
    url = f"http://127.0.0.1:{receiver.server_port}/hook"
    sip = {"answers": "webhook", "targets": ("sip:*@example.com", "tel:+4930*")}
    return await served(sip=sip, webhook_url=url, webhook_secret=SECRET, api_keys=(KEY,))


async def announced(receiver):  # noqa: F811
    """The webhook of a call, as OpenAI's package verifies and reads it."""
    client = openai.OpenAI(api_key="unused", webhook_secret=SECRET)

    def incoming():
        events = [client.webhooks.unwrap(body, headers) for body, headers in receiver.received]
        return [event for event in events if event.type == "realtime.call.incoming"]

    await eventually(incoming, "the call is announced")
    return incoming()[-1]


async def test_an_application_accepts_a_call_and_transfers_it(exchange, receiver, official):  # noqa: F811
    client = official(f"{exchange.http}/v1", KEY)
    async with Telephone(exchange) as phone:
        inviting = asyncio.create_task(phone.invite("X-Account: 7", "Authorization: Digest secret"))
        event = await announced(receiver)
        call_id, headers = event.data.call_id, {each.name: each.value for each in event.data.sip_headers}
        assert headers["X-Account"] == "7" and headers["From"].startswith('"Ann" <sip:ann@phone1>')
        assert "Authorization" not in headers and event.data.sip_media_security == "rtp"
        with pytest.raises(openai.NotFoundError):
            await client.realtime.calls.refer(call_id, target_uri="tel:+4930123456")
        await client.realtime.calls.accept(call_id, type="realtime", instructions="Be brief.")
        assert (await inviting).code == 200
        assert exchange.host.opened[0].settings.instructions == "Be brief."
        with pytest.raises(openai.NotFoundError):
            await client.realtime.calls.accept(call_id, type="realtime")
        async with connected(exchange, f"?call_id={call_id}", KEY) as sideband:
            await sideband.until("session.created")
            for target in ("tel:+1900123456", "sip:bob@example.org", "sip:bob@example.com;maddr=6.6.6.6"):
                with pytest.raises(openai.PermissionDeniedError):
                    await client.realtime.calls.refer(call_id, target_uri=target)
            with pytest.raises(openai.BadRequestError):
                await client.realtime.calls.refer(call_id, target_uri="sip:bob@example.com\r\nX: y")
            referring = asyncio.create_task(client.realtime.calls.refer(call_id, target_uri="sip:bob@example.com"))
            refer = await phone.request_of_server("REFER", 202)
            assert refer.header("Refer-To") == "<sip:bob@example.com>"
            await referring
            for fragment, code in (("SIP/2.0 100 Trying", 200), ("SIP/2.0 200 OK", 200)):
                notify = "Event: refer", "Subscription-State: active", "Content-Type: message/sipfrag;version=2.0"
                phone.request("NOTIFY", *notify, body=fragment + "\r\n")
                assert (await phone.response("NOTIFY")).code == code
            await phone.request_of_server("BYE")
            await sideband.closed()
    await eventually(lambda: not phone.agent.calls, "the call has ended")
    assert metric(exchange, 'calls_ended_total{provider="sip",reason="transferred"}') == 1


async def test_an_application_rejects_a_call(exchange, receiver, official):  # noqa: F811
    async with Telephone(exchange) as phone:
        inviting = asyncio.create_task(phone.invite())
        event = await announced(receiver)
        client = official(f"{exchange.http}/v1", KEY)
        with pytest.raises(openai.BadRequestError):
            await client.realtime.calls.reject(event.data.call_id, status_code=200)
        await client.realtime.calls.reject(event.data.call_id, status_code=486)
        assert (await inviting).code == 486
        assert not exchange.host.opened


async def test_a_cancelled_call_is_not_answered(exchange, receiver):  # noqa: F811
    async with Telephone(exchange) as phone:
        branch = phone.request("INVITE", body=phone.offer())
        assert (await phone.response("INVITE", final=False)).code == 100
        assert (await phone.response("INVITE", final=False)).code == 180
        phone.request("CANCEL", branch=branch)
        assert {(await phone.response()).code for _ in range(2)} == {200, 487}
        phone.request("ACK", branch=branch)
        await eventually(lambda: not phone.agent.calls, "the call has ended")
        assert not exchange.host.opened
        assert metric(exchange, 'calls_ended_total{provider="sip",reason="cancelled"}') == 1


async def test_callers_need_an_account_or_an_allowed_address(served):
    server = await served(sip={"accounts": ("ann:sesame",)})
    async with Telephone(server) as phone:
        refused = await phone.invite()
        challenge = refused.header("WWW-Authenticate")
        assert refused.code == 401 and challenge.startswith("Digest ")
        for password, nonce, code in (("wrong", "", 401), ("sesame", "forged", 401), ("sesame", "", 200)):
            offered = re.sub('nonce="[^"]*"', f'nonce="{nonce}"', challenge) if nonce else challenge
            phone.to_tag = ""
            answer = credentials(Account("ann", password), "INVITE", phone.target, offered)
            assert (await phone.invite(f"Authorization: {answer}")).code == code
    elsewhere = await served(sip={"allow": ("10.0.0.0/8",)})
    async with Telephone(elsewhere) as phone:
        assert (await phone.invite()).code == 403


class Registrar(asyncio.DatagramProtocol):
    """Takes the registrations of one account."""

    def __init__(self) -> None:
        self.expires: list[str] = []

    def connection_made(self, transport) -> None:
        self.socket = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, address) -> None:
        request, nonce = Received(data), "n1"
        given = dict(re.findall(r'(\w+)="?([^",]*)"?', request.header("Authorization")))
        challenge = f'Digest realm="pbx", nonce="{nonce}", algorithm=MD5, qop="auth,auth-int"'
        lines = ["SIP/2.0 401 Unauthorized", *request.copied(), f"WWW-Authenticate: {challenge}"]
        if given:
            expected = self._expected(given, request)
            is_right = given["response"] == expected
            self.expires += [request.header("Expires")] if is_right else []
            lines = [f"SIP/2.0 {200 if is_right else 403} -", *request.copied(), "Contact: <sip:1000@x>;expires=60"]
        self.socket.sendto("\r\n".join((*lines, "Content-Length: 0", "", "")).encode(), address)

    @staticmethod
    def _expected(given, request) -> str:
        import hashlib

        def md5(*parts):
            return hashlib.md5(":".join(parts).encode()).hexdigest()

        secret, asked = md5("1000", "pbx", "sesame"), md5("REGISTER", given["uri"])
        return md5(secret, given["nonce"], given["nc"], given["cnonce"], "auth", asked)


async def test_it_registers_takes_calls_of_the_registrar_and_unregisters(served):
    loop = asyncio.get_running_loop()
    socket, registrar = await loop.create_datagram_endpoint(Registrar, ("127.0.0.1", 0))
    server = await served(
        sip={"registrar": f"sip:1000@127.0.0.1:{registrar.port}", "registrar_password": "sesame", "accounts": ("a:b",)}
    )
    await eventually(lambda: registrar.expires == ["300"], "it is registered")
    await eventually(lambda: metric(server, "sip_registered") == 1, "and says so")
    async with Telephone(server) as phone:
        assert (await phone.invite()).code == 200, "calls of the registrar need no account"
    await server.app.state.server.sip.close()
    assert registrar.expires == ["300", "0"]
    socket.close()


@pytest.mark.parametrize("transport", ["tcp", "tls"])
async def test_calls_over_connections(served, certificate, transport):  # noqa: F811
    secure = certificate if transport == "tls" else {}
    server = await served(sip={"listen": (f"{transport}:127.0.0.1:0",)}, **secure)
    address = server.app.state.server.sip.signalling.transports.local(transport)
    context = ssl.create_default_context(cafile=certificate["tls_cert"]) if transport == "tls" else None
    reader, writer = await asyncio.open_connection(*address, ssl=context)
    host, port = writer.get_extra_info("sockname")[:2]

    def send(method: str, number: int, tag: str = "", body: str = "") -> None:
        lines = (
            f"{method} sip:viva@127.0.0.1 SIP/2.0",
            f"v: SIP/2.0/{transport.upper()} {host}:{port};branch=z9hG4bK{secrets.token_hex(4)}",
            "f: <sip:ann@[::1]>;tag=1",
            f"t: <sip:viva@example.com>{tag}",
            "i: call-over-a-stream",
            f"CSeq: {number} {method}",
            f"m: <sip:ann@{host}:{port};transport={transport}>",
            "c: application/sdp",
            f"l: {len(body)}",
        )
        data = "\r\n".join((*lines, "", body)).encode()
        writer.write(data[:100])
        writer.write(data[100:])

    async def receive() -> Received:
        async with asyncio.timeout(DEADLINE):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(re.search(rb"Content-Length: (\d+)", head)[1])
            return Received(head + await reader.readexactly(size))

    offer = "v=0\r\nc=IN IP4 127.0.0.1\r\nm=audio 40000 RTP/AVP 8\r\n"
    send("INVITE", 1, body=offer)
    while (answered := await receive()).code < 200:
        pass
    assert answered.code == 200 and f";transport={transport}>" in answered.header("Contact")
    tag = ";tag=" + answered.header("To").partition(";tag=")[2]
    send("ACK", 1, tag)
    (call,) = server.app.state.server.sip.calls.values()
    await eventually(lambda: call.media.session.connections, "the call is served")
    await call.media.session.close(1000, "hung up")
    bye = await receive()
    while bye.code:  # the answer may have been sent again
        bye = await receive()
    assert bye.line.startswith("BYE sip:ann@")
    writer.write("\r\n".join(("SIP/2.0 200 OK", *bye.copied(), "Content-Length: 0", "", "")).encode())
    await eventually(lambda: not server.app.state.server.sip.calls, "the call has ended")
    writer.write(b"this is no SIP\r\n\r\n")
    assert await asyncio.wait_for(reader.read(), DEADLINE) == b"", "such a connection is closed"
    writer.close()


async def test_srtp_is_used_where_it_is_offered_and_may_be_required(served):
    server = await served(sip={"needs_srtp": True})
    async with Telephone(server) as phone:
        assert (await phone.invite()).code == 488
        phone.to_tag = ""
        key = base64.b64encode(bytes(range(30))).decode()
        crypto = f"a=crypto:1 AEAD_AES_256_GCM inline:x\r\na=crypto:2 AES_CM_128_HMAC_SHA1_80 inline:{key}\r\n"
        answered = await phone.invite(body=phone.offer().replace("RTP/AVP", "RTP/SAVP") + crypto)
        assert answered.code == 200 and "RTP/SAVP" in answered.body
        own = re.search(r"a=crypto:2 AES_CM_128_HMAC_SHA1_80 inline:(\S+)", answered.body)[1]
        (call,) = phone.agent.calls.values()
        assert call.media.settings.srtp.remote == bytes(range(30))
        assert call.media.settings.srtp.local == base64.b64decode(own) != bytes(range(30))
        assert (await phone.invite()).code == 488, "nor is it given up within a call"
        assert call.media.settings.srtp is not None
