"""Which packets belong to a call, and what is counted of them."""

from vivavoce.server.rtp.source import ReceptionStatistics, SourceFilter

PEER, NAT, STRANGER = ("192.0.2.1", 4_000), ("198.51.100.7", 31_000), ("203.0.113.9", 4_000)


def test_losses_and_duplicates_are_counted_over_the_wrap_around():
    statistics = ReceptionStatistics(65_530, 65_530)
    for sequence in [65_530, 65_531, 65_533, 65_532, 65_533, 2, 0, 3]:
        statistics.add(sequence % 65_536)
    assert statistics.expected == 10
    assert statistics.received == 7  # 65533 came twice
    assert statistics.lost == 3
    assert statistics.fraction_lost() == 3 * 256 // 10
    assert statistics.fraction_lost() == 0  # since the last report


def test_a_packet_before_the_first_counts():
    statistics = ReceptionStatistics(7, 7)
    assert statistics.add(7)
    assert statistics.add(6)
    assert (statistics.expected, statistics.lost) == (2, 0)


def test_jitter_is_that_of_rfc_3550():
    statistics = ReceptionStatistics(0, 0)
    for number in range(1_000):
        statistics.add_transit(10.0 if number % 2 else 0.0)
    assert 9.9 < statistics.jitter <= 10.0


def test_the_first_source_is_kept_and_the_negotiated_one_has_precedence():
    source = SourceFilter(PEER)
    assert source.accept(NAT, 1, 0, 0.0)
    assert not source.accept(STRANGER, 1, 1, 0.02)
    assert source.address == NAT
    assert source.accept(PEER, 2, 500, 0.04)
    assert not source.accept(NAT, 1, 2, 0.06)
    assert source.address == PEER


def test_another_ssrc_takes_over_when_the_first_is_silent():
    source = SourceFilter(PEER)
    for number in range(10):
        assert source.accept(PEER, 1, number, number * 0.02)
        assert not source.accept(PEER, 2, number, number * 0.02)  # both at once: the first stays
    assert [source.accept(PEER, 2, number, 1.0) for number in (10, 11, 12)] == [True, True, True]
    assert source.ssrc == 2


def test_a_flood_of_ssrcs_does_not_take_over():
    source = SourceFilter(PEER)
    assert source.accept(PEER, 1, 0, 0.0)
    assert not any(source.accept(PEER, ssrc, 1, 5.0) for ssrc in range(2, 500))
    assert source.ssrc == 1


def test_a_sender_that_restarts_its_sequence_numbers_is_followed():
    source = SourceFilter(PEER)
    assert source.accept(PEER, 1, 100, 0.0)
    assert [source.accept(PEER, 1, number, 1.0) for number in (40_000, 40_001, 40_002, 40_003)] == [False] * 2 + [
        True
    ] * 2
