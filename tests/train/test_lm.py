"""Training of the language model: commands, stages, and memorised dialogues reproduced by the engine."""

import dataclasses
import json

import pytest
import torch

from vivavoce.device import pick
from vivavoce.engine.engine import Engine
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.errors import InputError
from vivavoce.evaluation.scoring import edit_distance
from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, MossSpeechPrompt, Turn
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.train.front_desk import Exchange, dialogues
from vivavoce.train.lm import CodeJitter, initial_model, recipe, train_tokenizer
from vivavoce.train.lm import corpus as lm_data
from vivavoce.train.lm import evaluate as lm_evaluation
from vivavoce.train.lm import train as lm
from vivavoce.train.lm.batches import READ, REPLY_SPEECH, REPLY_SPEECH_CONTEXT, TRANSCRIBE, USER_SPEECH
from vivavoce.train.lm.dialogue_data import SpokenDialogues
from vivavoce.train.lm.dialogue_plan import TINY, DialoguePlan, voices_of
from vivavoce.train.lm.evaluate import word_error_rate
from vivavoce.train.lm.loss import corrupted_codes, jittered

FEW = DialoguePlan(spoken=3, written=0, general=0, read=0, versions=1, held_out=2, held_out_general=1)
MEMORISING = dataclasses.replace(recipe.TINY, lines=2, steps=(30, 40, 200))


@pytest.fixture(scope="module")
def memorised(tmp_path_factory):
    """The folder of a model that has memorised three dialogues, and the dialogues."""
    folder = tmp_path_factory.mktemp("lm")
    data, _ = lm_data.pseudo_data(FEW, code_count=64)
    lm.train(MEMORISING, data, folder, None, torch.device("cpu"), report=lambda line: None)
    return folder, data


def _losses(folder, stage, name):
    log = (folder / lm.RUN_FOLDER / stage / "log.jsonl").read_text().splitlines()
    return [json.loads(line)[name] for line in log]


def test_every_stage_lowers_what_it_may_change(memorised):
    folder, _ = memorised
    text, speech, both = (
        _losses(folder, *which) for which in (("text", "text"), ("audio", "speech"), ("both", "loss"))
    )
    assert text[-1] < text[0] and speech[-1] < speech[0] and both[-1] < 0.2 * both[0]


def _reply(folder, turns, reply):
    model = MossSpeech.load(folder)
    prompt = MossSpeechPrompt(model.config, TextTokenizer.load(folder))
    engine = Engine(model, pick("cpu"), dtype=torch.float32)
    return model, engine.complete(engine.open(prompt.rows(turns, reply)), Generation(GREEDY, max_new_rows=120))


@pytest.mark.parametrize("reply_modality", ["speech", "text"])
def test_the_engine_reproduces_memorised_replies(memorised, reply_modality):
    folder, data = memorised
    line = max(data.dialogues, key=len)
    turns = [Turn("system", DEFAULT_SYSTEM[reply_modality])]
    for exchange in line:
        codes = [int(code) for code in data.replies.codes[int(data.replies.of(exchange.reply)[0])]]
        turns.append(Turn("user", [int(c) for c in data.user_speech.codes[int(data.user_speech.of(exchange.user)[0])]]))
        model, rows = _reply(folder, turns, reply_modality)
        assert model.ends(rows[-1])
        if reply_modality == "speech":
            assert model.spoken_codes(rows) == codes
        else:
            assert TextTokenizer.load(folder).decode(model.written_ids(rows)) == exchange.reply
        turns.append(Turn("assistant", codes if reply_modality == "speech" else exchange.reply))


def test_the_model_transcribes_and_reads_aloud(memorised):
    folder, data = memorised
    sentence = data.replies.sentences[0]
    codes = [int(code) for code in data.replies.codes[0]]
    model, rows = _reply(folder, [Turn("system", TRANSCRIBE), Turn("user", codes)], "text")
    assert TextTokenizer.load(folder).decode(model.written_ids(rows)) == sentence
    model, rows = _reply(folder, [Turn("system", READ), Turn("user", sentence)], "speech")
    assert model.spoken_codes(rows) == codes


def test_the_commands_run_from_data_to_metrics(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lm, "TINY", dataclasses.replace(recipe.TINY, steps=(2, 2, 4), log_every=1, lines=2))
    monkeypatch.setattr(lm_evaluation, "MAX_CODES", 24)
    monkeypatch.setattr(lm_evaluation, "MAX_TOKENS", 12)
    lm_data.main(["--pseudo-codes", "--tiny", "--out", str(tmp_path / "data")])
    lm.main(["--tiny", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "lm"), "--device", "cpu"])
    figures = json.loads((tmp_path / "lm" / "metrics.json").read_text())
    assert {"speech_speech", "speech_text_15dB", "transcribe", "read"} <= figures.keys()
    assert figures["speech_speech"]["questions"] == 8
    assert (tmp_path / "lm" / "curves.png").is_file()
    assert "evaluation speech_text" in capsys.readouterr().out
    config = MossSpeechConfig.read(tmp_path / "lm")
    assert config.audio_pad_token_id > config.eosp_token_id, "no code is taken for filler"


def test_a_run_can_start_from_an_earlier_model(memorised, tmp_path):
    folder, data = memorised
    few = dataclasses.replace(MEMORISING, steps=(1, 1, 2), log_every=1)
    lm.train(few, data, tmp_path, None, torch.device("cpu"), report=lambda line: None, earlier=folder)
    assert _losses(tmp_path, "both", "loss")[0] < 0.3 * _losses(folder, "both", "loss")[0]
    assert not (tmp_path / lm.RUN_FOLDER / "text").exists()
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_an_earlier_model_gets_a_new_vocabulary(memorised, tmp_path):
    folder, data = memorised
    few = dataclasses.replace(MEMORISING, steps=(1, 1, 2), log_every=1, text_entries=MEMORISING.text_entries + 40)
    run = {"report": lambda line: None, "earlier": folder, "has_new_vocabulary": True}
    lm.train(few, data, tmp_path, None, torch.device("cpu"), **run)
    assert _losses(tmp_path, "both", "loss")[0] < 0.6 * _losses(folder, "both", "loss")[0]
    assert TextTokenizer.load(tmp_path).encode("a table") and not (tmp_path / lm.RUN_FOLDER / "text").exists()


def test_a_new_text_entry_is_the_mean_of_what_it_was_written_with(memorised, tmp_path):
    folder, data = memorised
    recipe = dataclasses.replace(MEMORISING, text_entries=MEMORISING.text_entries + 40)
    model, tokenizer = initial_model.init_fresh(recipe, data, tmp_path, torch.device("cpu"), 0)
    initial_model.take_over(model, tokenizer, folder)
    earlier, former = MossSpeech.load(folder, device="cpu", dtype=torch.float32), TextTokenizer.load(folder)
    table, old = model.model.embed_tokens.weight, earlier.model.embed_tokens.weight
    several = 0
    for entry in range(model.config.vocab_size):
        text = tokenizer.bytes_of(entry).decode(errors="ignore")
        if ids := former.encode(text):
            torch.testing.assert_close(table[entry], old[ids].mean(0))
            several += len(ids) > 1
    assert several, "some entries are new"
    torch.testing.assert_close(model.audio_lm_head.weight, earlier.audio_lm_head.weight)
    anew, tokenizer = initial_model.init_fresh(recipe, data, tmp_path, torch.device("cpu"), 0)
    own = anew.audio_lm_head.weight.clone()
    initial_model.take_over(anew, tokenizer, folder, has_same_codes=False)
    torch.testing.assert_close(anew.audio_lm_head.weight, own)
    torch.testing.assert_close(anew.model.embed_tokens.weight, table)
    wider = dataclasses.replace(recipe, hidden=2 * recipe.hidden)
    other, tokenizer = initial_model.init_fresh(wider, data, tmp_path, torch.device("cpu"), 0)
    with pytest.raises(InputError, match="other sizes"):
        initial_model.take_over(other, tokenizer, folder)


def test_stages_freeze_what_they_should():
    data, _ = lm_data.pseudo_data(FEW, 64)
    backend = train_tokenizer(data.written, 300)
    config = initial_model.make_config(recipe.TINY, TextTokenizer(backend), backend.get_vocab_size(), 64)
    model = MossSpeech.random(config)
    names = dict(model.named_parameters())
    lm.set_trainable(model, text=False, audio=True)
    assert {name for name in names if names[name].requires_grad} == {name for name in names if "audio" in name}
    lm.set_trainable(model, text=True, audio=False)
    assert {name for name in names if names[name].requires_grad} == {name for name in names if "audio" not in name}
    initial_model.copy_text_layers(model)
    for mine, given in zip(model.model.audio_block.parameters(), model.model.text_block.parameters(), strict=True):
        assert torch.equal(mine, given)


def test_only_codes_are_corrupted_and_user_codes_more_than_replies():
    config = MossSpeechConfig(eosp_token_id=50, audio_pad_token_id=51, modality_pad_token_id=9)
    torch.manual_seed(0)
    kinds = torch.tensor([0, USER_SPEECH, REPLY_SPEECH, REPLY_SPEECH_CONTEXT]).repeat_interleave(500).expand(8, -1)
    rows = torch.stack([torch.full_like(kinds, 9), torch.full_like(kinds, 7)], dim=-1)
    rows[:, -1, 1] = 50
    output = corrupted_codes(config, rows, kinds, user_share=0.4, reply_share=0.1)
    changed = (output[..., 1] != rows[..., 1]).float()
    assert torch.equal(output[..., 0], rows[..., 0])
    assert changed[kinds == 0].sum() == 0 and (output[:, -1, 1] == 50).all()
    assert (
        changed[kinds == USER_SPEECH].mean()
        > 2 * changed[(kinds == REPLY_SPEECH) | (kinds == REPLY_SPEECH_CONTEXT)].mean()
        > 0
    )
    assert output[..., 1].max() == 51


def test_only_user_codes_move_to_neighbours():
    torch.manual_seed(0)
    jitter = CodeJitter((4, 3), "cpu")
    kinds = torch.tensor([USER_SPEECH, REPLY_SPEECH]).repeat_interleave(600).expand(6, -1)
    rows = torch.stack([torch.full_like(kinds, 9), torch.full_like(kinds, 4)], dim=-1)  # 4 = 1 · 3 + 1
    rows[:, 0, 1] = jitter.size  # the end of speech
    output = jittered(jitter, rows, kinds, 0.2)
    assert torch.equal(output[..., 0], rows[..., 0]) and (output[:, 0, 1] == jitter.size).all()
    assert torch.equal(output[kinds == REPLY_SPEECH], rows[kinds == REPLY_SPEECH])
    user_codes = output[:, 1:, 1][kinds[:, 1:] == USER_SPEECH]
    share = [(user_codes == code).float().mean() for code in range(12)]
    assert 0 < 1 - share[4] < 0.5 and share[1] + share[3] + share[5] + share[7] > 0.7 * (1 - share[4])
    assert jittered(jitter, rows, kinds, 0.0) is rows
    everything = jitter(torch.arange(12).expand(50, -1), torch.ones(50, 1))
    assert everything.min() >= 0 and everything.max() < 12


def test_the_tokenizer_is_the_same_for_the_same_sentences_and_loses_nothing():
    sentences = [f"A table for {number} people, please." for number in ("two", "three", "four", "twenty two")]
    first, again = (train_tokenizer(order, 300) for order in (sentences, sentences[::-1]))
    assert first.to_str() == again.to_str()
    tokenizer = TextTokenizer(first)
    assert tokenizer.decode(tokenizer.encode("Zwölf Stühle, bitte! 桌子")) == "Zwölf Stühle, bitte! 桌子"
    assert len(tokenizer.encode("<|im_start|>")) == 1


def test_frequent_sentences_have_more_voices():
    lines = dialogues("train", 60, 0, (1, 1)) + 9 * [[Exchange("greeting", "Hello.", "Welcome.")]]
    sentences = list(dict.fromkeys(line[0].user for line in lines))
    for min_voices in (1, 2):
        voices = voices_of(lines, sentences, min_voices)
        assert min(voices.values()) == min_voices and voices["Hello."] >= min_voices + 2


def test_spoken_dialogues_survive_their_file(tmp_path):
    data, held_out = lm_data.pseudo_data(TINY, 64)
    data.save(tmp_path / "data.npz")
    again = SpokenDialogues.load(tmp_path / "data.npz")
    assert again.dialogues == data.dialogues and again.code_count == 64
    assert again.user_speech.sentences == data.user_speech.sentences
    assert all(
        (again.user_speech.codes[i] == data.user_speech.codes[i]).all() for i in range(len(data.user_speech.codes))
    )
    training_sentences = {exchange.user for line in data.dialogues for exchange in line}
    assert not training_sentences & {
        exchange.user for line in held_out.dialogues for exchange in line if exchange.intent != "decline"
    }


def test_distances():
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance([1, 2, 3], []) == 3
    assert word_error_rate(["one two three four"], ["one too three"]) == pytest.approx(0.5)
    pytest.importorskip("pypinyin")
    assert word_error_rate(["請問您的大名？"], ["请问你的大名"]) == pytest.approx(1 / 6), (
        "您 and 你 differ, scripts do not"
    )


@pytest.mark.gpu
def test_captured_steps_learn_as_eager_ones_do(tmp_path):
    data, _ = lm_data.pseudo_data(FEW, code_count=64)
    ends = []
    for use_graph in (False, True):
        recipe = dataclasses.replace(MEMORISING, use_graph=use_graph)
        folder = tmp_path / str(use_graph)
        lm.train(recipe, data, folder, None, torch.device("cuda"), report=lambda line: None)
        ends.append(_losses(folder, "both", "loss")[-1])
    assert max(ends) < 1.0 and abs(ends[0] - ends[1]) < 0.3
