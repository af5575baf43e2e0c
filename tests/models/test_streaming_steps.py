"""Every streaming module is stepped the same way: `step(state, x) -> (y, state)` with a frozen dataclass as state."""

import dataclasses
import inspect
from typing import get_args, get_type_hints

import pytest

from vivavoce.models.bigvgan import BigVGAN
from vivavoce.models.flow import FlowSpeech, GraphedFlow
from vivavoce.models.flow.stream import StreamingFlow
from vivavoce.models.hift import CausalHiFT, GraphedCausalHiFT, GraphedVocoder, HiFTStream, PublishedHiFTStream
from vivavoce.models.moss_audio_tokenizer import MossAudioTokenizerNano, SlotDecoder
from vivavoce.models.moss_speech import GraphedCodec, MossSpeechCodec
from vivavoce.models.speech_encoder import GraphedSpeechStream, SpeechEncoder, SpeechStream
from vivavoce.models.xy_tokenizer import XYCodec

STEPS = [
    *(SpeechEncoder.step, GraphedSpeechStream.step, SpeechStream.step),
    *(StreamingFlow.step, GraphedFlow.step, FlowSpeech.step, MossSpeechCodec.step, GraphedCodec.step),
    *(HiFTStream.step, GraphedVocoder.step, PublishedHiFTStream.step, CausalHiFT.step, GraphedCausalHiFT.step),
    *(MossAudioTokenizerNano.encode_step, MossAudioTokenizerNano.decode_step, SlotDecoder.step),
    *(XYCodec.encode_step, XYCodec.decode_step, BigVGAN.step),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__qualname__)
def test_a_step_takes_a_state_and_returns_the_output_and_the_next_state(step):
    _, state, given, *options = inspect.signature(step).parameters.values()
    assert state.name == "state" and given.default is inspect.Parameter.empty
    assert [(option.name, option.default) for option in options] in ([], [("final", False)])
    kinds = get_type_hints(step)
    assert dataclasses.is_dataclass(kinds["state"]) and kinds["state"].__dataclass_params__.frozen
    _, after = get_args(kinds["return"])
    assert after is kinds["state"]
