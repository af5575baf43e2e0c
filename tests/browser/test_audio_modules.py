"""The page's own sound processing, run where it lives: resampling, the playback buffer, what is kept for a resume."""

import numpy as np
import pytest
import pytest_asyncio

from tests.browser.chromium import visiting
from tests.server.harness import RunningServer
from tests.server.scripted import ScriptedHost, pitch, tone
from vivavoce.server.config import ServerOptions

pytestmark = [pytest.mark.debian("chromium"), pytest.mark.asyncio(loop_scope="module")]

RESAMPLE = """async ({ samples, from, to, piece }) => {
  const { Resampler } = await import("/resampler.js");
  const resampler = new Resampler(from, to);
  const out = [];
  for (let at = 0; at < samples.length; at += piece) {
    out.push(...resampler.step(Float32Array.from(samples.slice(at, at + piece))));
  }
  return [...out, ...resampler.flush()];
}"""

# Steps are [what, ...]: ["push", seconds], ["end"], ["pull", seconds], ["clear"]. The sound is a constant.
PLAY = """async ({ rate, steps }) => {
  const { PlaybackBuffer } = await import("/playback-buffer.js");
  const emitted = [], out = [];
  const buffer = new PlaybackBuffer(rate, (happening) => emitted.push({ ...happening, at: out.length / rate }));
  for (const [what, seconds] of steps) {
    if (what === "push") buffer.push("a", new Float32Array(Math.round(seconds * 24000)).fill(0.5));
    else if (what === "pull") {
      for (let block = 0; block < Math.round((seconds * rate) / 128); block++) {
        const samples = new Float32Array(128);
        buffer.pull(samples);
        out.push(...samples);
      }
    } else if (what === "end") buffer.end("a");
    else buffer.clear();
  }
  return { out, emitted: emitted.filter(({ type }) => type !== "progress"), startMs: buffer.startMs };
}"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    async with RunningServer(ScriptedHost(), ServerOptions()) as server, visiting(server, folder) as visit:
        yield visit.page


@pytest.mark.parametrize(("source", "target"), [(48_000, 24_000), (44_100, 24_000), (24_000, 44_100), (24_000, 24_000)])
async def test_resampling_keeps_the_tone_and_the_length(page, source, target):
    sound = tone(1000, 0.5, source)
    pieces = {}
    for piece in (128, len(sound)):
        arguments = {"samples": sound.tolist(), "from": source, "to": target, "piece": piece}
        pieces[piece] = np.array(await page.evaluate(RESAMPLE, arguments))
    assert np.array_equal(pieces[128], pieces[len(sound)])  # in pieces as in one
    assert len(pieces[128]) == round(0.5 * target)
    inner = slice(target // 100, -target // 100)
    assert np.abs(pieces[128] - tone(1000, 0.5, target))[inner].max() < 1e-3


async def test_what_the_lower_rate_cannot_hold_does_not_come_back_as_another_tone(page):
    alias = tone(15_000, 0.2, 48_000)
    arguments = {"samples": alias.tolist(), "from": 48_000, "to": 24_000, "piece": 128}
    sound = np.array(await page.evaluate(RESAMPLE, arguments))[240:-240]
    assert 20 * np.log10(np.abs(sound).max() / 0.3) < -60
    speech = tone(9_000, 0.2, 48_000)
    kept = np.array(await page.evaluate(RESAMPLE, arguments | {"samples": speech.tolist()}))[240:-240]
    assert 20 * np.log10(np.abs(kept).max() / 0.3) == pytest.approx(0, abs=0.5) and pitch(kept, 24_000) == 9000


async def play(page, *steps, rate=48_000):
    played = await page.evaluate(PLAY, {"rate": rate, "steps": steps})
    return np.array(played["out"]), played["emitted"], played["startMs"]


async def test_it_begins_when_80_ms_are_there(page):
    out, emitted, _ = await play(page, ["push", 0.06], ["pull", 0.1], ["push", 0.06], ["pull", 0.08], rate=24_000)
    assert [each["type"] for each in emitted] == ["started"]
    assert emitted[0]["at"] == pytest.approx(0.1, abs=0.01)
    assert out[emitted and round(emitted[0]["at"] * 24_000)] == 0.5  # a reply's own beginning is not faded


async def test_a_short_reply_does_not_wait_for_80_ms(page):
    out, emitted, _ = await play(page, ["push", 0.03], ["end"], ["pull", 0.1], rate=24_000)
    assert [each["type"] for each in emitted] == ["started", "finished"]
    assert np.count_nonzero(out) == round(0.03 * 24_000)


async def test_a_gap_fades_and_asks_for_more_the_next_time(page):
    steps = [["push", 0.1], ["pull", 0.3], ["push", 0.082], ["pull", 0.05], ["push", 0.2], ["end"], ["pull", 0.5]]
    out, emitted, start_ms = await play(page, *steps, rate=24_000)
    assert [each["type"] for each in emitted] == ["started", "underrun", "finished"] and start_ms == 85
    assert np.abs(np.diff(out[: round(0.4 * 24_000)]))[1:].max() < 0.01  # no step at the gap's edges
    assert emitted[-1]["ms"] == pytest.approx(382)  # and nothing of the sound is lost
    assert np.count_nonzero(out) >= round(0.38 * 24_000)


async def test_an_interruption_is_silent_within_a_moment(page):
    out, emitted, _ = await play(page, ["push", 1.0], ["pull", 0.2], ["clear"], ["pull", 0.2])
    assert [each["type"] for each in emitted] == ["started", "cleared"]
    assert emitted[-1]["ms"] == pytest.approx(208, abs=4)
    after = out[round(0.2 * 48_000) :]
    assert np.count_nonzero(after) < 0.012 * 48_000 and np.abs(np.diff(after)).max() < 0.01


async def test_too_much_is_cut_at_its_oldest(page):
    _, emitted, _ = await play(page, ["push", 6.0], ["end"], ["pull", 5.0], rate=24_000)
    assert [(each["type"], round(each["ms"])) for each in emitted if each["type"] != "started"] == [
        ("dropped", 2000),
        ("finished", 6000),
    ]


async def test_sound_of_a_break_is_sent_once(page):
    numbers = await page.evaluate(
        """async () => {
          const { UnconfirmedAudio } = await import("/unconfirmed-audio.js");
          const sound = new UnconfirmedAudio();
          const piece = () => sound.add(new Float32Array(480));
          for (let count = 0; count < 100; count++) piece();
          const short = sound.after(1500).length;
          for (let count = 0; count < 1000; count++) piece();
          const long = sound.after(2000).length;
          for (let count = 0; count < 50; count++) piece();
          return [short, long, sound.after(2000 + 20 * long).length];
        }"""
    )
    assert numbers[0] == 25 and 490 <= numbers[1] <= 501 and numbers[2] == 50
