"""CosyVoice's hops as graphs give what the plain ones give: the vocoder's here, all of them on CUDA."""

from dataclasses import replace

import pytest
import torch

from tests.models import hift_cases
from tests.models.hift_cases import (
    assert_begins_anew_after_the_end,
    assert_streams_hop_together,
    mels,
    quietened,
    streamed,
)
from tests.models.tiny_cosyvoice import sizes
from vivavoce.device import pick
from vivavoce.engine.cuda_graphs import BUCKETS
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation
from vivavoce.models.cosyvoice.dit import CosyVoice3Flow
from vivavoce.models.cosyvoice.folder import graphed, warm_up
from vivavoce.models.cosyvoice.lm import CosyVoiceLM
from vivavoce.models.flow.model import FlowSpeech
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.models.hift.causal import CausalHiFT, CausalHiFTConfig
from vivavoce.models.hift.cuda import GraphedCausalHiFT
from vivavoce.nn.modules import fill_randomly
from vivavoce.tts.cosyvoice import PUBLISHED

LEFT = 2


@pytest.fixture(scope="module")
def vocoder():
    with torch.no_grad():
        hift = CausalHiFT(CausalHiFTConfig(**hift_cases.SMALL)).to(torch.float64).eval()
        return quietened(hift).requires_grad_(False)


class Stepped(GraphedCausalHiFT):
    def step(self, state, mel, final=False):
        (sound,), (after,) = self.step_batch([state], [mel], [final])
        return sound, after


class TestVocoder:
    """Not on CUDA a graph's function is called as it is: what goes in and out of it is tested here."""

    def test_streams_at_different_places_hop_together(self, vocoder):
        replayed = Stepped(vocoder)
        final = [False, False, True, False, False, False, True]
        assert_streams_hop_together(replayed, [0, 0, 3, 5, 30, 50, 70], [20, 20, 20, 20, 20, 20, 7], final)
        assert_begins_anew_after_the_end(replayed, held=4 * 480 + 4)

    @pytest.mark.parametrize("hops", [[30, 50, 50, 7], [2, 2, 9, 9, 1], [4, 30]])
    def test_a_stream_is_the_plain_one(self, vocoder, hops):
        replayed, mel = Stepped(vocoder), mels(sum(hops), batch=3)
        expected, _ = streamed(vocoder, mel, hops, seed=4)
        sounds, _ = streamed(replayed, mel, hops, seed=4)
        for ours, theirs in zip(sounds, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def tiny_speech(device="cpu"):
    small = sizes(3)
    torch.manual_seed(0)
    flow, hift = CosyVoice3Flow(small.flow), CausalHiFT(small.vocoder)
    with torch.no_grad():
        fill_randomly(flow, 0)
        quietened(hift)
    flow.requires_grad_(False).eval().tabulate()
    return FlowSpeech(flow.to(device), hift.requires_grad_(False).eval().to(device))


def some_codes(count, seed=1):
    return torch.randint(6561, (count,), generator=torch.Generator().manual_seed(seed))


def a_prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mel, speaker = torch.randn(2 * length, 80, generator=generator), torch.randn(192, generator=generator)
    return VoicePrompt(some_codes(length, seed), mel, speaker)


@pytest.fixture
def no_tf32():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.usefixtures("no_tf32")
class TestOnCuda:
    def test_replies_that_join_late_equal_plain_ones_alone(self):
        plain, replayed = tiny_speech(), graphed(tiny_speech("cuda"))
        prompts, late = [a_prompt(35, 1), a_prompt(60, 2), a_prompt(35, 3)], [0, 1, 3]
        pieces = [[18, 25, 25, 50, 12], [18, 25, 25, 7], [18, 50, 3]]
        voices = [replayed.flow.voice(prompt) for prompt in prompts]
        warm_up(replayed, voices[0], [1, 2, 4], LEFT)
        states = [replayed.start(voice, LEFT, seed) for seed, voice in enumerate(voices)]
        sounds, fed = [[] for _ in states], [0] * 3
        for step in range(9):
            active = [row for row in range(3) if step >= late[row] and fed[row] < len(pieces[row])]
            given = [some_codes(sum(pieces[row]), row).split(pieces[row])[fed[row]] for row in active]
            final = [fed[row] + 1 == len(pieces[row]) for row in active]
            if not active:
                break
            made, after = replayed.step_batch([states[row] for row in active], given, final)
            for row, sound, state in zip(active, made, after, strict=True):
                sounds[row].append(sound.cpu())
                states[row], fed[row] = state, fed[row] + 1
        for row, prompt in enumerate(prompts):
            codes = some_codes(sum(pieces[row]), row)
            expected, _ = plain.step(plain.start(plain.flow.voice(prompt), LEFT, row), codes, final=True)
            ours = torch.cat(sounds[row])
            assert ours.shape == expected.shape
            assert (ours - expected).norm() <= 1e-3 * expected.norm()

    def test_codes_are_written_as_on_the_cpu(self):
        """More rows of prompts than a graph takes, then graphs; keys that no norm stands before."""
        config = replace(sizes(3).lm, head_dim=16)
        written = []
        for place in ("cpu", "cuda"):
            lm = CosyVoiceLM.random(config, "cpu", seed=4).to(place)
            engine = Engine(lm, pick(place), torch.float32, EngineLimits(cache_rows=4096))
            before = [config.end_of_prompt, *range(40)]
            texts = [lm.prompt([7, seed], before, some_codes(15 + seed, seed).tolist()) for seed in range(7)]
            sequences = [engine.open(rows) for rows in texts]
            for seed, sequence in enumerate(sequences):
                engine.generate(sequence, Generation(PUBLISHED, max_new_rows=30, min_new_rows=30, seed=seed))
            while engine.has_work:
                engine.step()
            written.append([sequence.rows for sequence in sequences])
        assert sum(len(rows) for rows in texts) > max(BUCKETS)
        assert written[0] == written[1]
