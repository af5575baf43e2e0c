"""`python -m vivavoce.quant.every_method mini-asr --out DIR`: every method on one model, with reports and one table.

Rows are printed as they are measured: closeness of logits, audio similarity, word errors, right answers, speed and
memory, each beside float in the same run.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vivavoce import hub
from vivavoce.errors import InputError
from vivavoce.quant.policy import METHODS, policy_for
from vivavoce.quant.qat import FineTuning
from vivavoce.quant.run import QuantizeOptions, quantize, speech_for, write_report

HEAD = ("method", "divergence", "same id", "ViSQOL", "word errors", "right", "batch 1", "batch 8", "memory", "verdict")
Figures = dict[str, Any]


def run(
    model: str, out: Path, methods: Sequence[str], options: QuantizeOptions, moonshine: Path | None = None
) -> dict[str, Figures]:
    """Quantise by each method, report on each, and write the table."""
    source = hub.resolve(model)
    speech = speech_for(policy_for(source).kind, options)
    found: dict[str, Figures] = {}
    lines = [row(HEAD), row(["---"] * len(HEAD))]
    print("\n".join(lines), flush=True)
    for method in methods:
        with tempfile.TemporaryDirectory() as folder:
            try:
                quantize(model, method, Path(folder) / method, options)
            except InputError as error:
                lines.append(row([method, f"refused: {error}"]))
            else:
                found[method] = write_report(source, Path(folder) / method, out / method, speech, moonshine)
                lines.append(row([method, *cells(found[method])]))
        print(lines[-1], flush=True)
    (out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf8")
    (out / "table.json").write_text(json.dumps(found, indent=2, ensure_ascii=False), encoding="utf8")
    return found


def cells(figures: Figures) -> list[str]:
    aligned, alone = figures.get("aligned") or {}, figures.get("alone") or {}
    words = (figures.get("transcripts") or {}).get("wer") or {n: each.get("wer") for n, each in alone.items()}
    steps, load = figures["step_ms"], figures["loading"]
    visqol = aligned.get("visqol")
    return [
        f"{figures['logits']['divergence']:.5f}",
        f"{figures['logits']['agreement']:.4f}",
        "–" if visqol is None else f"{visqol / aligned['ceiling']['visqol']:.3f}",
        _both(words),
        _both({name: each.get("right") for name, each in alone.items()}),
        *(f"{steps['float'][batch] / steps['quantised'][batch]:.2f}×" for batch in steps["float"]),
        f"{load['quantised']['memory'] / max(1, load['float']['memory']):.2f}",
        figures["verdict"].partition(";")[0],
    ]


def _both(values: dict[str, float | None]) -> str:
    before, after = values.get("float"), values.get("quantised")
    return "–" if before is None or after is None else f"{100 * before:.1f} → {100 * after:.1f} %"


def row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vivavoce.quant.every_method", description=__doc__)
    parser.add_argument("model", help="bundled name or folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--items", type=int, default=30)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--steps", type=int, default=FineTuning.steps, help="of fine-tuning")
    parser.add_argument("--moonshine", type=Path, default=None, help="unpacked npm package, to transcribe audio with")
    given = parser.parse_args(arguments)
    options = QuantizeOptions(items=given.items, fine_tuning=FineTuning(given.steps))
    given.out.mkdir(parents=True, exist_ok=True)
    run(given.model, given.out, given.methods, options, given.moonshine)


if __name__ == "__main__":
    main()
