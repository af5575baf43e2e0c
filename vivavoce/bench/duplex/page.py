"""The HTML page of the duplex lab: every call with its recording and a timeline."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from vivavoce.audio.io import Sound, write
from vivavoce.bench.duplex.measure import CallOutcome
from vivavoce.bench.duplex.overlap import Segment
from vivavoce.bench.duplex.published import NAMES, SYSTEMS, TAU_VOICE
from vivavoce.bench.turn_sounds import RATE, Samples

WIDTH, ROW = 900, 22
COLOURS = {"question": "#2868b0", "interruption": "#c0392b", "backchannel": "#2e8b57", "vocal tic": "#8e44ad"}
OTHER_COLOUR, AGENT_COLOUR, PAUSE_COLOUR = "#d68910", "#7f8c8d", "#ffffff"
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 960px; color: #222; }
table { border-collapse: collapse; } td, th { padding: 2px 8px; text-align: right; }
th:first-child, td:first-child { text-align: left; }
article { border-top: 1px solid #ddd; padding: 10px 0; } audio { width: 100%; height: 32px; } .bad { color: #c0392b; }
svg { width: 100%; height: auto; background: #f7f7f7; } h3 { margin: 0; font-size: 14px; }
"""


def write_page(
    result: dict[str, Any], outcomes: Sequence[CallOutcome], recordings: Sequence[Samples], out: Path
) -> Path:
    """Write `index.html` and a recording of each call beside it, caller left and replies right."""
    folder = out / "calls"
    folder.mkdir(parents=True, exist_ok=True)
    articles = []
    for index, (each, sound) in enumerate(zip(outcomes, recordings, strict=True)):
        name = f"{index:03d}.ogg"
        write(folder / name, Sound(sound, RATE), "opus")
        articles.append(_article(each, f"calls/{name}"))
    page = out / "index.html"
    page.write_text(_page(result, articles), encoding="utf8")
    return page


def _page(result: dict[str, Any], articles: Sequence[str]) -> str:
    title = f"Duplex lab: {escape(result['url'])}"
    key = ", ".join(f'<b style="color:{colour}">{escape(name)}</b>' for name, colour in COLOURS.items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1><p>{escape(result['how'])}; {escape(result['sounds'])}</p>{_table(result)}"
        f"<p>Upper row: the caller ({key}, others orange, pauses white). Lower row: replies as heard. "
        f"Ticks are seconds.</p>{''.join(articles)}</html>\n"
    )


def _table(result: dict[str, Any]) -> str:
    rows = [("this server", [result["figures"].get(name) for name in NAMES])]
    rows += [(each.name, [each.figures[name] for name in NAMES]) for each in SYSTEMS if each.source == TAU_VOICE]
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *NAMES))
    body = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{_number(value)}</td>' for value in values)}</tr>"
        for name, values in rows
    )
    return f"<table><tr>{head}</tr>{body}</table><p>Others: {escape(TAU_VOICE)}</p>"


def _article(found: CallOutcome, audio: str) -> str:
    title = f"{found.scene}, {found.language}, {found.condition}, {found.voice}"
    said = escape(found.text) + (f" – over the reply: {escape(found.over_name)}" if found.over_name else "")
    return (
        f"<article><h3>{escape(title)}</h3><p>{said}<br>{_verdict(found)}</p>{timeline_svg(found)}"
        f'<audio controls preload="none" src="{escape(audio)}"></audio></article>'
    )


def _verdict(found: CallOutcome) -> str:
    parts = ["answered" if found.answered else '<span class="bad">not answered</span>']
    if found.latency is not None:
        parts.append(f"after {found.latency:.2f} s")
    if found.spoke_early:
        parts.append('<span class="bad">spoke before the question had ended</span>')
    if found.over and found.stopped is None:
        parts.append(f"{escape(found.over)}: not measured")
    elif found.stopped is not None:
        wanted = found.stopped == (found.over == "interruption")
        text = f"stopped after {found.stop_seconds:.2f} s" if found.stop_seconds is not None else "kept speaking"
        shown = f"{escape(found.over)}: {text}"
        parts.append(shown if wanted else f'<span class="bad">{shown}</span>')
    if found.stray_answered:
        parts.append('<span class="bad">answered a sound in silence</span>')
    if found.cut_short:
        parts.append('<span class="bad">stopped while the caller was silent</span>')
    if found.failure:
        parts.append(f'<span class="bad">{escape(found.failure)}</span>')
    return ", ".join(parts)


def timeline_svg(found: CallOutcome) -> str:
    """Caller above, replies below, a tick every second."""
    scale = WIDTH / max(found.seconds, 1.0)
    bars = [
        _bar(each.start, each.end, 2, COLOURS.get(each.kind, OTHER_COLOUR), scale, each.kind) for each in found.caller
    ]
    bars += [_bar(start, end, 2, PAUSE_COLOUR, scale, "pause") for start, end in found.pauses]
    bars += [_segment_bar(each, scale) for each in found.agent]
    ticks = "".join(
        f'<line x1="{second * scale:.1f}" x2="{second * scale:.1f}" y1="{2 * ROW}" y2="{2 * ROW + 5}" stroke="#999"/>'
        for second in range(int(found.seconds) + 1)
    )
    return f'<svg viewBox="0 0 {WIDTH} {2 * ROW + 6}" role="img">{"".join(bars)}{ticks}</svg>'


def _segment_bar(segment: Segment, scale: float) -> str:
    return _bar(segment[0], segment[1], ROW, AGENT_COLOUR, scale, "reply")


def _bar(start: float, end: float, top: int, colour: str, scale: float, title: str) -> str:
    return (
        f'<rect x="{start * scale:.1f}" y="{top}" width="{max(1.0, (end - start) * scale):.1f}" height="{ROW - 4}" '
        f'fill="{colour}"><title>{escape(title)} {start:.2f}–{end:.2f} s</title></rect>'
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
