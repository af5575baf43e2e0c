"""What a visitor sees and can do, in a real Chromium; with `VIVA_SCREENSHOTS=FOLDER`, its pictures are kept there."""

import os
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.browser.chromium import MICROPHONE_RATE, visiting
from tests.server.scripted import ScriptedHost, tone
from vivavoce.server.host import ModelCard

pytestmark = [pytest.mark.debian("chromium"), pytest.mark.full]

KEY = "a-secret-of-the-house"
EXAMPLES = ("What time is breakfast?", "Could you wake us at seven?", "What does the curry cost?")
MANDARIN = ("早餐幾點開始？", "請七點叫我們起床。", "咖哩多少錢？")
MODEL = ModelCard(
    "hotel-speech",
    parameters=9_100_000_000,
    languages=("en", "zh"),
    introduction={"en": "This is a hotel. Ask for a room.", "zh-Hant": "這裡是飯店。您可以訂房。"},
    examples={"en": EXAMPLES, "zh-Hant": MANDARIN},
)

# How far the corners of the button's texts and pictures are inside its circle, in pixels; negative: outside.
INSIDE = """() => {
  const circle = document.getElementById("talk").getBoundingClientRect();
  const [x, y, radius] = [circle.x + circle.width / 2, circle.y + circle.height / 2, circle.width / 2];
  const range = document.createRange();
  range.selectNodeContents(document.getElementById("talk-label"));
  const boxes = [...range.getClientRects(), document.querySelector("#talk svg").getBoundingClientRect()];
  const reach = ({ left, right, top, bottom }) =>
    Math.hypot(Math.max(x - left, right - x), Math.max(y - top, bottom - y));
  return radius - Math.max(...boxes.map(reach));
}"""


@pytest.fixture
async def hotel(running):
    return await running(host=ScriptedHost(models=(MODEL,)))


async def test_the_page_says_who_answers_and_what_may_be_asked(hotel, tmp_path):
    async with visiting(hotel, tmp_path) as visit:
        await visit.shows("#about", "You are talking to hotel-speech, 9.1B parameters, in English and Chinese.")
        await visit.shows("#welcome", "This is a hotel. Ask for a room.")
        assert await visit.page.locator("#examples button").all_inner_texts() == [*EXAMPLES, MANDARIN[-1]]
        assert await visit.page.is_hidden("#recorded")
        await visit.page.click("#examples button >> nth=1")
        await visit.shows(".user .words", EXAMPLES[1])
        await visit.shows(".assistant .words", f"You said: {EXAMPLES[1]}")
        assert await visit.page.is_hidden("#examples")
        assert visit.complaints == []


async def test_the_page_names_the_stack_and_its_models(running, tmp_path):
    card = ModelCard(
        "cascade", parameters=646_000_000, languages=("en", "zh"), stack="assistant", parts=("a", "b", "c")
    )
    async with visiting(await running(host=ScriptedHost(models=(card,))), tmp_path) as visit:
        told = "You are talking to a → b → c (stack assistant), 650M parameters, in English and Chinese."
        await visit.shows("#about", told)
        await visit.page.select_option("#language", "zh-Hans")
        await visit.shows("#about", "与您对话的是 a → b → c（组合 assistant），6.5亿 参数，语言：英语和中文。")
        assert visit.complaints == []


@pytest.mark.parametrize(("tag", "language"), [("zh-TW", "zh-Hant"), ("zh-CN", "zh-Hans"), ("fr-FR", "en")])
async def test_the_language_is_the_browsers_and_can_be_changed(hotel, tmp_path, tag, language):
    starts = {"zh-Hant": "開始說話", "zh-Hans": "开始说话", "en": "Start talking"}
    async with visiting(hotel, tmp_path, locale=tag) as visit:
        await visit.shows("#talk", starts[language])
        assert await visit.page.input_value("#language") == language
        other = "en" if language != "en" else "zh-Hans"
        await visit.page.select_option("#language", other)
        await visit.shows("#talk", starts[other])
        assert await visit.page.get_attribute("html", "lang") == other
        await visit.page.reload(wait_until="networkidle")
        await visit.shows("#talk", starts[other])
        assert visit.complaints == []


async def test_the_first_word_to_a_mandarin_browser(hotel, tmp_path):
    async with visiting(hotel, tmp_path, locale="zh-TW") as visit:
        await visit.shows("#welcome", "這裡是飯店。您可以訂房。")
        assert await visit.page.locator("#examples button").all_inner_texts() == [*MANDARIN, EXAMPLES[-1]]
        assert await visit.page.get_attribute("#examples button >> nth=3", "lang") == "en"
        assert visit.complaints == []


async def test_all_languages_say_the_same(hotel, tmp_path):
    async with visiting(hotel, tmp_path) as visit:
        different = await visit.page.evaluate(
            """async () => {
              const { LANGUAGES } = await import("/strings.js");
              const holes = (text) => (text?.match(/\\{\\w+\\}/g) ?? ["none"]).sort().join();
              const { en, ...others } = LANGUAGES;
              return Object.values(others).flatMap((other) => [...new Set([...Object.keys(en), ...Object.keys(other)])]
                .filter((name) => !other[name] || !en[name] || holes(other[name]) !== holes(en[name])));
            }"""
        )
        assert different == []


async def test_a_muted_microphone_is_called_muted(hotel, tmp_path):
    async with visiting(hotel, tmp_path, says=np.zeros(MICROPHONE_RATE)) as visit:
        await visit.page.click("#talk")
        await visit.is_in("listening")
        await visit.page.click("#mute")
        await visit.shows("#state", "Your microphone is muted")
        await visit.page.click("#mute")
        await visit.shows("#state", "Listening")
        await visit.page.click("summary")
        names = await visit.page.locator("#microphone option").all_inner_texts()
        assert names and all(names)  # the devices that the browser has
        assert visit.complaints == []


async def test_a_new_conversation_and_the_transcript_of_the_last(hotel, tmp_path):
    async with visiting(hotel, tmp_path) as visit:
        page = visit.page
        assert await page.is_disabled("#new-conversation") and await page.is_disabled("#download")
        await visit.write("hello")
        await visit.shows(".assistant .words", "You said: hello")
        await visit.is_in("listening")
        async with page.expect_download() as started:
            await page.click("#download")
        lines = Path(await (await started.value).path()).read_text(encoding="utf8").splitlines()
        assert lines[0] == "You: hello" and lines[1].startswith("Reply: You said: hello")
        await page.click("#new-conversation")
        await visit.is_in("listening")
        assert await page.locator("#captions li").count() == 0 and await page.is_visible("#examples")
        assert len(hotel.host.opened) == 2
        await visit.write("again")
        await visit.shows(".assistant .words", "You said: again")
        assert visit.complaints == []


async def test_a_key_is_asked_for_before_anything_can_be_started(running, tmp_path):
    server = await running(host=ScriptedHost(models=(MODEL,)), api_keys=(KEY,))
    async with visiting(server, tmp_path, address="/#key=ek_that-has-expired") as visit:
        page = visit.page
        await visit.shows("#key-problem", "does not know this key")  # at once
        assert await page.is_disabled("#talk") and await page.is_disabled("#message")
        await visit.shows("#state", "Enter the key first")
        await page.fill("#key-field", KEY)
        await page.press("#key-field", "Enter")
        await page.locator("#key").wait_for(state="hidden")
        assert await page.is_enabled("#talk") and await page.inner_text("#key-problem") == ""
        await visit.write("hello")
        await visit.shows(".assistant .words", "You said: hello")


async def test_recording_is_announced(running, tmp_path):
    server = await running(host=ScriptedHost(models=(MODEL,)), record=str(tmp_path / "calls"))
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{server.http}/about")).json()["is_recorded"] is True
    async with visiting(server, tmp_path) as visit:
        await visit.shows("#recorded", "Conversations on this server are recorded.")
        assert await visit.page.is_visible("#recorded")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["phone", "desktop"])
async def test_pictures_in_both_themes_on_phone_and_desktop(hotel, tmp_path, scheme, size):
    viewport = {"width": 375, "height": 812} if size == "phone" else {"width": 1280, "height": 860}
    folder = Path(os.environ.get("VIVA_SCREENSHOTS") or tmp_path)
    spoken = np.concatenate([np.zeros(MICROPHONE_RATE), tone(500, 0.6, MICROPHONE_RATE)])
    async with visiting(hotel, tmp_path, says=spoken, viewport=viewport, color_scheme=scheme) as visit:
        page = visit.page
        await page.screenshot(path=folder / f"{size}-{scheme}-before.png", full_page=True)
        assert await page.evaluate(INSIDE) >= 8
        await page.click("#talk")
        await visit.shows(".assistant .words", "You said: tone 500")
        await visit.is_in("listening")
        await visit.write(EXAMPLES[0])
        await visit.shows(".assistant .words", EXAMPLES[0], nth=1)
        await visit.is_in("listening")
        await page.screenshot(path=folder / f"{size}-{scheme}.png", full_page=True)
        assert await page.evaluate(INSIDE) >= 8
        assert await page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        await page.click("summary")
        await page.screenshot(path=folder / f"{size}-{scheme}-details.png", full_page=True)
        await page.select_option("#language", "zh-Hant")
        assert await page.evaluate(INSIDE) >= 8
