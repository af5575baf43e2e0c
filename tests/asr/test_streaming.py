"""Live transcription: the commit policies, and the updates of whole streams."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.asr.idle_engine import assert_idle
from tests.asr.test_transcribe import RATE, folder, noise, transcriber  # noqa: F401 - fixtures
from vivavoce.asr.batch import TranscribingEngine
from vivavoce.asr.service import RecognitionService
from vivavoce.asr.streaming import (
    AlignAtt,
    HypothesisWord,
    LiveHypothesis,
    LiveState,
    LiveTranscriber,
    LocalAgreement,
    hypothesis_steps,
)
from vivavoce.device import pick
from vivavoce.errors import InputError
from vivavoce.models.whisper.steps import EncodeWindow, TranscriptionOptions
from vivavoce.models.whisper.transcriber import WhisperTranscriber

OPTIONS = TranscriptionOptions(padding="trim", language="en")


def words(*texts: str, attended: tuple[float, ...] = ()) -> tuple[HypothesisWord, ...]:
    looked = attended or tuple(float(n) for n in range(len(texts)))
    pairs = enumerate(zip(texts, looked, strict=True))
    return tuple(HypothesisWord(text, (n,), n, n + 0.9, attended) for n, (text, attended) in pairs)


def test_local_agreement_commits_the_common_prefix_of_two_hypotheses():
    policy = LocalAgreement()
    one, two = (
        LiveHypothesis((), words(" a", " table", " fur")),
        LiveHypothesis((), words(" A", " table,", " for", " two")),
    )
    assert policy.count_committed(two, one, 9.0) == 2
    assert policy.count_committed(one, LiveHypothesis(), 9.0) == 0
    assert policy.count_committed(one, one, 9.0) == 3


def test_alignatt_commits_words_that_do_not_attend_to_the_end():
    policy = AlignAtt(margin=0.5, max_jump_back=4.0)
    assert (
        policy.count_committed(
            LiveHypothesis((), words(" a", " b", " c", attended=(0.2, 1.4, 1.6))), LiveHypothesis(), 2.0
        )
        == 2
    )
    lost = LiveHypothesis(words(" z", attended=(6.0,)), words(" a", " b", attended=(6.5, 1.0)))
    assert policy.count_committed(lost, LiveHypothesis(), 9.0) == 1
    assert policy.count_committed(LiveHypothesis(), LiveHypothesis(), 2.0) == 0


@pytest.fixture(scope="module")
def live_engine(transcriber):  # noqa: F811
    return TranscribingEngine(transcriber, pick("cpu"), windows=4)


def greedy(transcriber, samples, committed=()):  # noqa: F811
    """The guess for a sound, by the transcriber alone."""
    going, answer = hypothesis_steps(transcriber, torch.from_numpy(samples), OPTIONS, (), committed), None
    while True:
        try:
            item = going.send(answer)
        except StopIteration as end:
            return end.value
        answer = transcriber.encode(item.mel) if isinstance(item, EncodeWindow) else transcriber.answer(item)


def test_a_hypothesis_continues_the_committed_words(transcriber):  # noqa: F811
    whole = greedy(transcriber, noise(1.5))
    tokens = [token for word in whole.pending for token in word.tokens]
    assert len(tokens) > 4 and not whole.committed
    first = tokens[:4]
    again = greedy(transcriber, noise(1.5), first)
    assert [token for word in again.committed for token in word.tokens] == first
    assert [token for word in again.pending for token in word.tokens][: len(tokens) - len(first)] == tokens[
        len(first) :
    ]
    for word in (*again.committed, *again.pending):
        assert 0 <= word.start <= word.end <= 1.5 and 0 <= word.attended <= 1.5
    starts = [word.start for word in (*again.committed, *again.pending)]
    assert starts == sorted(starts)


@pytest.mark.parametrize("policy", ["local-agreement", "alignatt"])
def test_a_stream_commits_every_word_once_and_its_state_is_immutable(live_engine, policy):
    live = LiveTranscriber(live_engine, policy, OPTIONS, every=0.25)
    samples = noise(5.3)
    updates, state = live.step(live.initial_state(), samples)
    final, after = live.finish(state)
    assert len(updates) == 21 and not updates[-1].is_final and final.is_final
    words = [word for update in (*updates, final) for word in update.words]
    assert tuple(words) == after.words and "".join(word.text for word in words).strip() == after.text
    assert all(word.start >= 0 and word.end <= word.committed_at + 1e-6 and word.latency >= -1e-6 for word in words)
    assert len(state.sound) / RATE < 2.0 and state.received == pytest.approx(5.3, abs=0.01)  # a window is 2 s
    assert after.sound.numel() == 0 and after.received == pytest.approx(5.3, abs=0.01)
    assert live.finish(state)[0] == final
    pieces, again = [], live.initial_state()
    for piece in np.array_split(samples, 41):
        made, again = live.step(again, piece)
        pieces += made
    assert pieces == updates and live.finish(again)[0] == final
    assert_idle(live_engine)


def test_each_hypothesis_is_the_draft_of_the_next(live_engine):
    live = LiveTranscriber(live_engine, LocalAgreement(), OPTIONS, every=0.5)
    live_engine.report()
    (update,), state = live.step(live.initial_state(), noise(0.5))
    plain = live_engine.report()
    assert not update.words and update.pending
    _, state = live.commit(state, live._hypothesis(state))
    assert live_engine.report().passes * 2 < plain.passes
    assert state.words  # the same sound heard twice is agreed on


def test_silence_commits_no_words(transcriber):  # noqa: F811
    settings = replace(transcriber.settings, no_speech=-1.0, likely_text_is_speech=False)
    deaf = WhisperTranscriber(transcriber.model, transcriber.tokenizer, transcriber.tokens, settings)
    live = LiveTranscriber(TranscribingEngine(deaf, pick("cpu"), windows=1), "alignatt", OPTIONS)
    updates, state = live.step(live.initial_state(), noise(3.0))
    assert not any(update.words or update.pending for update in updates) and live.finish(state)[0].text == ""
    assert live.finish(LiveState())[0].text == ""


def test_an_unknown_policy_is_refused(live_engine):
    with pytest.raises(InputError, match="local-agreement, alignatt"):
        LiveTranscriber(live_engine, "guess")


async def test_recordings_and_streams_run_concurrently(transcriber):  # noqa: F811
    alone = [[s.tokens for s in transcriber.segments(torch.from_numpy(noise(t, n)))] for n, t in enumerate((1.3, 4.2))]
    sync = LiveTranscriber(TranscribingEngine(transcriber, pick("cpu"), windows=1), "alignatt", OPTIONS, every=0.5)
    _, state = sync.step(sync.initial_state(), noise(2.6, 7))
    expected = "".join(word.text for word in sync.finish(state)[1].words).strip()
    async with RecognitionService(TranscribingEngine(transcriber, pick("cpu"), windows=3)) as recogniser:
        session = recogniser.live("alignatt", OPTIONS, every=0.5)

        async def stream():
            for piece in np.array_split(noise(2.6, 7), 13):
                await session.feed(piece)
            return await session.finish()

        final, *heard = await asyncio.gather(
            stream(), *(recogniser.transcribe(noise(t, n)) for n, t in enumerate((1.3, 4.2)))
        )
        assert [[s.tokens for s in mine] for mine in heard] == alone
        assert final.is_final and session.text == expected
        assert (await recogniser.report()).tokens > 0
        chances = await recogniser.language(noise(1.0))
        assert chances == {"en": 1.0}


async def test_a_cancelled_or_refused_request_does_not_affect_others(transcriber):  # noqa: F811
    engine = TranscribingEngine(transcriber, pick("cpu"), windows=2)
    async with RecognitionService(engine) as recogniser:

        async def leave_early():
            kept = []
            async for segment in recogniser.segments(noise(8.0)):
                kept.append(segment)
                if len(kept) == 2:
                    break
            return kept

        whole = list(transcriber.segments(torch.from_numpy(noise(8.0))))
        kept, bad, heard = await asyncio.gather(
            leave_early(),
            recogniser.transcribe(noise(1.0), TranscriptionOptions(language="zh")),
            recogniser.transcribe(noise(1.3)),
            return_exceptions=True,
        )
        assert [s.tokens for s in kept] == [s.tokens for s in whole[:2]]
        assert isinstance(bad, InputError) and "zh" in str(bad) and heard
        task = asyncio.create_task(recogniser.transcribe(noise(20.0)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert engine.writer.store.free == 2 and not engine.engine.scheduler.sequences
