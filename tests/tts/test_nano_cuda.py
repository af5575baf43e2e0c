"""On a GPU, CUDA graphs, eager steps and batches generate the same audio as the CPU."""

import threading

import numpy as np
import pytest
import torch

from vivavoce.bench.tts_contenders import TEXT, VOICE, TTSBenchSetup
from vivavoce.device import pick
from vivavoce.tts import NanoTTS, SpeakingStyle

pytestmark = pytest.mark.gpu
GREEDY = SpeakingStyle(greedy=True)


def speaker(device: str) -> NanoTTS:
    """The same random weights on any device."""
    torch.backends.cuda.matmul.allow_tf32 = False
    cpu = TTSBenchSetup(pick("cpu"), "tiny", 30).speaker(torch.float32)
    if device == "cpu":
        return cpu
    place = pick(device)
    model, codec = cpu.model.to(place.torch_device), cpu.codec.to(place.torch_device)
    made = NanoTTS(model, codec, cpu.prompt.tokenizer, place, cpu.settings)
    made.capture()
    return made


def is_same(found: np.ndarray, expected: np.ndarray) -> bool:
    """Within a thousandth of the loudest sample."""
    return found.shape == expected.shape and np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()


@pytest.fixture(scope="module")
def on_gpu():
    return speaker("cuda")


@pytest.mark.parametrize("style", [GREEDY, SpeakingStyle(seed=5)], ids=["greedy", "drawn"])
def test_the_gpu_says_what_the_cpu_says(on_gpu, style):
    expected = speaker("cpu").say(TEXT, VOICE, style).samples
    assert is_same(on_gpu.say(TEXT, VOICE, style).samples, expected)


def test_graphs_are_really_used(on_gpu):
    on_gpu.say(TEXT, VOICE)
    assert on_gpu.generator.engine.runner._graphs


def test_many_at_once_say_what_each_says_alone(on_gpu):
    alone = [on_gpu.say(TEXT, VOICE, SpeakingStyle(seed=seed)).samples for seed in range(12)]
    together: dict[int, np.ndarray] = {}

    def listen(seed: int) -> None:
        pieces = list(on_gpu.stream(TEXT, VOICE, SpeakingStyle(seed=seed)))
        together[seed] = np.concatenate(pieces, axis=1)

    threads = [threading.Thread(target=listen, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same = sum(is_same(together[seed], expected) for seed, expected in enumerate(alone))
    assert len(together) == 12 and same >= 11  # products of other batch sizes may round a draw the other way


def test_half_precision_speaks():
    sound = TTSBenchSetup(pick("cuda"), "tiny", 30).speaker(torch.bfloat16).say(TEXT, VOICE, GREEDY)
    assert np.isfinite(sound.samples).all() and sound.seconds == pytest.approx(30 * 0.08)
