"""A person speaks to the page and hears it answer, in a real Chromium; what it answers is scripted, so it is exact."""

import numpy as np
import pytest

from tests.browser.chromium import MICROPHONE_RATE, until, visiting
from tests.server.scripted import pitch, tone, watermark
from vivavoce.dialogue.items import AudioPart

pytestmark = pytest.mark.debian("chromium")


def quiet(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * MICROPHONE_RATE), np.float32)


def spoken(seconds: float = 1.0) -> np.ndarray:
    return tone(440, seconds, MICROPHONE_RATE)


async def test_a_spoken_question_is_answered(server, tmp_path):
    async with visiting(server, tmp_path, says=np.concatenate([quiet(1), spoken()])) as visit:
        await visit.page.click("#talk")
        await visit.shows(".user .words", "tone 440")
        await visit.shows(".assistant .words", "You said: tone 440")
        await visit.shows(".assistant .latency", "answered after")
        await visit.shows("#timing", "median")
        await visit.is_in("listening")
        sound, rate = await visit.heard()
        assert len(sound) / rate == pytest.approx(0.4, abs=0.03)
        assert abs(pitch(sound, rate) - watermark("You said: tone 440")) < 10
        await visit.shows("#announcer", "You said: tone 440", 0)
        picture = tmp_path / "talked.png"
        await visit.page.screenshot(path=picture, full_page=True)
        assert picture.stat().st_size > 20_000
        assert visit.complaints == [] and visit.places == {f"127.0.0.1:{server.port}"}
        await visit.page.click("#talk")
        await visit.is_in("off")
    await until(lambda: not server.sessions, "ending the conversation ends the session")


async def test_an_interruption_silences_the_reply_and_keeps_what_was_heard(server, tmp_path):
    async with visiting(server, tmp_path, says=np.concatenate([quiet(4), spoken()])) as visit:
        await visit.page.click("#talk")
        await visit.is_in("listening")
        await visit.write("a long one")
        await visit.is_in("speaking")
        await visit.is_in("hearing")
        await visit.shows(".assistant.cut .notes", "interrupted")
        long_reply, rate = await visit.heard()
        await visit.shows(".assistant .words", "You said: tone 440", 1)
        (cut,) = visit.sent_of("conversation.item.truncate")
        assert cut["audio_end_ms"] == pytest.approx(len(long_reply) / rate * 1000, abs=60, rel=0.2)
        kept = server.host.opened[0].item(cut["item_id"]).content.parts[0]
        assert isinstance(kept, AudioPart)
        kept_ms = len(kept.samples) / kept.rate * 1000
        assert kept_ms <= cut["audio_end_ms"]  # the server cut first, to what it had been told was heard
        assert kept_ms > 0.5 * cut["audio_end_ms"]
        assert visit.complaints == []


async def test_the_stop_button_stops(server, tmp_path):
    async with visiting(server, tmp_path) as visit:
        await visit.write("a long one")
        await visit.is_in("speaking")
        await visit.page.click("#stop")
        await visit.is_in("listening")
        before, _ = await visit.heard()
        await visit.write("something else")
        await visit.shows(".assistant .words", "You said: something else", 1)
        await visit.is_in("listening")
        sound, rate = await visit.heard()
        assert len(sound[len(before) :]) / rate == pytest.approx(0.4, abs=0.03)
        assert abs(pitch(sound[len(before) :], rate) - watermark("You said: something else")) < 10
        assert visit.complaints == [] and await visit.page.locator("#problem").is_hidden()


async def test_written_answers_for_quiet_rooms(server, tmp_path):
    async with visiting(server, tmp_path) as visit:
        await visit.page.click("summary")
        await visit.page.select_option("#answers", "text")
        await visit.write("hello")
        await visit.shows(".assistant .words", "You said: hello")
        await visit.is_in("listening")
        assert await visit.page.is_disabled("#mute")
        assert not [event for event in visit.received if event["type"] == "response.output_audio.delta"]
        assert visit.complaints == []


async def test_a_muted_microphone_is_silent_but_time_goes_on(server, tmp_path):
    async with visiting(server, tmp_path, says=spoken(30)) as visit:
        await visit.page.click("#talk")
        await visit.is_in("hearing")
        await visit.page.click("#mute")
        await visit.shows(".assistant .words", "You said: tone 440")
        assert await visit.page.get_attribute("#mute", "aria-pressed") == "true"


async def test_a_broken_connection_is_taken_up_again(server, tmp_path):
    async with visiting(server, tmp_path, says=quiet(1)) as visit:
        await visit.page.click("#talk")
        await visit.write("a long one")
        await visit.is_in("speaking")
        (session,) = server.sessions
        for connection in list(session.connections):
            connection.drop(1012, "as if the network had gone")
        await until(lambda: len(visit.sockets) == 2, "the page comes back")
        await visit.is_in("speaking")
        await visit.write("and on")
        await visit.shows(".assistant .words", "You said: and on", 1)
        assert len(server.host.opened) == 1 and "resume_token=" in visit.sockets[1]
        assert visit.complaints == []


async def test_a_session_that_is_gone_begins_anew(server, tmp_path):
    async with visiting(server, tmp_path) as visit:
        await visit.write("hello")
        await visit.shows(".assistant .words", "You said: hello")
        (session,) = server.sessions
        await session.close(1012, "as if the server had been restarted")
        await visit.shows("#captions .break", "this is a new one")
        await visit.write("again")
        await visit.shows(".assistant .words", "You said: again", 1)
        assert len(server.host.opened) == 2


async def test_without_a_microphone_one_can_still_write(server, tmp_path):
    async with visiting(server, tmp_path) as visit:  # nobody allows it
        await visit.page.click("#talk")
        await visit.shows("#problem", "was not allowed")
        await visit.is_in("off")
        await visit.write("hello")
        await visit.shows(".assistant .words", "You said: hello")


async def test_a_conversation_that_starts_in_writing_can_continue_by_voice(server, tmp_path):
    async with visiting(server, tmp_path, says=np.concatenate([quiet(1), spoken()])) as visit:
        await visit.write("hello")
        await visit.shows(".assistant .words", "You said: hello")
        await visit.shows("#talk-label", "Start talking")
        await visit.page.click("#talk")
        await visit.shows(".assistant .words", "You said: tone 440", 1)
        await visit.shows("#talk-label", "End conversation")
        assert len(server.host.opened) == 1 and visit.complaints == []


async def test_what_goes_wrong_is_said(server, tmp_path):
    async with visiting(server, tmp_path) as visit:
        await visit.write("please fail")
        await visit.shows("#problem", "The reply failed: the script says so")
        await visit.is_in("listening")


@pytest.mark.parametrize(
    ("code", "why", "shown"),
    [(4001, "resumed elsewhere", "goes on in another window"), (1008, "not welcome", "The server refused")],
)
async def test_an_end_is_explained(server, tmp_path, code, why, shown):
    async with visiting(server, tmp_path) as visit:
        await visit.write("hello")
        await visit.shows(".assistant .words", "You said: hello")
        (session,) = server.sessions
        await session.close(code, why)
        await visit.shows("#problem", shown)
        await visit.is_in("off")
        await visit.write("again")
        await visit.shows(".assistant .words", "You said: again", 1)
        assert await visit.page.locator("#problem").is_hidden()
