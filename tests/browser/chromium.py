"""A real Chromium on the page: its microphone plays a file, and what its loudspeaker would play is recorded."""

import asyncio
import base64
import contextlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import soundfile
from playwright.async_api import Page, WebSocket, async_playwright, expect
from starlette.responses import Response
from starlette.routing import Route

from tests.server.harness import DEADLINE, RunningServer

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--use-fake-device-for-media-stream",
]
MICROPHONE_RATE = 48_000

# Between the page and the loudspeaker: everything that goes to the destination goes to a recorder too.
TAP = """
window.played = [];
const connect = AudioNode.prototype.connect;
AudioNode.prototype.connect = function (target, ...rest) {
  if (target instanceof AudioDestinationNode) {
    const context = target.context;
    context.audioWorklet.addModule("recorder-of-the-test.js").then(() => {
      const recorder = new AudioWorkletNode(context, "recorder-of-the-test", { numberOfOutputs: 0 });
      recorder.port.onmessage = ({ data }) => window.played.push(data);
      window.playedRate = context.sampleRate;
      connect.call(this, recorder);
    });
  }
  return connect.call(this, target, ...rest);
};
"""
RECORDER = """
registerProcessor("recorder-of-the-test", class extends AudioWorkletProcessor {
  sound = new Float32Array(4096);
  filled = 0;
  process([[samples]]) {
    if (!samples) return true;
    this.sound.set(samples, this.filled);
    this.filled += samples.length;
    if (this.filled === this.sound.length) {
      this.port.postMessage(this.sound.slice());
      this.filled = 0;
    }
    return true;
  }
});
"""
AS_BASE64 = """() => {
  const bytes = (sound) => new Uint8Array(Int16Array.from(sound, (sample) => sample * 32767).buffer);
  return btoa(window.played.map((sound) => String.fromCharCode(...bytes(sound))).join(""));
}"""


@dataclass
class Visit:
    """An open page, and everything that went on in it."""

    page: Page
    server: RunningServer
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    sent: list[dict] = field(default_factory=list)
    received: list[dict] = field(default_factory=list)
    sockets: list[str] = field(default_factory=list)

    def watch(self) -> None:
        page = self.page
        page.on("console", lambda line: line.type in ("error", "warning") and self.complaints.append(line.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("websocket", self._watch_socket)

    def _watch_socket(self, socket: WebSocket) -> None:
        self.sockets.append(socket.url)
        socket.on("framesent", lambda frame: self.sent.append(json.loads(frame)))
        socket.on("framereceived", lambda frame: self.received.append(json.loads(frame)))

    @property
    def places(self) -> set[str]:
        """Where the page asked for anything."""
        return {urlsplit(url).netloc for url in self.requests + self.sockets}

    def sent_of(self, kind: str) -> list[dict]:
        return [event for event in self.sent if event["type"] == kind]

    async def is_in(self, state: str) -> None:
        """Wait until the page says where the conversation is."""
        await expect(self.page.locator("#talk")).to_have_attribute("data-state", state, timeout=DEADLINE * 1000)

    async def write(self, text: str) -> None:
        await self.page.fill("#message", text)
        await self.page.press("#message", "Enter")

    async def shows(self, selector: str, text: str, nth: int = 0) -> None:
        """Wait for a text on the page."""
        found = self.page.locator(selector).nth(nth)
        await expect(found).to_have_text(re.compile(re.escape(text)), timeout=DEADLINE * 1000)

    async def played(self) -> tuple[np.ndarray, int]:
        """All that the loudspeaker was given, and its rate."""
        data = base64.b64decode(await self.page.evaluate(AS_BASE64))
        return np.frombuffer(data, np.int16) / 32767, await self.page.evaluate("window.playedRate")

    async def heard(self) -> tuple[np.ndarray, int]:
        """The same without the silence around and in it, once all of it has been recorded."""
        count = await self.page.evaluate("window.played.length")
        await self.page.wait_for_function("(count) => window.played.length > count + 1", arg=count)
        sound, rate = await self.played()
        return sounding(sound, rate), rate


def sounding(sound: np.ndarray, rate: int) -> np.ndarray:
    """A sound without its silences."""
    block = rate // 200
    blocks = sound[: len(sound) // block * block].reshape(-1, block)
    return blocks[np.abs(blocks).max(axis=1) > 0.01].ravel()


@contextlib.asynccontextmanager
async def visiting(server: RunningServer, folder: Path, says: np.ndarray | None = None, address: str = "/", **context):
    """The page in a fresh browser whose microphone plays these samples once, and then is silent."""
    server.app.router.routes.append(Route("/recorder-of-the-test.js", recorder))
    flags = [*FLAGS]
    if says is not None:
        file = folder / "microphone.wav"
        soundfile.write(file, np.concatenate([says, np.zeros(60 * MICROPHONE_RATE)]), MICROPHONE_RATE, "PCM_16")
        flags += ["--use-fake-ui-for-media-stream", f"--use-file-for-fake-audio-capture={file}%noloop"]
    options = {"viewport": {"width": 900, "height": 1200}} | context
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch_persistent_context(
            folder / "profile", executable_path="/usr/bin/chromium", args=flags, **options
        )
        try:
            await browser.add_init_script(TAP)
            page = browser.pages[0]
            visit = Visit(page, server)
            visit.watch()
            await page.goto(server.http + address, wait_until="networkidle")
            yield visit
        finally:
            await browser.close()


async def recorder(request) -> Response:
    return Response(RECORDER, media_type="text/javascript")


async def until(condition, what: str) -> None:
    """Wait until something is so on our side of the wire."""
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what
