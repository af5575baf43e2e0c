"""Texts of many windows in one engine are the texts each window has alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.engine.speculative import Draft, Speculation
from vivavoce.errors import CapacityError, InputError
from vivavoce.models.whisper.config import WhisperConfig, WhisperSettings, WhisperTokens
from vivavoce.models.whisper.decoding import Suppress, SuppressAtStart, TimestampRules, apply, decode, score
from vivavoce.models.whisper.engine import WhisperWriter, WindowStore, pack_projections
from vivavoce.models.whisper.model import Whisper, WindowMemory

TOKENS = WhisperTokens.in_order(40, ["en", "de"])
TIMES = 61
CONFIG = WhisperConfig(
    d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=60, max_target_positions=48,
    vocab_size=TOKENS.timestamps + TIMES,
)  # fmt: skip
SETTINGS = WhisperSettings(
    suppressed=(3, *TOKENS.specials), suppressed_at_start=(5, TOKENS.endoftext), latest_start=0.4
)
CPU = pick("cpu")


@pytest.fixture(scope="module")
def model():
    made = Whisper.random(CONFIG, dtype=torch.float64, seed=1)
    made.decoder.embed_positions.weight.normal_(generator=torch.Generator().manual_seed(0))
    return made


def windows_of(model: Whisper, count: int, frames: int = 120, seed: int = 0):
    mel = torch.randn(count, 80, frames, generator=torch.Generator().manual_seed(seed))
    return model.decoder.cross_kv(model.encoder(mel))


def rules(timestamps: bool):
    made = [SuppressAtStart(SETTINGS.suppressed_at_start), Suppress(SETTINGS.suppressed)]
    if timestamps:
        return [*made, TimestampRules(TOKENS, SETTINGS.latest_start)]
    return [*made, Suppress(range(TOKENS.notimestamps, CONFIG.vocab_size))]


def engine_of(model: Whisper, windows: int = 6) -> tuple[Engine, WhisperWriter]:
    writer = WhisperWriter(model, TOKENS, SETTINGS, windows)
    limits = EngineLimits(page_size=4, cache_rows=512, rows_per_step=9, sequences_per_step=8)
    return Engine(writer, CPU, torch.float64, limits), writer


@pytest.mark.parametrize("timestamps", [False, True])
def test_texts_in_flight_are_those_decoded_alone(model, timestamps):
    engine, writer = engine_of(model)
    memory = windows_of(model, 5)
    prompts = [TOKENS.prompt(language, timestamps=timestamps) for language in ("en", "de", "en", "de", "en")]
    prompts[3] = TOKENS.prompt("de", timestamps=timestamps, earlier=[7, 8, 9])
    texts: dict[int, list[int]] = {}
    sequences = []
    for index, window in enumerate(writer.store.hold(memory)):
        sequence = engine.open(writer.prompt(window, prompts[index], timestamps))
        engine.generate(sequence, Generation(GREEDY, max_new_rows=24))
        sequences.append(sequence)
        texts[sequence.id] = []
        for emission in engine.step():  # later windows join while earlier texts are under way
            texts[emission.sequence.id].append(emission.row[0])
    while engine.has_work:
        for emission in engine.step():
            texts[emission.sequence.id].append(emission.row[0])
    for index, sequence in enumerate(sequences):
        (alone,) = decode(model, TOKENS, memory.of([index]), [prompts[index]], rules(timestamps), max_tokens=24)
        written = [token for token in texts[sequence.id] if token != TOKENS.endoftext]
        assert written == alone.tokens
    assert len({tuple(text) for text in texts.values()}) >= 4


def test_windows_of_different_lengths_stand_side_by_side(model):
    engine, writer = engine_of(model)
    memories = [windows_of(model, 1, frames, seed=frames) for frames in (120, 40, 74)]
    prompt = TOKENS.prompt("en")
    held = [writer.store.hold(memory)[0] for memory in memories]
    sequences = [engine.open(writer.prompt(window, prompt, False)) for window in held]
    for sequence in sequences:
        engine.generate(sequence, Generation(GREEDY, max_new_rows=12))
    while engine.has_work:
        engine.step()
    for sequence, memory in zip(sequences, memories, strict=True):
        (alone,) = decode(model, TOKENS, memory, [prompt], rules(False), max_tokens=12)
        written = [token for token, _ in sequence.rows[len(prompt) :] if token != TOKENS.endoftext]
        assert written == alone.tokens


def test_scripted_layers_give_the_states_of_the_plain_layers(model):
    memory, states = windows_of(model, 2), []
    for is_scripted in (True, False):
        engine, writer = engine_of(model)
        assert writer.paged is not None
        writer.paged = writer.paged if is_scripted else None
        texts = [engine.open(writer.prompt(window, TOKENS.prompt("en"), True)) for window in writer.store.hold(memory)]
        for text in texts:
            engine.generate(text, Generation(GREEDY, max_new_rows=9), speculation=Speculation(BranchingDrafts(), 6))
            text.states = []
        while engine.has_work:
            engine.step()
        assert engine.acceptance.checks > 4
        states.append(torch.cat([state for text in texts for state in text.states]))
    assert (states[0] - states[1]).abs().max() < 1e-12


class BranchingDrafts:
    """Proposes a tree of drafts, few of which are accepted."""

    def propose(self, sequence, max_rows):
        channel = sequence.rows[-1][1]
        return Draft([(token, channel) for token in (44, 9, 45, 11, 46)], [-1, 0, -1, 2, -1]).first(max_rows)


def test_forks_of_a_text_share_its_window(model):
    engine, writer = engine_of(model, windows=1)
    (window,) = writer.store.hold(windows_of(model, 1))
    trunk = engine.open(writer.prompt(window, TOKENS.prompt("en"), False))
    fork = engine.fork(trunk)
    one = engine.complete(trunk, Generation(Sampling(1.0, 0, 1.0), max_new_rows=10, seed=1))
    two = engine.complete(fork, Generation(Sampling(1.0, 0, 1.0), max_new_rows=10, seed=2))
    assert one != two and {row[1] for row in [*one, *two]} == {2 * window}


def test_a_released_slot_is_used_again(model):
    store = WindowStore(model, 2)
    memory = windows_of(model, 2)
    first, second = store.hold(memory)
    assert torch.equal(store.memory(second).keys, memory.of([1]).keys)
    with pytest.raises(CapacityError, match="0 of 2 slots are free"):
        store.hold(windows_of(model, 1))
    store.release(first)
    other = windows_of(model, 1, frames=50, seed=9)
    assert store.hold(other) == [first]
    assert torch.equal(store.memory(first).values, other.values)
    store.release(second)
    with pytest.raises(InputError, match="not held"):
        store.release(second)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.one_of(st.integers(0, 39), st.integers(TOKENS.timestamps, CONFIG.vocab_size - 1)), max_size=6),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_rules_by_mode_are_the_rules_by_history(model, written, timestamps, seed):
    _, writer = engine_of(model, windows=1)
    mode = writer.start_mode((0, 2 * 1 + timestamps))
    for token in written:
        mode = writer.next_mode(mode, (token, 2 * 1 + timestamps))
    logits = torch.randn(1, CONFIG.vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    sampled = torch.tensor([written], dtype=torch.long).reshape(1, -1)
    expected = apply(rules(timestamps), logits, sampled)
    assert torch.equal(writer.ruled(logits, torch.tensor([mode])), expected)


@pytest.mark.parametrize("timestamps", [False, True])
def test_a_finished_text_is_scored_as_it_was_decoded(model, timestamps):
    memory, prompt = windows_of(model, 1, seed=4), TOKENS.prompt("de", timestamps=timestamps)
    (text,) = decode(model, TOKENS, memory, [prompt], rules(timestamps), max_tokens=20)
    again = score(model, TOKENS, memory, prompt, text.tokens, rules(timestamps), text.is_ended)
    assert again.logprob == pytest.approx(text.logprob, abs=1e-4)
    assert again.no_speech == pytest.approx(text.no_speech, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("timestamps", [False, True])
def test_on_a_gpu_texts_are_those_of_the_cpu(model, timestamps):
    device = pick("cuda")
    there = Whisper(CONFIG).requires_grad_(False).eval()
    there.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    there.to(device.torch_device)
    writer = WhisperWriter(there, TOKENS, SETTINGS, 6)
    limits = EngineLimits(page_size=16, cache_rows=1024, sequences_per_step=8)
    engine = Engine(writer, device, torch.float32, limits)
    memory, prompt = windows_of(model, 4), TOKENS.prompt("en", timestamps=timestamps)
    moved = WindowMemory(memory.keys.float().to(device.torch_device), memory.values.float().to(device.torch_device))
    sequences = []
    for window in writer.store.hold(moved):
        sequences.append(engine.open(writer.prompt(window, prompt, timestamps)))
        engine.generate(sequences[-1], Generation(GREEDY, max_new_rows=16))
        engine.step()
    while engine.has_work:
        engine.step()
    alone = decode(model, TOKENS, memory, [prompt] * 4, rules(timestamps), max_tokens=16)
    for sequence, text in zip(sequences, alone, strict=True):
        assert [token for token, _ in sequence.rows[len(prompt) :] if token != TOKENS.endoftext] == text.tokens


def test_packed_projections_are_the_models_own(model):
    memory, prompt = windows_of(model, 1), torch.tensor([TOKENS.prompt("en")])
    before = model.decoder(prompt, memory)
    packed = pack_projections(model.decoder)
    assert torch.equal(model.decoder(prompt, memory), before)
    attention = model.decoder.stack[1].self_attn
    x = torch.randn(3, CONFIG.d_model, dtype=torch.float64)
    apart = torch.cat([attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)], dim=-1)
    assert torch.allclose(torch.nn.functional.linear(x, *packed[1]), apart)
    assert attention.k_proj.weight.data_ptr() == packed[1][0][CONFIG.d_model :].data_ptr()
