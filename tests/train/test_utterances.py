"""Plans of utterances in Kokoro's voices, and the shards they are spoken into."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from vivavoce.errors import InputError
from vivavoce.train.corpus import Corpus, main
from vivavoce.train.front_desk import language, user_sentences
from vivavoce.train.shards import join, speak_plan
from vivavoce.train.utterances import (
    CODECS,
    HELD_OUT_VOICES,
    REPLY_VOICES,
    TRAINING_VOICES,
    Condition,
    Utterance,
    UtteranceCounts,
    plan,
    read_plan,
    write_plan,
)

SMALL = UtteranceCounts(mixed=400, held_out=40, teacher=100)


def voices_of(utterance: Utterance) -> set[str]:
    return {part.partition(":")[0] for part in utterance.voice.split("+")}


@pytest.fixture(scope="module")
def planned() -> list[Utterance]:
    return plan(("en", "zh"), SMALL, seed=1)


def test_whole_voices_are_held_out_with_all_their_mixtures(planned):
    assert (len(HELD_OUT_VOICES["en"]), len(HELD_OUT_VOICES["zh"])) == (4, 2)
    held_out = {name for names in HELD_OUT_VOICES.values() for name in names}
    for utterance in planned:
        if utterance.part == "held_out":
            assert voices_of(utterance) <= set(HELD_OUT_VOICES[utterance.language])
        else:
            assert not voices_of(utterance) & held_out
            assert voices_of(utterance) <= set(TRAINING_VOICES[utterance.language])
    assert not held_out & {name for names in TRAINING_VOICES.values() for name in names}


def test_a_plan_has_every_part_voice_and_condition(planned):
    assert Counter((each.language, each.part) for each in planned) == {
        (code, part): count for code in ("en", "zh") for part, count in vars(SMALL).items()
    }
    mixed = [each for each in planned if each.part == "mixed"]
    assert {len(voices_of(each)) for each in mixed} == {1, 2, 3}
    for code in ("en", "zh"):
        assert set().union(*(voices_of(each) for each in mixed if each.language == code)) == set(TRAINING_VOICES[code])
    conditions = [each.condition for each in mixed]
    assert {each.codec for each in conditions} == {"", *CODECS}
    assert {each.telephone for each in conditions} == {False, True}
    assert len({each.noise for each in conditions}) == 7 and 0.4 < np.mean([each.room > 0 for each in conditions]) < 0.6
    assert all(each.condition == Condition() and each.speed == 1 for each in planned if each.part != "mixed")
    assert {each.voice for each in planned if each.part == "teacher"} == set(REPLY_VOICES.values())


def test_held_out_phrasings_are_in_the_held_out_part_alone(planned):
    for code in ("en", "zh"):
        held_out = {each.text for each in planned if each.part == "held_out" and each.language == code}
        assert held_out == set(user_sentences("held_out", SMALL.held_out, 1, language(code, 2)))
        assert not held_out & {each.text for each in planned if each.part == "mixed"}


def test_a_plan_is_deterministic_and_survives_its_file(planned, tmp_path):
    assert planned == plan(("en", "zh"), SMALL, seed=1) != plan(("en", "zh"), SMALL, seed=2)
    write_plan(tmp_path / "plan.jsonl", planned)
    assert read_plan(tmp_path / "plan.jsonl") == planned
    with pytest.raises(InputError, match="another plan"):
        write_plan(tmp_path / "plan.jsonl", planned[1:])


def test_a_broken_plan_is_named(tmp_path):
    with pytest.raises(InputError, match="no plan at"):
        read_plan(tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"text": "Hello."}\n')
    with pytest.raises(InputError, match="no plan of utterances"):
        read_plan(tmp_path / "bad.jsonl")


TINY = [
    Utterance("mixed", "en", "Where is the pool?", "am_adam:0.6+bf_lily:0.4", 1.2, Condition(0.3, "babble", 15.0)),
    Utterance("mixed", "zh", "我要訂位，兩位。", "zf_xiaobei+zm_yunxi", 1.1, Condition(telephone=True, codec="g711")),
    Utterance("held_out", "en", "Hello there.", "bm_george"),
    Utterance("mixed", "zh", "請再說一次。", "zm_yunyang", 0.9, Condition(0.2, codec="opus")),
    Utterance("teacher", "zh", "不客氣。", "zf_xiaoxiao"),
]


@pytest.mark.full
@pytest.mark.published
def test_a_killed_run_goes_on_with_the_shard_that_is_missing(published_model, tmp_path):
    model = str(published_model("kokoro-82m"))
    write_plan(tmp_path / "tiny.jsonl", TINY)
    options = ["--kokoro", model, "--device", "cpu", "--shard", "2", "--plan", str(tmp_path / "tiny.jsonl")]
    out = tmp_path / "spoken"
    command = [sys.executable, "-m", "vivavoce.cli", "train", "corpora", "--out", str(out), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert json.loads(process.stdout.readline())["shard"] == 0
        process.kill()
    assert (out / "shard-00000.json").is_file() and not (out / "mixed.json").exists()
    first = (out / "shard-00000.npz").stat().st_mtime_ns

    main(["--out", str(out), *options])
    assert (out / "shard-00000.npz").stat().st_mtime_ns == first
    corpora = {part: Corpus.load(out / part) for part in ("mixed", "held_out", "teacher")}
    assert [corpora[part].texts for part in corpora] == [
        [each.text for each in TINY if each.part == part] for part in corpora
    ]
    assert corpora["held_out"].voices == ["kokoro-bm_george"]
    for corpus in corpora.values():
        for index in range(len(corpus)):
            samples, text, _ = corpus[index]
            assert 0.4 < len(samples) / 16_000 < 4 and np.sqrt(np.mean(samples**2)) > 0.01, text

    assert speak_plan(TINY, out, None, size=2) == 0  # nothing is left to speak
    with pytest.raises(InputError, match="another plan"):
        speak_plan([replace(TINY[0], speed=1.0), *TINY[1:]], out, None, size=2)
    assert join(out, TINY, size=2).keys() == corpora.keys()


@pytest.mark.full
@pytest.mark.published
def test_every_planned_voice_is_one_of_the_model(published_model):
    names = {file.stem for file in (published_model("kokoro-82m") / "voices").glob("*.bin")}
    every = {name for voices in (HELD_OUT_VOICES, TRAINING_VOICES) for known in voices.values() for name in known}
    assert every == {name for name in names if name[0] in "abz"}
