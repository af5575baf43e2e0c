"""`viva bench turn-end`: silence until a turn is ended, measured by the sound's own time."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from vivavoce import hub
from vivavoce.audio.io import float_to_pcm16, read
from vivavoce.bench import turn_end
from vivavoce.dialogue.settings import TurnSettings
from vivavoce.models.turn_end import TurnEndConfig, TurnEndNetwork, save_network
from vivavoce.train.spoken_shards import write_shard
from vivavoce.train.turn_end.corpus import TurnUtterance, read_shards

SEMANTIC = TurnSettings(detector="semantic")


def utterance(part, is_finished):
    sound = float_to_pcm16(read(hub.BUNDLED / "questions" / "15-breakfast.opus", rate=turn_end.RATE).samples[0])
    return TurnUtterance(part, "en", "a question", "a voice", is_finished, samples=sound)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("turns")
    write_shard(made / "held_out-0000", [utterance("held_out", True), utterance("held_out", False)])
    write_shard(made / "train-0000", [utterance("train", True)])
    return made


def test_only_held_out_turns_are_measured(folder):
    places = turn_end.silent_places(read_shards(folder, "held_out"))
    assert {place.kind for place in places} == {"end", "cut", "beginning"}
    assert {place.place.utterance.part for place in places} == {"held_out"}


def test_silence_alone_ends_every_turn_and_a_model_decides_sooner_or_later(folder):
    place = turn_end.silent_places(read_shards(folder, "held_out"))[0]
    by_silence = turn_end.silence_until_end(place, turn_end.Detection("silence", TurnSettings()))
    sure, doubtful, unfinished = (
        turn_end.silence_until_end(place, turn_end.Detection("model", SEMANTIC, lambda samples, p=p: p))
        for p in (0.9, 0.3, 0.01)
    )
    assert 400 < by_silence < 700
    assert sure < 350 < by_silence
    assert 1450 < doubtful < 1750
    assert 3800 < unfinished < 4500


def test_the_model_hears_the_turn_up_to_the_pause(folder):
    place, heard = turn_end.silent_places(read_shards(folder, "held_out"))[0], []

    def model(samples):
        heard.append(len(samples) / turn_end.RATE)
        return 0.9

    turn_end.silence_until_end(place, turn_end.Detection("model", SEMANTIC, model))
    assert len(heard) >= 1 and heard[-1] == pytest.approx(place.end_ms / 1e3 - turn_end.LEAD + 0.3, abs=0.35)


def test_old_synthesizers_are_counted_by_themselves(folder):
    places = turn_end.silent_places([replace(utterance("held_out", True), voice="flite-awb-1.0")])
    spoken = turn_end.silent_places(read_shards(folder, "held_out"))
    scored = turn_end.score(turn_end.Detection("silence", TurnSettings()), [*places, *spoken])
    assert [row["speakers"] for row in scored["speakers"]] == ["en", "programs"]


def test_a_table_and_a_file_are_written(folder, tmp_path):
    torch.manual_seed(0)
    save_network(TurnEndNetwork(TurnEndConfig(d_model=32, layers=1, heads=2, ffn=64, seconds=2)), tmp_path / "model")
    result = turn_end.run(folder, tmp_path / "model", out=tmp_path)
    assert json.loads((tmp_path / "turn_end.json").read_text()) == result
    rows = {each["name"]: each["speakers"][0] for each in result["detections"]}
    assert rows["server_vad, 500 ms"]["cuts_taken"] == {"0.4": 0.0, "0.7": 1.0, "1.0": 1.0, "1.2": 1.0}
    assert {"semantic_vad, high", "semantic_vad, auto", "semantic_vad, low"} <= rows.keys()
    assert turn_end.share_under([100.0, 300.0, np.inf], 300.0) == pytest.approx(2 / 3)
