"""The page lists the telephone calls in progress, in a real Chromium."""

import pytest

from tests.browser.chromium import visiting
from tests.server.sip.callee import Callee, dial
from tests.server.sip.phone import Telephone
from vivavoce.server.sip.options import SipOptions

pytestmark = [pytest.mark.debian("chromium"), pytest.mark.full]


async def test_the_page_lists_calls_of_both_directions(running, tmp_path):
    sip = SipOptions(listen=("127.0.0.1:0",), rtp_ports="20000-29999", dials=("sip:*@127.0.0.1",))
    server = await running(sip=sip)
    async with visiting(server, tmp_path) as visit:
        await visit.shows("#calls", "No calls now.")
        async with Telephone(server) as caller, Callee(server) as called:
            await caller.invite()
            await visit.shows("#calls", "from sip:ann@phone1 · 0:0")
            await dial(server, called.uri)
            invite = await called.invited()
            called.respond(invite, 180)
            await visit.shows("#calls", f"to {called.uri} · ringing")
            await visit.page.select_option("#language", "zh-Hant")
            await visit.shows("#calls", f"撥給 {called.uri} · 響鈴中")
            called.respond(invite, 486)
        await visit.shows("#calls", "目前沒有通話。")
        assert visit.complaints == []


async def test_a_server_without_telephone_shows_no_calls(server, tmp_path):
    async with visiting(server, tmp_path) as visit:
        await visit.shows("#about", "You are talking to")
        assert await visit.page.is_hidden("#calls-card")
