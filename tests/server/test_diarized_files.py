"""`diarized_json` by a recogniser and the published speaker embeddings."""

import numpy as np
import pytest

from vivavoce import hub
from vivavoce.audio.io import read
from vivavoce.cascade.local_recogniser import LocalRecogniser
from vivavoce.errors import InputError
from vivavoce.server.host import SpeakerReference, TranscriptionRequest
from vivavoce.server.hosting.endpoints import ASREndpoint

RATE = 16_000
PAUSE = np.zeros(RATE // 2, np.float32)


@pytest.fixture(scope="module")
def recogniser():
    return LocalRecogniser.load("mini-asr", "auto", "cpu", gate=True)


def sounds(root):
    english = [
        read(root / "tests" / "data" / "english" / f"{n}.g722", rate=RATE) for n in ("vm-tomakecall", "conf-getpin")
    ]
    question = read(hub.BUNDLED / "questions" / "16-wifi.opus", rate=RATE)
    return [sound.samples[0] for sound in (english[0], question, english[1])]


async def segments(endpoint, samples, request):
    async with endpoint:
        await endpoint.load()
        return [segment async for segment in endpoint.transcribe(samples, request)]


@pytest.mark.published
async def test_turns_are_transcribed_one_by_one_with_their_speakers(recogniser, published_model, request):
    prompt, question, other = sounds(request.config.rootpath)
    recording = np.concatenate([prompt, PAUSE, question, PAUSE, other])
    endpoint = ASREndpoint("mini-asr", recogniser, speaker_model=str(published_model("campplus")))
    found = await segments(endpoint, recording, TranscriptionRequest(by_speaker=True))
    borders = np.cumsum([len(prompt) + len(PAUSE), len(question) + len(PAUSE)]) / RATE
    for segment in found:
        part = int(np.searchsorted(borders, (segment.start + segment.end) / 2))
        assert segment.speaker == ("A", "B", "A")[part] and segment.text.strip()
    assert {segment.speaker for segment in found} == {"A", "B"}
    assert [segment.start for segment in found] == sorted(segment.start for segment in found)


@pytest.mark.published
async def test_known_speakers_have_their_names(recogniser, published_model, request):
    prompt, question, other = sounds(request.config.rootpath)
    endpoint = ASREndpoint("mini-asr", recogniser, speaker_model=str(published_model("campplus")))
    known = (SpeakerReference("operator", prompt[: 10 * RATE]),)
    found = await segments(
        endpoint, np.concatenate([question, PAUSE, other]), TranscriptionRequest(by_speaker=True, known_speakers=known)
    )
    assert [found[0].speaker, found[-1].speaker] == ["A", "operator"]


async def test_without_embeddings_all_is_of_one_speaker_and_none_is_known(recogniser, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    question = read(hub.BUNDLED / "questions" / "16-wifi.opus", rate=RATE).samples[0]
    found = await segments(ASREndpoint("mini-asr", recogniser), question, TranscriptionRequest(by_speaker=True))
    assert found and all(segment.speaker is None for segment in found)
    known = TranscriptionRequest(by_speaker=True, known_speakers=(SpeakerReference("operator", question),))
    with pytest.raises(InputError, match="viva models fetch campplus"):
        await segments(ASREndpoint("mini-asr", recogniser), question, known)
