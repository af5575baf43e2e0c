"""Keys in SDP, and SRTP between two sides."""

import pytest
from aiortc.rtp import RtpPacket

from vivavoce.server.rtp.srtp import SUITES, CryptoAttribute, SrtpKeys, SrtpTransport
from vivavoce.server.wire import WireError

KEY = "d0RmdmcmVCspeEc3QGZiNWpVLFJhQX1cfHAwJSoj"  # the example of RFC 4568


def sides(suite=SUITES[0]):
    ours, theirs = CryptoAttribute.new(suite), CryptoAttribute.new(suite)
    return SrtpTransport(SrtpKeys.of(ours, theirs)), SrtpTransport(SrtpKeys.of(theirs, ours))


def packet(number):
    return RtpPacket(0, 0, number, 160 * number, 1234, bytes(160)).serialize()


@pytest.mark.parametrize("suite", SUITES)
def test_a_packet_is_encrypted_and_decrypted(suite):
    ours, theirs = sides(suite)
    for number in range(10):
        protected = ours.protect(packet(number), is_rtcp=False)
        assert protected[:12] == packet(number)[:12]
        assert bytes(20) not in protected
        assert len(protected) == 172 + (10 if suite.endswith("80") else 4)
        assert theirs.unprotect(protected, is_rtcp=False) == packet(number)


def test_a_changed_repeated_or_foreign_packet_is_refused():
    ours, theirs = sides()
    _, stranger = sides()
    protected = ours.protect(packet(1), is_rtcp=False)
    assert stranger.unprotect(protected, is_rtcp=False) is None
    assert theirs.unprotect(protected[:-1] + bytes([protected[-1] ^ 1]), is_rtcp=False) is None
    assert theirs.unprotect(packet(1), is_rtcp=False) is None
    assert theirs.unprotect(protected, is_rtcp=False) == packet(1)
    assert theirs.unprotect(protected, is_rtcp=False) is None
    assert theirs.unprotect(b"", is_rtcp=False) is None
    assert theirs.unprotect(bytes(2_000), is_rtcp=True) is None


def test_attributes_are_read_and_written():
    attribute = CryptoAttribute.parse(f"1 AES_CM_128_HMAC_SHA1_80 inline:{KEY}|2^20")
    assert (attribute.tag, attribute.suite, len(attribute.key)) == (1, "AES_CM_128_HMAC_SHA1_80", 30)
    assert attribute.format() == f"1 AES_CM_128_HMAC_SHA1_80 inline:{KEY}"
    made = CryptoAttribute.new("AES_CM_128_HMAC_SHA1_32", 7)
    assert CryptoAttribute.parse(made.format()) == made


def test_keys_are_not_shown():
    attribute = CryptoAttribute.parse(f"1 AES_CM_128_HMAC_SHA1_80 inline:{KEY}")
    keys = SrtpKeys.of(attribute, attribute)
    for text in (repr(attribute), repr(keys), str(keys)):
        assert KEY not in text
        assert repr(attribute.key) not in text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "TAG SUITE"),
        ("1 AES_CM_128_HMAC_SHA1_80", "TAG SUITE"),
        (f"1 AES_256_CM_HMAC_SHA1_80 inline:{KEY}", "not supported"),
        ("1 AES_CM_128_HMAC_SHA1_80 inline:abc", "base64"),
        ("1 AES_CM_128_HMAC_SHA1_80 inline:YWJj", "30 bytes, not 3"),
        (f"1 AES_CM_128_HMAC_SHA1_80 inline:{KEY}|2^20|1:4", "master key identifiers"),
        (f"1 AES_CM_128_HMAC_SHA1_80 inline:{KEY} UNENCRYPTED_SRTP", "session parameters"),
    ],
)
def test_attributes_that_cannot_be_used_are_refused(value, reason):
    with pytest.raises(WireError, match=reason):
        CryptoAttribute.parse(value)


def test_both_sides_have_one_suite():
    with pytest.raises(WireError, match="differ"):
        SrtpKeys.of(CryptoAttribute.new(SUITES[0]), CryptoAttribute.new(SUITES[1]))
