"""Replies consist of hops captured at warm-up: other sizes are cut into these, or padded to them."""

import pytest
import torch

from tests.models.tiny_codec import tiny_codec
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.models.moss_speech.codec import GraphedCodec, MossSpeechCodec

LEFT, SIZES, SHORT = 2, (5, 10, 20), (5, 10)
FIRST = 8  # a chunk and its look-ahead


class Noted(GraphedCodec):
    """Knows which hops its flow and its vocoder were asked for."""

    def __init__(self, codec):
        super().__init__(codec)
        self.times, self.shapes = set(), set()
        together, advance = self.flow._step_group, self.vocoder._advance

        def step_together(states, final):
            time = self.flow._decodable_end(states[0], final) - states[0].position
            self.times.add(next((each for each in self.flow.hop_sizes if each >= time), time) if final else time)
            return together(states, final)

        def advance_noted(state, shape):
            self.shapes.add(shape)
            return advance(state, shape)

        self.flow._step_group, self.vocoder._advance = step_together, advance_noted


def exact_codec():
    """Waits for all frames that sound depends on, so that it does not matter where hops end."""
    codec = tiny_codec()
    return MossSpeechCodec(codec.speech_encoder.encoder, codec.flow, codec.vocoder.hift, look_right=None)


@pytest.fixture(scope="module")
def plain():
    return exact_codec()


@pytest.fixture(scope="module")
def voice(plain):
    generator = torch.Generator().manual_seed(0)
    mel, speaker = torch.randn(40, 80, generator=generator), torch.randn(192, generator=generator)
    return plain.flow.voice(VoicePrompt(some_codes(10, 0), mel, speaker))


def warmed(codec, voice, sizes, together=1):
    codec.warm_up(voice, (together,), sizes, LEFT)
    codec.times.clear()
    codec.shapes.clear()
    return codec


def some_codes(count, seed=1):
    return torch.randint(64, (count,), generator=torch.Generator().manual_seed(seed))


def spoken(codec, voice, sizes):
    state, sounds = codec.start(voice, LEFT, seed=3), []
    for number, piece in enumerate(some_codes(sum(sizes)).split(sizes), start=1):
        sound, state = codec.step(state, piece, final=number == len(sizes))
        sounds.append(sound)
    return torch.cat(sounds)


def assert_same_sound(ours, expected):
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("sizes", [SIZES, SHORT])
def test_every_hop_of_every_reply_was_captured_ahead(voice, sizes):
    codec = warmed(Noted(tiny_codec()), voice, sizes)
    for pieces in ([2], [FIRST, 10, 1], [FIRST, 20, 22], [FIRST + 15, 7], [FIRST, 5, 12]):
        spoken(codec, voice, pieces)
    assert codec.times <= set(codec.flow.hop_sizes)
    assert codec.shapes <= codec.vocoder.shapes


def test_a_reply_sounds_as_if_its_last_frame_went_on(plain, voice):
    codec = warmed(Noted(exact_codec()), voice, SHORT)
    for sizes in ([FIRST, 5, 10, 12], [FIRST, 20, 22], [2]):
        mels, state = [], plain.flow.start(voice, LEFT)
        for number, piece in enumerate(some_codes(sum(sizes)).split(sizes), start=1):
            mel, state = plain.flow.step(state, piece, final=number == len(sizes))
            mels.append(mel)
        mel = torch.cat(mels, dim=1)[None]
        gone_on = torch.cat([mel, mel[..., -1:].expand(-1, -1, plain.vocoder.delay_frames)], dim=-1)
        expected, _ = plain.vocoder.step(plain.vocoder.initial_state(3), gone_on)
        assert_same_sound(spoken(codec, voice, sizes), expected[0])


def test_replies_of_one_pass_are_cut_each_for_itself(voice):
    codec = warmed(Noted(tiny_codec()), voice, SHORT, together=2)
    states = [codec.start(voice, LEFT, seed=3) for _ in range(2)]
    given = [[FIRST, 20, 4], [FIRST, 5, 19]]
    codes = [some_codes(sum(sizes)).split(sizes) for sizes in given]
    sounds = [[], []]
    for number in range(3):
        made, states = codec.step_batch(states, [pieces[number] for pieces in codes], [number == 2] * 2)
        for sound, mine in zip(made, sounds, strict=True):
            mine.append(sound)
    for sizes, mine in zip(given, sounds, strict=True):
        assert_same_sound(torch.cat(mine), spoken(codec, voice, sizes))
