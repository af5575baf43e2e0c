"""Batches of the language model: rows of the chat format, loss on replies only, and separate examples."""

import dataclasses

import numpy as np
import pytest
import torch

from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, MossSpeechPrompt, Turn
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.train.lm import train_tokenizer
from vivavoce.train.lm.batches import (
    CONTEXT,
    READ,
    REPLY_SPEECH,
    REPLY_TEXT,
    SYSTEMS,
    TRANSCRIBE,
    USER_SPEECH,
    LMBatches,
    LMBatchOptions,
)
from vivavoce.train.lm.corpus import pseudo_data
from vivavoce.train.lm.dialogue_data import SpokenDialogues
from vivavoce.train.lm.dialogue_plan import TINY as TINY_PLAN
from vivavoce.train.lm.initial_model import make_config
from vivavoce.train.lm.recipe import TINY
from vivavoce.train.lm.train import BatchesByStep, batches_from

PLAIN = LMBatchOptions(late_system=0.0, no_system=0.0, other_system=0.0, interrupted=0.0, position_gap=0.0)


@pytest.fixture(scope="module")
def data() -> SpokenDialogues:
    return pseudo_data(TINY_PLAN, 64)[0]


@pytest.fixture(scope="module")
def setting(data):
    backend = train_tokenizer(data.written, 300)
    tokenizer = TextTokenizer(backend)
    return make_config(TINY, tokenizer, backend.get_vocab_size(), data.code_count), tokenizer


def _batches(setting, data, options=PLAIN, **mix) -> LMBatches:
    return LMBatches(*setting, data, mix or {"speech_speech": 1.0}, options=options)


def _max_dialogue(data):
    return max((line for line in data.dialogues if all(len(data.user_speech.of(e.user)) for e in line)), key=len)


@pytest.mark.parametrize("mode", ["speech_speech", "speech_text", "text_speech", "text_text"])
def test_an_example_is_the_published_prompt_and_the_reply(setting, data, mode, monkeypatch):
    monkeypatch.setattr("vivavoce.train.lm.batches.as_typed", lambda text, random_source: text)
    hears, says = mode.split("_")
    line = _max_dialogue(data)
    rows = _batches(setting, data).conversation(line, mode, np.random.default_rng(0)).rows()
    prompt = MossSpeechPrompt(*setting)

    def side(role, text, modality):
        spoken = data.user_speech if role == "user" else data.replies
        return Turn(role, list(spoken.codes[int(spoken.of(text)[0])]) if modality == "speech" else text)

    turns = [turn for e in line for turn in (side("user", e.user, hears), side("assistant", e.reply, says))]
    candidates = [prompt.rows([Turn("system", system), *turns[:-1]], says) for system in SYSTEMS[says]]
    given = [tuple(row) for row in rows[:, :2].tolist()]
    begun = next(candidate for candidate in candidates if given[: len(candidate)] == candidate)
    whole = begun[: -1 if says == "speech" else None] + prompt.turn(turns[-1])[len(prompt.open_turn("assistant")) :]
    assert given == whole


def test_the_late_system_turn_stands_where_the_published_prompt_puts_it(setting, data):
    batches = _batches(setting, data, dataclasses.replace(PLAIN, late_system=1.0))
    line = _max_dialogue(data)
    rows = batches.conversation(line, "speech_speech", np.random.default_rng(0)).rows()
    prompt = MossSpeechPrompt(*setting)
    codes = [list(data.user_speech.codes[int(data.user_speech.of(e.user)[0])]) for e in line]
    replies = [list(data.replies.codes[int(data.replies.of(e.reply)[0])]) for e in line]
    turns = [
        t for said, reply in zip(codes, replies, strict=True) for t in (Turn("user", said), Turn("assistant", reply))
    ]
    begun = prompt.rows(turns[:-1], "speech")
    assert [tuple(row) for row in rows[: len(begun), :2].tolist()] == begun
    assert set(rows[: len(begun), 2]) <= {CONTEXT, USER_SPEECH, 4}, "only the last reply is learned"
    assert prompt.tokenizer.decode(begun and [row[0] for row in begun]).count(DEFAULT_SYSTEM["speech"]) == 1


def test_only_replies_and_their_end_have_a_loss(setting, data):
    config, tokenizer = setting
    line = _max_dialogue(data)
    written = _batches(setting, data).conversation(line, "speech_text", np.random.default_rng(0)).rows()
    learned = written[written[:, 2] == REPLY_TEXT, 0].tolist()
    assert tokenizer.decode(learned) == "".join(exchange.reply for exchange in line)
    assert learned.count(config.eos_token_id) == len(line)
    spoken = _batches(setting, data).conversation(line, "speech_speech", np.random.default_rng(0)).rows()
    codes = spoken[spoken[:, 2] == REPLY_SPEECH, 1].tolist()
    expected = [[*data.replies.codes[int(data.replies.of(e.reply)[0])], config.eosp_token_id] for e in line]
    assert codes == [code for reply in expected for code in reply]
    assert spoken[spoken[:, 2] == REPLY_TEXT, 0].tolist() == [config.eos_token_id] * len(line)


def test_skills_have_their_own_system_text(setting, data):
    batches = _batches(setting, data)
    random_source = np.random.default_rng(1)
    decode = setting[1].decode
    assert decode(batches.transcription(random_source).rows()[:, 0].tolist()).startswith(
        f"system\n{TRANSCRIBE}\nuser\n"
    )
    reading = batches.reading(random_source).rows()
    assert decode(reading[:, 0].tolist()).startswith(f"system\n{READ}\nuser\n")
    assert (reading[:, 2] == REPLY_SPEECH).any() and not (reading[:, 2] == USER_SPEECH).any()


def test_an_interrupted_reply_is_cut_and_not_learned(setting, data):
    batches = _batches(setting, data, dataclasses.replace(PLAIN, interrupted=1.0))
    line = _max_dialogue(data)
    assert len(line) > 1
    rows = batches.conversation(line, "speech_speech", np.random.default_rng(0)).rows()
    last = data.replies.codes[int(data.replies.of(line[-1].reply)[0])]
    assert (rows[:, 2] == REPLY_SPEECH).sum() == len(last) + 1
    assert (rows[:, 1] == setting[0].eosp_token_id).sum() == 2 * len(line)


def test_a_batch_is_full_and_deterministic_with_separate_examples(setting, data):
    options = LMBatchOptions(position_gap=1.0)
    batches = _batches(setting, data, options, speech_speech=1.0, transcribe=1.0, mixed=1.0, text_text=1.0)
    first, again = (batches.batch(np.random.default_rng(5), 4, 512) for _ in range(2))
    assert (first == again).all()
    assert (first[..., 3] > 0).float().mean() > 0.8
    assert first[..., 2].max() < setting[0].max_position_embeddings
    for line in first:
        for segment in line[:, 3].unique()[1:]:
            of_it = line[line[:, 3] == segment]
            assert of_it[0, 2] == 0 and of_it[0, 4] == CONTEXT
            assert (of_it[1:, 2] > of_it[:-1, 2]).all(), "positions rise, with a gap at most"


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_worker_processes_come_in_order_and_depend_on_the_step_alone(setting, data, workers):
    by_step = BatchesByStep(_batches(setting, data), TINY, seed=3)
    source = batches_from(5, by_step, torch.device("cpu"), workers)
    found = [next(source)["packed"] for _ in range(4)]
    source.close()
    assert all(torch.equal(packed, by_step[5 + number]) for number, packed in enumerate(found))
    assert not torch.equal(found[0], found[1])
