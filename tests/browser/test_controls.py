"""The page's controls, keys and languages, in a real Chromium."""

import httpx
import pytest

from tests.browser.chromium import until, visiting

pytestmark = pytest.mark.debian("chromium")
KEY = "a-secret-of-the-house"


async def test_controls_reach_the_conversation_and_are_remembered(server, tmp_path):
    async with visiting(server, tmp_path) as visit:
        page = visit.page
        await page.click("summary")
        await visit.write("hello")
        await visit.is_in("listening")
        assert await page.input_value("#silence") == "240"  # as the server has it
        await page.fill("#silence", "600")
        await page.dispatch_event("#silence", "change")
        await page.select_option("#voice", "ben")
        settings = server.host.opened[0]
        await until(lambda: settings.settings.voice == "ben", "the voice is set")
        assert settings.settings.turn.silence_duration_ms == 600
        await page.select_option("#turn-end", "high")
        await until(lambda: settings.settings.turn.eagerness == "high", "the eagerness is set")
        assert settings.settings.turn.detector == "semantic" and await page.is_disabled("#silence")
        await page.select_option("#model", "scripted-2")
        await until(lambda: len(server.host.opened) == 2, "another model is another session")
        await page.reload(wait_until="networkidle")
        await visit.write("hello again")
        await visit.shows(".assistant .words", "You said: hello again")
        last = server.host.opened[-1].settings
        assert (last.voice, last.turn.detector, last.turn.eagerness) == ("ben", "semantic", "high")
        assert "model=scripted-2" in visit.sockets[-1] and visit.complaints == []


async def test_a_key_is_asked_for_and_exchanged(running, tmp_path):
    server = await running(api_keys=(KEY,))
    async with visiting(server, tmp_path) as visit:
        await visit.page.fill("#key-field", "not-the-right-one")
        await visit.page.press("#key-field", "Enter")
        await visit.shows("#key-problem", "does not know this key")
        await visit.page.fill("#key-field", KEY)
        await visit.page.press("#key-field", "Enter")
        await visit.page.locator("#key").wait_for(state="hidden")
        assert await visit.page.evaluate("document.activeElement.id") == "talk"
        await visit.write("hello")
        await visit.shows(".assistant .words", "You said: hello")
        assert f"{server.http}/v1/realtime/client_secrets" in visit.requests
        assert KEY not in await visit.page.evaluate("JSON.stringify({ ...localStorage, ...sessionStorage })")


async def test_a_link_may_bring_a_browser_key(running, tmp_path):
    server = await running(api_keys=(KEY,))
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as http:
        minted = (await http.post(f"{server.http}/v1/realtime/client_secrets", json={})).json()["value"]
    async with visiting(server, tmp_path, address=f"/#key={minted}") as visit:
        assert visit.page.url == f"{server.http}/"
        await visit.write("hello")
        await visit.shows(".assistant .words", "You said: hello")
        assert visit.complaints == []


async def test_the_page_speaks_traditional_chinese(server, tmp_path):
    async with visiting(server, tmp_path, locale="zh-TW") as visit:
        page = visit.page
        assert await page.get_attribute("html", "lang") == "zh-Hant"
        await visit.shows("#talk", "開始說話")
        english = await page.evaluate(
            """async () => {
              const { LANGUAGES } = await import("/strings.js");
              const names = (language) => Object.keys(LANGUAGES[language]).sort();
              const same = JSON.stringify(names("en")) === JSON.stringify(names("zh-Hant"));
              const holes = (text) => (text.match(/\\{\\w+\\}/g) ?? []).sort().join();
              const { en, "zh-Hant": zh } = LANGUAGES;
              const alike = names("en").every((name) => holes(en[name]) === holes(zh[name]));
              const said = document.body.innerText;
              const left = Object.values(LANGUAGES.en).filter((text) => text.length > 4 && said.includes(text));
              return { same, alike, left };
            }"""
        )
        assert english == {"same": True, "alike": True, "left": []}
        assert visit.complaints == []
