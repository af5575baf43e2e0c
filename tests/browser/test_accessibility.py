"""axe-core finds nothing wrong with the page: in both themes, on phone and desktop, before, while and after talking."""

import numpy as np
import pytest

from tests.browser.chromium import MICROPHONE_RATE, visiting
from tests.browser.test_visitor import EXAMPLES, MODEL
from tests.server.node_packages import npm_folder
from tests.server.scripted import ScriptedHost, tone

pytestmark = [pytest.mark.debian("chromium"), pytest.mark.npm("npm"), pytest.mark.full]

VIOLATIONS = """async () => {
  const { violations, passes } = await axe.run(document, { resultTypes: ["violations"] });
  if (passes.length < 10) throw new Error("axe has looked at nothing");
  return violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(" ")}`);
}"""


@pytest.fixture(scope="module")
def axe() -> str:
    return (npm_folder() / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["phone", "desktop"])
async def test_the_page_has_no_violations(running, tmp_path, axe, scheme, size):
    server = await running(host=ScriptedHost(models=(MODEL,)))
    viewport = {"width": 375, "height": 812} if size == "phone" else {"width": 1280, "height": 860}
    spoken = np.concatenate([np.zeros(MICROPHONE_RATE), tone(500, 0.6, MICROPHONE_RATE)])
    context = {"viewport": viewport, "color_scheme": scheme, "bypass_csp": True}  # axe is not the page's own
    async with visiting(server, tmp_path, says=spoken, **context) as visit:
        page = visit.page
        await page.add_script_tag(content=axe)
        assert await page.evaluate(VIOLATIONS) == []
        await page.click("#talk")
        await visit.shows(".assistant .words", "You said: tone 500")
        await visit.is_in("listening")
        assert await page.evaluate(VIOLATIONS) == []
        await visit.write(EXAMPLES[0])
        await visit.shows(".assistant .words", EXAMPLES[0], nth=1)
        await page.click("summary")
        await page.select_option("#language", "zh-Hant")
        assert await page.evaluate(VIOLATIONS) == []


async def test_axe_sees_what_is_wrong(running, tmp_path, axe):
    server = await running(host=ScriptedHost(models=(MODEL,)))
    async with visiting(server, tmp_path, bypass_csp=True) as visit:
        await visit.page.add_script_tag(content=axe)
        await visit.page.evaluate("document.getElementById('message').removeAttribute('aria-label')")
        await visit.page.evaluate("document.body.append(document.createElement('button'))")
        found = await visit.page.evaluate(VIOLATIONS)
        assert any(line.startswith("button-name") for line in found)
