"""Whoever cannot see, point or read small print can use the page too."""

import pytest

from tests.browser.chromium import visiting

pytestmark = pytest.mark.debian("chromium")

CONTROLS = {
    "button",
    "textbox",
    "combobox",
    "slider",
    "checkbox",
    "DisclosureTriangle",
    "meter",
    "image",
    "log",
    "status",
}
REACHABLE = ["talk", "mute", "stop", "captions", "message", "send", "new-conversation", "download", "settings", "model"]
REACHABLE += ["voice", "answers", "turn-end", "silence", "announce"]

FOCUSED = """() => {
  const { id, tagName, innerText } = document.activeElement;
  return id || (tagName === "SUMMARY" ? "settings" : innerText.toLowerCase());
}"""

# Contrast of every visible text with the nearest painted background, as WCAG 2 defines it.
FAINT_TEXTS = """() => {
  const channels = (colour) => {
    const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (colour) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = channels(colour).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (channels(colour)[3] === 255) return colour;
    }
    return "white";
  };
  const contrast = (a, b) => {
    const [dark, light] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (light + 0.05) / (dark + 0.05);
  };
  const texts = [...document.querySelectorAll("body *")].filter((element) =>
    element.checkVisibility() && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
  const inputs = [...document.querySelectorAll("input, select")].filter((element) => element.checkVisibility());
  const ratio = (element) => contrast(getComputedStyle(element).color, background(element));
  const faint = [...texts, ...inputs]
    .map((element) => [element.id || element.className || element.tagName, ratio(element)])
    .filter(([, ratio]) => ratio < 4.5);
  return { checked: texts.length, faint };
}"""


async def test_every_control_has_a_name(server, tmp_path):
    async with visiting(server, tmp_path) as visit:
        await visit.page.click("summary")
        client = await visit.page.context.new_cdp_session(visit.page)
        nodes = (await client.send("Accessibility.getFullAXTree"))["nodes"]
        known = [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]
        ]
        controls = [(role, name) for role, name in known if role in CONTROLS]
        assert len(controls) >= 14
        assert [role for role, name in controls if not name and role not in ("status",)] == []
        assert {"main", "banner", "heading"} <= {role for role, _ in known}


async def test_the_keyboard_reaches_everything_in_reading_order(server, tmp_path):
    async with visiting(server, tmp_path) as visit:
        page = visit.page
        await visit.write("a long one")
        await visit.is_in("speaking")
        await page.evaluate("document.querySelector('details').open = true")
        await page.focus("#talk")
        seen = [await page.evaluate(FOCUSED)]
        for _ in REACHABLE[2:]:
            await page.keyboard.press("Tab")
            seen.append(await page.evaluate(FOCUSED))
        expected = [name for name in REACHABLE if name != "mute"]  # there is no microphone to mute
        assert seen == expected
        await page.focus("#stop")
        assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        await page.keyboard.press("Enter")
        await visit.is_in("listening")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_texts_stand_out(server, tmp_path, scheme):
    async with visiting(server, tmp_path, color_scheme=scheme) as visit:
        await visit.page.click("summary")
        await visit.write("a long one")
        await visit.is_in("speaking")
        await visit.page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
        found = await visit.page.evaluate(FAINT_TEXTS)
        assert found["checked"] > 20 and found["faint"] == []


async def test_a_phone_is_wide_enough(server, tmp_path):
    async with visiting(server, tmp_path, viewport={"width": 320, "height": 640}, has_touch=True) as visit:
        await visit.page.click("summary")
        await visit.write("a question that is so-very-very-very-very-very-very-long-that-it-cannot-be-broken")
        await visit.is_in("speaking")
        await visit.page.screenshot(path=tmp_path / "phone.png", full_page=True)
        assert await visit.page.evaluate("document.documentElement.scrollWidth") <= 320
        small = await visit.page.evaluate(
            """() => [...document.querySelectorAll("button, select, input:not([type=range], [type=checkbox])")]
              .filter((element) => element.checkVisibility() && element.getBoundingClientRect().height < 44)
              .map(({ id }) => id)"""
        )
        assert small == []
