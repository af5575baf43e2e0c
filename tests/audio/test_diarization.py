"""Who speaks when: clusters of voices, their names, and the borders between them."""

from itertools import pairwise

import numpy as np
import pytest

from tests.dialogue.marked_voices import by_mark, voice
from tests.dialogue.voices import silence
from vivavoce import hub
from vivavoce.audio.diarization import KnownSpeaker, SpeakerLabels, SpeakerTurn, diarize, with_margin
from vivavoce.audio.io import read
from vivavoce.audio.vad import voice_activity
from vivavoce.models.campplus import SpeakerEncoder

RATE = 16_000


def test_voices_get_letters_in_the_order_of_appearance():
    one, two, three, four, five = np.eye(5, dtype=np.float32)
    labels = SpeakerLabels()
    assert labels.name([one, two]) == ["A", "B"]
    assert labels.name([three]) + labels.name([four, one]) == ["C", "D", "A"]
    assert labels.name([five])[0] in "ABCD"  # there are never more than four


def test_two_voices_of_one_recording_never_share_a_name():
    alike = np.float32([0.8, 0.6])
    labels = SpeakerLabels([KnownSpeaker("agent", np.float32([1, 0]))])
    assert labels.name([alike, np.float32([0.99, 0.14])]) == ["A", "agent"]


def test_known_voices_have_their_names():
    one, two, three = np.eye(3, dtype=np.float32)
    labels = SpeakerLabels([KnownSpeaker("agent", two), KnownSpeaker("A", three)])
    assert labels.name([two, one, three]) == ["agent", "B", "A"]


def test_two_voices_are_separated_with_and_without_a_pause_between_them():
    parts = [voice(2.0), silence(0.5), voice(2.5, is_user=False), voice(2.0), silence(1.0), voice(1.6, is_user=False)]
    turns = diarize(np.concatenate(parts).astype(np.float32), by_mark, voice_activity())
    last = {number: turn for number, (turn, after) in enumerate(pairwise(turns)) if turn.speaker != after.speaker}
    assert [turn.speaker for turn in (*last.values(), turns[-1])] == ["A", "B", "A", "B"]
    ends = np.cumsum([len(part) / RATE for part in parts])
    assert [turn.end for turn in last.values()] == pytest.approx(ends[[0, 2, 3]], abs=0.5)


def test_one_voice_is_one_speaker_and_pauses_end_turns():
    sound = np.concatenate([voice(1.5), silence(1.2), voice(3.0)]).astype(np.float32)
    turns = diarize(sound, by_mark, voice_activity())
    assert [turn.speaker for turn in turns] == ["A", "A"]


def test_silence_has_no_speakers():
    assert diarize(silence(2.0), by_mark, voice_activity()) == []


def test_labels_know_the_speakers_of_an_earlier_recording():
    labels, detector = SpeakerLabels(), voice_activity()
    first = diarize(voice(2.0), by_mark, detector, labels)
    second = diarize(voice(2.0, is_user=False), by_mark, detector, labels)
    third = diarize(voice(1.2), by_mark, detector, labels)
    assert [turns[0].speaker for turns in (first, second, third)] == ["A", "B", "A"]


def test_a_turn_is_cut_out_with_a_margin():
    sound = np.arange(10 * RATE, dtype=np.float32)
    cut, start = with_margin(sound, SpeakerTurn("A", 2.0, 3.0))
    assert start == pytest.approx(1.88) and len(cut) == round(1.24 * RATE) and cut[0] == round(1.88 * RATE)
    assert with_margin(sound, SpeakerTurn("A", 0.05, 9.99))[1] == 0.0


@pytest.mark.published
def test_the_published_embeddings_tell_recorded_voices_apart(published_model, request):
    """A studio speaker of English, a Mandarin one, and synthesised questions."""
    data = request.config.rootpath / "tests" / "data"
    english = [
        read(data / "english" / f"{name}.g722", rate=RATE).samples[0] for name in ("vm-tomakecall", "conf-getpin")
    ]
    mandarin = [read(data / "mandarin" / f"BAC009S0764W012{n}.flac", rate=RATE).samples[0] for n in (1, 2)]
    question = read(hub.BUNDLED / "questions" / "16-wifi.opus", rate=RATE).samples[0]
    pause = np.zeros(RATE // 2, np.float32)
    parts = [english[0], pause, mandarin[0], pause, english[1], pause, question, pause, mandarin[1]]
    encoder = SpeakerEncoder.load(published_model("campplus"))
    turns = diarize(np.concatenate(parts), encoder.embed, voice_activity())
    ends = np.cumsum([len(part) / RATE for part in parts])
    spoken = {}
    for turn in turns:
        part = int(np.searchsorted(ends, (turn.start + turn.end) / 2))
        spoken.setdefault(part, {}).setdefault(turn.speaker, 0.0)
        spoken[part][turn.speaker] += turn.end - turn.start
    speakers = [max(spoken[part], key=spoken[part].get) for part in (0, 2, 4, 6, 8)]
    assert speakers == ["A", "B", "A", "C", "B"]
    wrong = sum(seconds for part, by in spoken.items() for name, seconds in by.items() if name != max(by, key=by.get))
    assert wrong / sum(turn.end - turn.start for turn in turns) < 0.05
