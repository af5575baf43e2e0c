"""Whoever decodes the frames, alone, beside their making or for many at once, makes the same sound."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.models.tiny_nano import CODEC_CONFIG, tiny_nano_codec
from tests.speech.test_speaker import EIGHT, TEXT, joined, tiny_speaker
from vivavoce.device import pick
from vivavoce.dialogue.player import SimulatedPlayer
from vivavoce.errors import InputError
from vivavoce.speech.codec_desk import Alone, Together
from vivavoce.speech.mouth import EngineMouth
from vivavoce.speech.sounding import Sounding

FRAMES = [tuple(frame) for frame in torch.randint(32, (40, 6), generator=torch.Generator().manual_seed(0)).tolist()]


@pytest.fixture(scope="module")
def codec():
    return tiny_nano_codec()


@pytest.fixture(scope="module")
def whole(codec):
    return codec.decode(torch.tensor(FRAMES).T[None])[0].numpy()


def sounding(codec, decode=None, beside=None, is_live=True, clock=lambda: 0.0) -> Sounding:
    seconds = 1 / CODEC_CONFIG.frame_rate
    player = SimulatedPlayer()
    return Sounding(decode or Alone(codec), codec.decoder_state(), seconds, player, clock, beside, is_live)


@pytest.mark.parametrize("is_live", [True, False])
def test_decoding_beside_changes_nothing(codec, whole, is_live):
    with ThreadPoolExecutor(1) as beside:
        heard = joined(sounding(codec, beside=beside, is_live=is_live).sounds(iter(FRAMES)))
    np.testing.assert_allclose(heard, whole, atol=1e-5)


def test_a_decoder_that_fails_beside_fails_here(codec):
    with ThreadPoolExecutor(1) as beside, pytest.raises(InputError, match="code 99"):
        list(sounding(codec, beside=beside).sounds(iter([*FRAMES[:1], (99,) * 6, *FRAMES])))


def test_many_threads_are_decoded_together(codec, whole):
    together, heard, passes = Together(codec), {}, []
    batch = codec.decode_step_batch

    def counted(states, codes):
        passes.append(len(states))
        return batch(states, codes)

    codec.decode_step_batch = counted
    everybody_asks = threading.Barrier(6)

    def listen(index):
        everybody_asks.wait()
        heard[index] = joined(sounding(codec, together).sounds(iter(FRAMES)))

    threads = [threading.Thread(target=listen, args=(index,)) for index in range(6)]
    with together._lock:  # until all have asked once
        for thread in threads:
            thread.start()
        while len(together._waiting) < 6:
            threading.Event().wait(0.001)
    for thread in threads:
        thread.join()
    codec.decode_step_batch = batch
    assert passes[0] == 6
    for sound in heard.values():
        np.testing.assert_allclose(sound, whole, atol=1e-5)


def test_a_pass_that_fails_tells_everybody(codec):
    with pytest.raises(InputError, match="code 99"):
        Together(codec)(codec.decoder_state(), [(99,) * 6])


def test_parts_begun_side_by_side_sound_as_one_after_another(tmp_path):
    speaker = tiny_speaker(tmp_path)
    expected = speaker.say(TEXT, "bell", EIGHT).samples
    speaker.mouth = EngineMouth(speaker.model, speaker.prompt, pick("cpu"))
    speaker.mouth.at_once = 3
    np.testing.assert_allclose(speaker.say(TEXT, "bell", EIGHT).samples, expected, atol=1e-5)
    steps = speaker.mouth.engine.steps
    pieces = speaker.stream(TEXT, "bell", EIGHT)
    next(pieces)
    assert len(speaker.mouth.engine.scheduler.sequences) == 1 + 3
    pieces.close()
    assert len(speaker.mouth.engine.scheduler.sequences) == 1
    assert steps < 4 * 10  # four parts of nine frames would take forty by themselves
