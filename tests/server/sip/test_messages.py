"""Parsing and writing of SIP messages, SDP and digests, and what hostile input does to them."""

import random
import resource
import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.harness import eventually
from tests.server.sip.phone import Telephone, metric
from vivavoce.errors import InputError
from vivavoce.server.config import OpenRate
from vivavoce.server.sip.addresses import SipAddress, Uri, Via
from vivavoce.server.sip.digest import Account, digest_response, parse_digest
from vivavoce.server.sip.messages import MAX_MESSAGE_BYTES, SipRequest, StreamReader, parse
from vivavoce.server.sip.options import AllowedTargets, TargetPattern
from vivavoce.server.sip.sdp import Description, LocalAudio
from vivavoce.server.wire import WireError

INVITE = (
    "INVITE sip:viva@pbx1:5060;transport=tcp SIP/2.0\r\n"
    "Via: SIP/2.0/UDP 3f2a9c1b:5080;branch=z9hG4bK+a/b;rport, SIP/2.0/TCP [::1];branch=z9hG4bKsecond\r\n"
    'f: "Ann \\"A, B\\" <x>"  <sip:ann@phone1;user=phone>;tag=a+b*\r\n'
    "t: sip:viva@example.com;x=1\r\n"
    "Call-ID: 1@phone1\r\n"
    "CSeq: 7\r\n  INVITE\r\n"
    "Record-Route: <sip:a.example;lr>, <sip:b.example;lr>\r\n"
    "k: timer,100rel\r\n"
    "Max-Forwards: 70\r\n"
    "Content-Length: 4\r\n\r\nbodyrest"
)
OFFER = (
    "v=0\r\no=- 1 1 IN IP4 10.0.0.1\r\ns=-\r\nc=IN IP4 10.0.0.1\r\nt=0 0\r\na=sendonly\r\n"
    "m=video 5000 RTP/AVP 96\r\n"
    "m=audio 4000 RTP/AVP 0 8 96 97 101\r\nc=IN IP4 10.0.0.2\r\na=rtpmap:96 opus/48000/2\r\n"
    "a=rtpmap:97 telephone-event/48000\r\na=rtpmap:101 telephone-event/8000\r\n"
)


def test_a_request_as_programs_write_it():
    request = parse(INVITE.encode())
    assert isinstance(request, SipRequest) and request.method == "INVITE" and request.body == b"body"
    assert (request.uri.user, request.uri.host, request.uri.port) == ("viva", "pbx1", 5060)
    assert request.uri.transport == "tcp"
    assert (request.via.host, request.via.port, request.via.branch) == ("3f2a9c1b", 5080, "z9hG4bK+a/b")
    assert request.from_address.tag == "a+b*" and request.from_address.uri.host == "phone1"
    assert request.to_address.uri == Uri.parse("sip:viva@example.com") and request.to_address.tag == ""
    assert request.cseq == (7, "INVITE")
    assert request.all("Record-Route") == ["<sip:a.example;lr>", "<sip:b.example;lr>"]
    assert request.tokens("Supported") == {"timer", "100rel"}
    response = request.response(180, "ours").encode().decode()
    assert "tag=a+b*\r\n" in response and "To: sip:viva@example.com;x=1;tag=ours\r\n" in response
    assert response.count("Via:") == 1 and "branch=z9hG4bK+a/b;rport, SIP/2.0/TCP" in response
    assert parse(request.encode()).encode() == request.encode()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("CSeq: 7\r\n  INVITE", "CSeq: 7 BYE"),
        ("CSeq: 7\r\n  INVITE", "CSeq: 99999999999 INVITE"),
        (";tag=a+b*", ""),
        ("Call-ID: 1@phone1\r\n", ""),
        ("branch=z9hG4bK+a/b", "b=1"),
        ("SIP/2.0\r\nVia", "SIP/3.0\r\nVia"),
        ("sip:viva@pbx1:5060", "http://pbx1"),
        ("sip:viva@pbx1:5060", "sip:viva@pbx1:99999"),
        ("Content-Length: 4", "Content-Length: 9999"),
        ("Content-Length: 4", "Content-Length: -4"),
        ("Max-Forwards: 70", "Max-Forwards"),
        ("Max-Forwards: 70", "X: a\nInjected: b"),
        ("Max-Forwards: 70", "X: " + "a" * MAX_MESSAGE_BYTES),
        ("Max-Forwards: 70\r\n", "X: a\r\n" * 200),
        ("\r\n\r\n", "\r\n"),
    ],
)
def test_malformed_requests_are_refused(before, after):
    assert before in INVITE
    with pytest.raises(InputError):
        parse(INVITE.replace(before, after, 1).encode())


def test_a_stream_is_cut_at_content_lengths():
    whole = INVITE[:-4].encode()
    sent, reader = whole + b"\r\n\r\n" + whole, StreamReader()
    assert [message for at in range(len(sent)) for message in reader.feed(sent[at : at + 1])] == [whole, whole]
    assert StreamReader().feed(sent) == [whole, whole]
    for hostile in (b"x" * 40_000, whole.replace(b"Content-Length: 4\r\n", b""), b"A: 1\r\nl: 1\r\nl: 2\r\n\r\n"):
        with pytest.raises(InputError):
            StreamReader().feed(hostile)


def test_an_offer_is_answered_with_the_best_codec():
    answer, media = LocalAudio("192.0.2.1", 6000).answer(OFFER)
    assert (media.codec.name, media.codec.payload_type, media.dtmf_payload_type) == ("opus", 96, 97)
    assert media.remote == ("10.0.0.2", 4000) and media.direction == "recvonly" and media.srtp is None
    lines = answer.splitlines()
    assert "m=video 0 RTP/AVP 96" in lines and "m=audio 6000 RTP/AVP 96 97" in lines
    assert "a=recvonly" in lines and "c=IN IP4 192.0.2.1" in lines
    assert lines.index("m=video 0 RTP/AVP 96") < lines.index("m=audio 6000 RTP/AVP 96 97")
    narrow = OFFER.replace(" 96", " 9").replace(":96 opus/48000/2", ":9 G722/8000")
    _, again = LocalAudio("192.0.2.1", 6000).answer(narrow)
    assert again.codec.name == "G722" and again.dtmf_payload_type == 101 and not again.rtcp_mux
    answer, muxed = LocalAudio("192.0.2.1", 6000).answer(OFFER + "a=rtcp-mux\r\n")
    assert muxed.rtcp_mux and "a=rtcp-mux" in answer.splitlines()


def test_an_offer_of_ours_and_its_answer():
    local = LocalAudio("::1", 6000, is_secure=True)
    offer = local.offer()
    assert "IN IP6 ::1" in offer and "RTP/SAVP 111 9 0 8 118 101" in offer
    answer, theirs = LocalAudio("::2", 7000).answer(offer)
    ours = local.answered(answer)
    assert ours.remote == ("::2", 7000) and theirs.remote == ("::1", 6000)
    assert (ours.srtp.local, ours.srtp.remote) == (theirs.srtp.remote, theirs.srtp.local)
    with pytest.raises(WireError, match="encrypted"):
        local.answered(OFFER)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("0 8 96 97 101", "3 4"),
        ("m=audio 4000", "m=audio 0"),
        ("m=audio 4000", "m=audio 70000"),
        ("m=audio 4000 RTP/AVP", "m=audio 4000 UDP/TLS/RTP/SAVPF"),
        ("m=audio 4000 RTP/AVP", "m=audio 4000 RTP/SAVP"),
        ("10.0.0.2", "pbx.example.com"),
        ("10.0.0.2", "224.0.0.1"),
        ("v=0", "v=1"),
    ],
)
def test_offers_that_cannot_be_answered(before, after):
    assert before in OFFER
    with pytest.raises(WireError) as refused:
        LocalAudio("192.0.2.1", 6000).answer(OFFER.replace(before, after, 1))
    assert refused.value.code == "invalid_sdp"


def test_digests_are_those_of_the_standards():
    mufasa, zanzibar = Account("Mufasa", "Circle Of Life"), Account("Mufasa", "Circle of Life")
    nonce = "dcd98b7102dd2f0e8b11d0f600bfb0c093"  # RFC 2617, section 3.5
    given = {"realm": "testrealm@host.com", "nonce": nonce}
    response = digest_response(mufasa, "GET", given, "/dir/index.html", "00000001", "0a4f113b")
    assert response == "6629fae49393a05397450978507c4ef1"
    nonce = "7ypf/xlj9XXwfDPEoM4URrv/xwf94BcCAzFZH4GiTo0v"  # RFC 7616, section 3.9.1
    given = {"realm": "http-auth@example.org", "nonce": nonce, "algorithm": "SHA-256"}
    cnonce = "f2/wE4q74E6zIJEtWaHKaf5wv/H5QzzpXusqGemxURZJ"
    response = digest_response(zanzibar, "GET", given, "/dir/index.html", "00000001", cnonce)
    assert response == "753927fa0e85d155564e2e272a28d1802ca10daf4496794697cf8db5856cb6c1"
    assert parse_digest('Digest realm="a, \\"b\\"", qop="auth,auth-int", stale=FALSE') == {
        "realm": 'a, "b"',
        "qop": "auth,auth-int",
        "stale": "FALSE",
    }


@pytest.mark.parametrize(
    ("target", "is_allowed"),
    [
        ("sip:bob@example.com", True),
        ("sip:bob@EXAMPLE.com:5070;transport=tls", True),
        ("sip:bob@sub.example.com", False),
        ("sip:bob@example.com.evil.org", False),
        ("sip:bob@example.com@evil.org", False),
        ("sip:bob@evil.org;x=@example.com", False),
        ("sip:bob@example.com;maddr=192.0.2.7", False),
        ("sip:bob@example.com?Route=%3Csip:evil.org%3E", False),
        ("sips:bob@example.com", False),
        ("tel:+4930123456", True),
        ("tel:+49-30-123456", True),
        ("tel:+491900123456", False),
        ("sip:100@10.0.0.1:5060", True),
        ("sip:%31%30%30@10.0.0.1:5060", True),
        ("sip:1001@10.0.0.1:5060", False),
        ("sip:100@10.0.0.1", False),
    ],
)
def test_calls_are_transferred_to_allowed_targets_only(target, is_allowed):
    patterns = ("sip:*@example.com", "tel:+4930*", "sip:100@10.0.0.1:5060")
    allowed = AllowedTargets([TargetPattern.parse(each) for each in patterns])
    try:
        admitted = allowed.admits(Uri.parse(target))
    except InputError:
        admitted = False
    assert admitted == is_allowed
    assert not AllowedTargets([]).admits(Uri.parse("sip:bob@example.com"))


# Hostile input

PIECES = st.sampled_from([*INVITE.splitlines(keepends=True), *OFFER.splitlines(keepends=True), *'<>"\\;,:@=%'])
TEXTS = st.lists(PIECES | st.text(string.printable, max_size=40) | st.characters(), max_size=30).map("".join)


@st.composite
def damaged(draw, original: str = INVITE):
    """A message with a few bytes replaced, removed or repeated."""
    data = bytearray(original.encode())
    for _ in range(draw(st.integers(1, 6))):
        at, size = draw(st.integers(0, len(data) - 1)), draw(st.integers(0, 20))
        data[at : at + size] = draw(st.binary(max_size=8) | st.just(bytes(data[at : at + size] * 3)))
        data = data or bytearray(b"x")
    return bytes(data)


@settings(max_examples=100, deadline=None)
@given(damaged() | TEXTS.map(str.encode) | st.binary(max_size=200))
def test_any_bytes_are_a_message_or_bad_input(data):
    try:
        message = parse(data)
    except InputError:
        return
    if isinstance(message, SipRequest):
        parse(message.response(200, "ours").encode())


@settings(max_examples=100, deadline=None)
@given(damaged(OFFER).map(lambda data: data.decode("utf8", "replace")) | TEXTS)
def test_any_text_is_sdp_or_bad_input(text):
    try:
        answer, media = LocalAudio("127.0.0.1", 6000).answer(text)
    except WireError:
        return
    assert Description.parse(answer).audio.codec == media.codec


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_any_text_is_a_header_or_bad_input(text):
    for read in (Uri.parse, SipAddress.parse, Via.parse, parse_digest, TargetPattern.parse, Account.parse):
        try:
            read(text)
        except InputError:
            continue


@pytest.mark.parametrize("character", [" ", "(", '"', "\\", ";", "<", ",", "=", "%", "a", ".", ":", "-"])
def test_long_values_take_no_time(character):
    """Quadratic patterns would take seconds here."""
    text = character * (MAX_MESSAGE_BYTES - 600)
    began = time.process_time()
    for start in ("", "sip:", "<", '"', "SIP/2.0/UDP a", "Digest ", "a <sip:a@b>"):
        for read in (Uri.parse, SipAddress.parse, Via.parse, parse_digest):
            try:
                read(start + text)
            except InputError:
                continue
    assert time.process_time() - began < 2


@pytest.mark.full
async def test_a_hundred_thousand_hostile_messages_do_no_harm(served):
    """Damaged requests of every method, within and outside of a call: nothing fails, and memory stays flat."""
    chance = random.Random(7)
    server = await served()
    agent = server.app.state.server.sip
    agent._rate = OpenRate(1e9)
    methods = ["INVITE", "ACK", "BYE", "CANCEL", "OPTIONS", "UPDATE", "INFO", "NOTIFY", "REFER", "REGISTER", "PRACK"]
    async with Telephone(server) as phone:
        await phone.invite()
        sizes = []
        for number in range(100_000):
            method = chance.choice(methods)
            text = INVITE.replace("INVITE", method).replace("z9hG4bK+a/b", f"z9hG4bK{number}")
            if number % 2:
                text = text.replace("1@phone1", phone.call_id).replace("a+b*", phone.tag)
                text = text.replace("example.com;x=1", f"example.com;tag={phone.to_tag}").replace("7\r\n  ", "1 ")
            data = bytearray(text.encode())
            for _ in range(chance.randrange(0, 8)):
                at = chance.randrange(len(data))
                data[at : at + chance.randrange(6)] = chance.randbytes(chance.randrange(6))
            phone.send(bytes(data))
            if number % 50 == 49:
                await phone.round_trip()
            if number % 20_000 == 19_999:
                sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        assert metric(server, "sip_malformed_total") > 10_000
        assert metric(server, "exceptions_total") == 0
        assert len(agent.signalling.transactions) < 5_000
        assert sizes[-1] - sizes[1] < 30_000, f"memory grows: {sizes} KiB"
        for call in list(agent.calls.values()):
            call.end("caller")
        await eventually(lambda: not agent.calls, "all calls can be ended")
    async with Telephone(server) as phone:
        assert (await phone.invite()).code == 200, "and others are served"
