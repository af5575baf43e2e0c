"""What Kokoro speaks for mini-speech, and how its utterances join those of the synthesizers."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.minis.untrained import SPEECH_ENCODER
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.nn.modules import fill_randomly
from vivavoce.train.corpus import Corpus
from vivavoce.train.dialogue_utterances import PARTS_BY_BEGINNING, PlannedCounts, planned_utterances
from vivavoce.train.front_desk import language_of
from vivavoce.train.lm.corpus import CLEAN, encoded_data, speech_plan
from vivavoce.train.lm.dialogue_plan import DialoguePlan, held_out_dialogues, train_dialogues
from vivavoce.train.lm.dialogue_speech import (
    CALLERS,
    QUESTIONS,
    REPLIES,
    UNUSED,
    DialogueSpeech,
    kinds_of,
    kokoro_speech,
)
from vivavoce.train.reply_voice import reply_voice_of, reply_voices_of, short_name
from vivavoce.train.utterances import PARTS
from vivavoce.train.voices import HELD_OUT, TEACHER

PLAN = DialoguePlan(
    spoken=6, written=2, general=2, read=2, versions=2, held_out=4, held_out_general=1, tools=4, held_out_tools=2,
    edition=2,
)  # fmt: skip
COUNTS = PlannedCounts(callers=8, mixed=10, held_out=3, general=3, strings=2, voice=15)


@pytest.fixture(scope="module")
def utterances():
    return planned_utterances(PLAN, COUNTS)


def test_every_part_has_its_voices(utterances):
    voices = {part: {each.voice for each in utterances if each.part == part} for part in PARTS}
    held_out = set(HELD_OUT_VOICES["en"])
    assert voices["teacher"] == voices["voice"] == {"af_heart"}
    assert voices["questions"] <= held_out and voices["held_out"] <= held_out
    assert not any(name in voice for voice in voices["callers"] | voices["mixed"] for name in held_out)


def test_all_questions_and_replies_are_spoken_and_the_encoder_has_other_sentences(utterances):
    texts = {part: [each.text for each in utterances if each.part == part] for part in PARTS}
    (lines, sentences), tests = train_dialogues(PLAN), held_out_dialogues(PLAN)
    assert set(texts["questions"]) == {exchange.user for line in tests for exchange in line}
    assert {exchange.reply for line in (*lines, *tests) for exchange in line} <= set(texts["teacher"])
    assert set(texts["callers"]) <= set(sentences) and len(texts["callers"]) == COUNTS.callers
    assert not set(texts["mixed"]) & {*sentences, *texts["questions"]}
    assert len(set(texts["teacher"])) == len(texts["teacher"])


def test_the_reply_voice_says_sentences_of_all_kinds_at_several_speeds(utterances):
    texts = {part: [each.text for each in utterances if each.part == part] for part in PARTS}
    spoken = texts["voice"]
    assert len(set(spoken)) == len(spoken) == COUNTS.voice
    _, sentences = train_dialogues(PLAN)
    others = set(spoken) - {*texts["teacher"], *sentences}
    assert len(set(spoken) & set(sentences)) >= 5 and len(set(spoken) & set(texts["teacher"])) >= 5 and len(others) >= 2
    assert not set(spoken) & set(texts["questions"]) - set(sentences), "held-out questions are not learned"
    speeds = [each.speed for each in utterances if each.part == "voice"]
    assert 0.85 <= min(speeds) < 0.95 and 1.1 < max(speeds) <= 1.2
    without = planned_utterances(PLAN, replace(COUNTS, voice=1))
    assert [each for each in without if each.part != "voice"] == [each for each in utterances if each.part != "voice"]


@pytest.mark.parametrize("beginning", ["flow", "lm"])
def test_a_plan_leaves_out_what_only_parts_that_are_trained_learn_from(utterances, beginning):
    needed = PARTS_BY_BEGINNING[beginning]
    assert "mixed" not in needed and ({"teacher", "voice"} <= set(needed)) == (beginning == "flow")
    assert planned_utterances(PLAN, COUNTS, beginning) == [each for each in utterances if each.part in needed]


def test_a_plan_of_two_languages_has_both_and_each_voice_its_own():
    pytest.importorskip("jieba")
    plan = replace(PLAN, spoken=30, held_out=12, languages=("en", "zh"))
    lines, sentences = train_dialogues(plan)
    utterances = planned_utterances(plan, COUNTS)
    for each in utterances:
        assert language_of(each.text).code == each.language
        assert each.voice[0] == "z" if each.language == "zh" else each.voice[0] in "ab"
    assert {(each.language, each.part) for each in utterances} == {
        (code, part) for code in ("en", "zh") for part in PARTS
    }
    mandarin = {text for text in sentences if language_of(text).code == "zh"}
    assert mandarin == {each.text for each in utterances if each.part == "callers" and each.language == "zh"}
    changing = [line for line in lines if len({language_of(exchange.user).code for exchange in line}) == 2]
    assert changing, "callers change the language within a call"
    assert all(language_of(e.user).code == language_of(e.reply).code for line in lines for e in line)
    assert any(exchange.output for line in lines for exchange in line if language_of(exchange.user).code == "zh")
    assert all(language_of(text).code == "en" for text, _ in speech_plan(plan)), "the synthesizers speak English only"


def _noise(entries):
    source = np.random.default_rng(0)
    return Corpus.of(
        [(source.normal(0, 3000, 900 + 300 * len(text)).astype(np.int16), text, voice) for text, voice in entries]
    )


def test_corpora_are_joined_in_order():
    first, second = _noise([("One.", "a"), ("Two.", "b")]), _noise([("Three words here.", "c")])
    both = Corpus.joined([first, second])
    assert both.texts == ["One.", "Two.", "Three words here."] and both.voices == ["a", "b", "c"]
    for index, (corpus, other) in enumerate([(first, 0), (first, 1), (second, 0)]):
        np.testing.assert_array_equal(both[index][0], corpus[other][0])


def test_a_question_is_asked_by_one_of_those_that_can():
    texts = [f"Question {number}?" for number in range(40)]
    kokoro = DialogueSpeech(_noise([(text, "kokoro-af_nova") for text in texts]), np.full(40, QUESTIONS))
    classic = _noise([(text, HELD_OUT[0].name) for text in texts])
    joined = DialogueSpeech.joined([kokoro, DialogueSpeech(classic, kinds_of(classic.voices))])
    kinds = joined.kinds.reshape(2, 40)
    assert ((kinds == QUESTIONS).sum(0) == 1).all() and ((kinds == UNUSED).sum(0) == 1).all()
    assert 8 < (kinds[0] == QUESTIONS).sum() < 32
    assert kinds_of([TEACHER.name, HELD_OUT[0].name, "x"]).tolist() == [REPLIES, QUESTIONS, CALLERS]


def test_dialogues_are_encoded_with_kokoros_replies(tmp_path, utterances):
    for part in ("callers", "questions", "teacher"):
        _noise([(each.text, f"kokoro-{each.voice}") for each in utterances if each.part == part]).save(tmp_path / part)
    encoder = SpeechEncoder(dataclasses.replace(SPEECH_ENCODER, quantize_vocab_size=50)).requires_grad_(False).eval()
    fill_randomly(encoder)
    speech = kokoro_speech(tmp_path)
    train, tests = encoded_data(PLAN, speech.corpus, encoder, "cpu", speech.kinds)
    assert len(train.user_speech.codes) == PLAN.versions * COUNTS.callers
    assert all(len(tests.user_speech.of(exchange.user, CLEAN)) for line in tests.dialogues for exchange in line)
    assert len(tests.dialogues) == PLAN.held_out + PLAN.held_out_general + PLAN.held_out_tools
    calls = [exchange.call for line in tests.dialogues for exchange in line if exchange.call]
    assert len(calls) >= PLAN.held_out_tools
    without = kokoro_speech(tmp_path, has_replies=False)
    assert REPLIES not in without.kinds and len(without.kinds) == len(speech.kinds) - (speech.kinds == REPLIES).sum()


@pytest.mark.parametrize(
    ("voices", "voice", "name"),
    [
        (["x"], TEACHER.name, "rms"),
        ([TEACHER.name, "kokoro-af_heart", "kokoro-af_heart"], "kokoro-af_heart", "af_heart"),
        ([TEACHER.name, TEACHER.name, "kokoro-af_heart"], TEACHER.name, "rms"),
    ],
)
def test_the_reply_voice_has_the_largest_number_of_utterances(voices, voice, name):
    assert reply_voice_of(voices) == voice and short_name(voice) == name


def test_kokoros_reply_voices_go_together():
    both = ["kokoro-af_heart", "kokoro-zf_xiaoxiao"]
    assert reply_voices_of([*both, both[0], TEACHER.name]) == tuple(both)
    assert reply_voices_of([TEACHER.name, TEACHER.name, *both]) == (TEACHER.name,)
