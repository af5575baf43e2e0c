"""The CPU generator and the engine generate the same frames, and neither keeps state of finished texts."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.models.tiny_nano import CONFIG, LetterTokenizer, tiny_nano
from vivavoce.cpu_speed import is_int8_fast
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation, Sampling, gumbel_noise
from vivavoce.errors import CapacityError
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoPrompt
from vivavoce.nn.quantised import to_int8
from vivavoce.tts.frame_sampling import SequenceSampler
from vivavoce.tts.nano import EngineFrameGenerator
from vivavoce.tts.nano_cpu import CpuFrameGenerator, NanoCpuDecoder

REFERENCE = tuple(tuple((7 * frame + 3 * book) % 24 for book in range(5)) for frame in range(6))
PROMPT = MossTTSNanoPrompt(CONFIG, LetterTokenizer())
WIDER = dataclasses.replace(CONFIG, hidden_size=128, intermediate_size=256, num_heads=4)
NEEDS_INT8 = pytest.mark.skipif(not is_int8_fast(), reason="this processor has no int8 products")
SAMPLINGS = {
    "greedy": GREEDY,
    "greedy with a penalty": Sampling(0.0, repetition_penalty=1.5),
    "published": Sampling(0.8, 25, 0.95, 1.2),
    "narrow": Sampling(1.3, 3, 0.7),
    "without limits": Sampling(1.0, 0, 1.0),
    "wide": Sampling(1.5, 100, 0.99, 1.1),
}


@pytest.fixture(scope="module")
def model() -> MossTTSNano:
    return tiny_nano(dtype=torch.float32)


def said(
    generator: CpuFrameGenerator | EngineFrameGenerator, generation: Generation, reference=REFERENCE
) -> list[tuple[int, ...]]:
    return list(generator.frames(reference, "Good evening.", generation))


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("reference", [REFERENCE, ()], ids=["cloned", "own"])
def test_cpu_and_engine_generate_the_same_frames(model, name, reference):
    for seed in (0, 1, 2**40 + 5):
        generation = Generation(SAMPLINGS[name], 24, min_new_rows=10, seed=seed, penalise_prompt=False)
        alone = said(CpuFrameGenerator(model, PROMPT), generation, reference)
        assert len(alone) >= 9
        assert alone == said(EngineFrameGenerator(model, PROMPT, pick("cpu")), generation, reference)


def test_cpu_and_engine_agree_with_fewer_codebooks():
    model = tiny_nano(dtype=torch.float32, codebooks=3)
    generation = Generation(SAMPLINGS["published"], 12, 12, penalise_prompt=False)
    alone = said(CpuFrameGenerator(model, PROMPT), generation)
    assert {len(frame) for frame in alone} == {3}
    assert alone == said(EngineFrameGenerator(model, PROMPT, pick("cpu")), generation)


def test_a_voice_read_ahead_is_the_whole_prompt(model):
    generation = Generation(GREEDY, 16, 16)
    engine = Engine(model, pick("cpu"), torch.float32, EngineLimits(cache_rows=512))
    rows = PROMPT.clone("Good evening.", REFERENCE)
    expected = model.spoken_frames(engine.complete(engine.open(rows), generation))
    assert PROMPT.before_text(REFERENCE) + PROMPT.speech("Good evening.") == rows
    assert said(CpuFrameGenerator(model, PROMPT), generation) == expected


def test_a_past_is_immutable(model):
    decoder = NanoCpuDecoder(model)
    past = decoder.prefill(PROMPT.before_text(REFERENCE))
    before = past.keys_values.clone()
    generation = Generation(SAMPLINGS["published"], 8, 8, penalise_prompt=False)
    first = list(decoder.generate(past, PROMPT.speech("Yes."), generation))
    list(decoder.generate(past, PROMPT.speech("No, thank you."), generation))
    assert list(decoder.generate(past, PROMPT.speech("Yes."), generation)) == first
    assert torch.equal(past.keys_values, before)


@pytest.mark.parametrize("is_int8", [False, pytest.param(True, marks=NEEDS_INT8)])
def test_compiled_steps_generate_the_same_frames(is_int8):
    model = MossTTSNano.random(WIDER, deviation=0.1)
    if is_int8:
        to_int8(model)
    slow, quick = NanoCpuDecoder(model), NanoCpuDecoder(model)
    quick.compile()
    assert type(quick.transformer) is not type(slow.transformer)
    rows, more = PROMPT.before_text(REFERENCE), PROMPT.speech("Yes.")
    pasts = [decoder.prefill(rows) for decoder in (slow, quick)]
    assert torch.equal(pasts[0].keys_values, pasts[1].keys_values)
    generation = Generation(SAMPLINGS["published"], 12, 12, penalise_prompt=False)
    said = [list(decoder.generate(past, more, generation)) for decoder, past in zip((slow, quick), pasts, strict=True)]
    assert said[0] == said[1] and len(said[0]) >= 11


def test_products_that_cannot_be_compiled_stay_as_they_are():
    other = MossTTSNano.random(WIDER)
    other.transformer.h[0].mlp.fc_in = torch.nn.Linear(WIDER.hidden_size, WIDER.intermediate_size)
    decoder = NanoCpuDecoder(other)
    whole = decoder.transformer
    decoder.compile()
    assert (
        decoder.transformer is whole
        and len(list(decoder.generate(decoder.prefill([(0,) * 6]), [(1,) * 6], Generation(GREEDY, 2, 3)))) == 2
    )


def test_two_sequences_of_one_decoder_do_not_meet(model):
    generator, generation = CpuFrameGenerator(model, PROMPT), Generation(GREEDY, 8, 9)
    alone = {text: list(generator.frames(REFERENCE, text, generation)) for text in ("Yes.", "No.")}
    streams = {text: generator.frames(REFERENCE, text, generation) for text in alone}
    mixed = list(zip(*streams.values(), strict=True))
    assert [list(frames) for frames in zip(*mixed, strict=True)] == list(alone.values())


def test_noise_is_the_engine_s():
    seed, position, channels = 2**45 + 12345, 777, 6
    sampler = SequenceSampler([Sampling()] * channels, seed, 24)
    sampler.start_row(position)
    ids = np.arange(24)
    for channel in range(channels):
        expected = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), channel, torch.from_numpy(ids)[None])
        np.testing.assert_allclose(sampler._noise[channel], expected[0].float().numpy(), rtol=1e-6)


def test_leaving_off_leaves_nothing_in_the_engine(model):
    generator = EngineFrameGenerator(model, PROMPT, pick("cpu"))
    generation = Generation(GREEDY, 20, 20)
    said(generator, generation)
    generator.driver.call(lambda: None)
    before = set(generator.engine.scheduler.sequences)
    frames = generator.frames(REFERENCE, "Good evening.", generation)
    next(frames)
    assert set(generator.engine.scheduler.sequences) != before
    frames.close()
    generator.driver.call(lambda: None)
    assert set(generator.engine.scheduler.sequences) == before and len(before) == 1


def test_voices_used_long_ago_are_forgotten(model):
    generator, generation = EngineFrameGenerator(model, PROMPT, pick("cpu")), Generation(GREEDY, 2, 2)
    for code in range(12):
        said(generator, generation, (((code,) * 5),) * 3)
    generator.driver.call(lambda: None)
    assert len(generator.engine.scheduler.sequences) == 8


def test_a_text_beyond_the_model_s_reach_is_refused():
    small = MossTTSNano.random(dataclasses.replace(CONFIG, max_positions=160))
    with pytest.raises(CapacityError, match="more than the 160"):
        said(CpuFrameGenerator(small, PROMPT), Generation(GREEDY, 100))


@NEEDS_INT8
@pytest.mark.parametrize(("hidden", "is_int8"), [(128, False), (512, True)])
def test_rounded_weights_say_nearly_the_same(hidden, is_int8):
    config = dataclasses.replace(WIDER, hidden_size=hidden)
    plain, rounded = (MossTTSNano.random(config, deviation=12.8 / hidden) for _ in range(2))
    to_int8(rounded)
    assert NanoCpuDecoder(rounded).is_int8 == is_int8 and not NanoCpuDecoder(plain).is_int8
    rows = PROMPT.before_text(REFERENCE)
    expected, found = (NanoCpuDecoder(each).prefill(rows).keys_values for each in (plain, rounded))
    assert (found - expected).norm() / expected.norm() < 0.03
    assert len(list(CpuFrameGenerator(rounded, PROMPT).frames(REFERENCE, "Yes.", Generation(GREEDY, 6, 7)))) == 6
