"""`viva bench answer --text`: the phrasings that are for evaluation alone, asked and answered as text.

It measures how many ways to ask a speech-to-speech model knows, without its recognition and its voice.
"""

import json
from pathlib import Path
from typing import Any

import torch

from vivavoce import hub
from vivavoce.device import pick
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.train.lm.evaluate import evaluation_set_answers, summary

FIGURES = ("right", "right_inside", "declined_outside", "declined_inside")


def run(model: str = "mini-speech", device: str = "auto", out: Path | None = None) -> dict[str, Any]:
    """Ask, score and print; write `answer_text.json` to `out`."""
    folder = hub.resolve(model)
    loaded = MossSpeech.load(folder, device=pick(device).torch_device, dtype=torch.float32)
    answers = evaluation_set_answers(loaded, TextTokenizer.load(folder))
    wrong = [
        {"intent": each.expected.intent, "asked": each.expected.user, "right": each.expected.reply}
        | {"said": each.transcribed}
        for each in answers
        if not each.is_right
    ]
    result = {"model": model, **summary(answers), "wrong": wrong}
    print(f"{model}: {len(answers)} questions, asked and answered as text")
    for name in FIGURES:
        print(f"{name.replace('_', ' ')}: {100 * result[name]:.1f} %")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "answer_text.json").write_text(json.dumps(result, indent=2, ensure_ascii=False), encoding="utf8")
    return result
