"""What a hop costs, counted in operations and bytes: as much at the end of a long reply as at its beginning."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.models.tiny_cosyvoice import sizes
from vivavoce.models.cosyvoice.dit import CosyVoice3Flow
from vivavoce.models.flow.model import FlowDecoder, FlowSpeech
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.models.hift.causal import CausalHiFT
from vivavoce.models.hift.model import HiFT
from vivavoce.models.hift.stream import HiFTStream
from vivavoce.nn.modules import fill_randomly

CHUNK, LOOKAHEAD, FIRST_HOP, FULL_AFTER = 5, 3, 4, 8  # hops until windows and contexts are full


@pytest.fixture(scope="module", params=[2, 3])
def speech(request):
    small = sizes(request.param)
    config = replace(small.flow, chunk=CHUNK)
    if request.param == 2:
        flow, vocoder = FlowDecoder(config), HiFTStream(HiFT(small.vocoder).requires_grad_(False))
    else:
        flow, vocoder = CosyVoice3Flow(config), CausalHiFT(small.vocoder).requires_grad_(False)
    fill_randomly(flow, 0)
    return FlowSpeech(flow.requires_grad_(False).eval(), vocoder)


@pytest.fixture(scope="module")
def voice(speech):
    mel, speaker = torch.randn(22, 80), torch.randn(192)
    return speech.flow.voice(VoicePrompt(codes(11), mel, speaker))


def codes(count, seed=0):
    return torch.randint(6561, (count,), generator=torch.Generator().manual_seed(seed))


class Calls(TorchDispatchMode):
    """How often products and convolutions were asked for, whatever their sizes."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        names = ("mm", "addmm", "bmm", "convolution", "_scaled_dot_product")
        self.count += function.__name__.split(".")[0].startswith(names)
        return function(*args, **(kwargs or {}))


def test_a_late_hop_costs_what_an_early_one_costs(speech, voice):
    last = 30 if isinstance(speech.flow, FlowDecoder) else 100
    _, state = speech.step(speech.start(voice, left_chunks=2), codes(FIRST_HOP + LOOKAHEAD))
    costs = {}
    for hop in range(1, last + 1):
        counter = FlopCounterMode(display=False)
        with counter if hop in (5, FULL_AFTER, last) else nullcontext():
            sound, state = speech.step(state, codes(CHUNK, hop))
        costs[hop] = counter.get_total_flops(), state.nbytes, len(sound)
    assert costs[last] == costs[FULL_AFTER]
    assert costs[last][2] == CHUNK * 960
    assert costs[last][0] >= costs[5][0] > 0.9 * costs[last][0]


def test_replies_side_by_side_run_as_one(speech, voice):
    def cost(streams):
        states = [speech.start(voice, left_chunks=2, seed=seed) for seed in range(streams)]
        given = [codes(FIRST_HOP + LOOKAHEAD, seed) for seed in range(streams)]
        with FlopCounterMode(display=False) as counter, Calls() as calls:
            sounds, _ = speech.step_batch(states, given, [False] * streams)
        return counter.get_total_flops(), calls.count, [len(sound) for sound in sounds]

    (work_of_one, calls_for_one, one), (work, calls, four) = cost(1), cost(4)
    assert calls == calls_for_one > 0
    assert 3.9 * work_of_one < work <= 4 * work_of_one  # what depends on the time alone is computed once
    assert four == one * 4
