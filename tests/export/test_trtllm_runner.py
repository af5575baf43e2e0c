"""Replies through the runner, over a fake of TensorRT-LLM's runner that computes our own logits."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.export.trtllm_models import MOSS, cosyvoice, hidden_states, moss_speech
from tests.export.trtllm_modules import install
from vivavoce.export.trtllm.export import export_trtllm
from vivavoce.export.trtllm.moss_speech import row_of
from vivavoce.export.trtllm.options import TrtLlmOptions
from vivavoce.export.trtllm.runner import CosyVoiceEngine, MossSpeechEngine
from vivavoce.models.moss_speech.model import AUDIO, TEXT, MossSpeech

PIECE = 3  # ids per streamed step


class Runner:
    """`ModelRunnerCpp`: takes the likeliest id of `logits` after its processors, and yields several at a time."""

    opened: "Runner"

    def __init__(self, rules: dict[str, Any]) -> None:
        self.rules = rules

    @classmethod
    def from_dir(cls, engine_dir: str, rank: int, logits_processor_map: dict[str, Any] | None = None) -> "Runner":
        assert Path(engine_dir).name == "engines" and rank == 0
        cls.opened = cls(logits_processor_map or {})
        return cls.opened

    def logits(self, ids: list[int], given: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def generate(self, **given: Any) -> Iterator[dict[str, Tensor]]:
        assert given["streaming"] and given["return_dict"] and given["batch_input_ids"][0].dtype == torch.int32
        ids = given["batch_input_ids"][0].tolist()
        for generated in range(1, given["max_new_tokens"] + 1):
            logits = self.logits(ids, given)[None, None].clone()
            for name in given["logits_processor_names"] or ():
                self.rules[name](7, logits, [ids], None, None)
            ids = [*ids, int(logits.argmax())]
            ended = ids[-1] == given["end_id"]
            if generated % PIECE == 0 or ended or generated == given["max_new_tokens"]:
                yield {"output_ids": torch.tensor([[ids]]), "sequence_lengths": torch.tensor([[len(ids)]])}
            if ended:
                return


def with_engine(folder: Path) -> Path:
    (folder / "engines").mkdir()
    (folder / "engines" / "config.json").write_text("{}")
    return folder


def greedy(model: MossSpeech, rows: list[tuple[int, int]], max_rows: int) -> list[tuple[int, int]]:
    """What our engine would draw at temperature 0, without penalties."""
    rows, mode, generated = list(rows), model.start_mode(rows[-1]), []
    for _ in range(max_rows):
        text, audio = (head[0] for head in model.logits(hidden_states(model, torch.tensor(rows))[-1:]))
        audio[MOSS.eosp_token_id + 1 :] = -torch.inf
        text_id = MOSS.modality_pad_token_id if mode == AUDIO else int(text.argmax())
        row = (text_id, int(audio.argmax()) if mode == AUDIO else MOSS.audio_pad_token_id)
        if row[TEXT] == MOSS.eos_token_id:
            break
        generated.append(row)
        rows.append(row)
        mode = model.next_mode(mode, row)
    return generated


def test_moss_speech_replies_row_for_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = moss_speech(tmp_path / "model")
    with torch.no_grad():  # so that a reply goes through text, speech, and text again
        model.text_lm_head.weight[MOSS.sosp_token_id] *= 4
        model.audio_lm_head.weight[MOSS.eosp_token_id] *= 4

    class Ours(Runner):
        def logits(self, ids: list[int], given: dict[str, Any]) -> Tensor:
            rows = torch.tensor([row_of(MOSS, joint) for joint in ids])
            return torch.cat(model.logits(hidden_states(model, rows)[-1:]), dim=-1)[0]

    install(monkeypatch, {"tensorrt_llm.runtime": {"ModelRunnerCpp": Ours}})
    export_trtllm(tmp_path / "model", tmp_path / "out", TrtLlmOptions())
    engine = MossSpeechEngine(with_engine(tmp_path / "out"), tmp_path / "model")
    prompt = [(9, 5), (11, 5), (MOSS.sosp_token_id, 5)]
    reply = list(engine.reply(prompt, max_new=20))
    assert reply == greedy(model, prompt, 20) and len(reply) == 20
    modes = [row[TEXT] == MOSS.modality_pad_token_id for row in reply]
    assert sum(before != after for before, after in pairwise(modes)) >= 2


def test_cosyvoice_speaks_from_its_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cosyvoice(tmp_path / "model", 2)
    prompt = model.prompt([5, 7, 9], codes=[3, 80])

    class Ours(Runner):
        vocab_size = model.config.speech_rows

        def logits(self, ids: list[int], given: dict[str, Any]) -> Tensor:
            assert ids[: len(prompt)] == [84, 85, 86, 87, 88, 3, 80]  # five rows of the table, then speech
            table = given["prompt_table"][0].float()
            torch.testing.assert_close(table, model.embed(torch.tensor(prompt[:5])))
            rows = [*prompt, *((model.config.speech_mark, code) for code in ids[len(prompt) :])]
            logits = model.logits(hidden_states(model, torch.tensor(rows))[-1:])[0]
            return logits - model.llm_decoder.bias  # the engine's head has none

    install(monkeypatch, {"tensorrt_llm.runtime": {"ModelRunnerCpp": Ours}})
    export_trtllm(tmp_path / "model" / "llm.pt", tmp_path / "out", TrtLlmOptions())
    engine = CosyVoiceEngine(with_engine(tmp_path / "out"), model.config)
    codes = list(engine.speak(prompt, max_new=8))
    rows, wanted = list(prompt), []
    for _ in range(8):
        code = int(model.logits(hidden_states(model, torch.tensor(rows))[-1:])[0].argmax())
        if code == model.config.end_code:
            break
        wanted.append(code)
        rows.append((model.config.speech_mark, code))
    assert codes == wanted and codes
