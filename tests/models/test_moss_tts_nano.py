"""MOSS-TTS-Nano gives what the official code gives, and in the engine what it gives alone."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.golden import weights
from tests.models.named_checkpoint import GOLDEN, NamedCheckpoint
from tests.models.nano_reference import NanoReference
from tests.models.tiny_nano import CONFIG, tiny_nano
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.errors import CapacityError, CheckpointError, InputError
from vivavoce.models.checkpoint import Checkpoint, load_weights, published_tensors, save_weights
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoConfig, NanoSampling
from vivavoce.nn.paged_kv import CachePiece, PagedCache, RowBatch

KEYS = "moss_tts_nano_lm_untied.tsv"
CLOSE = {"rtol": 0, "atol": 2e-4}
PAD, SLOT, END = CONFIG.audio_pad_token_id, CONFIG.audio_assistant_slot_token_id, CONFIG.audio_end_token_id


def as_rows(rows: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in rows.tolist()]


def all_tied() -> dict[str, str]:
    """The 17 names that the published file has besides, and what each is."""
    heads = {f"audio_lm_heads.{index}.weight": f"audio_embeddings.{index}.weight" for index in range(16)}
    return {"text_lm_head.weight": "transformer.wte.weight"} | heads


class Pages:
    """A cache for some sequences, run by hand: `hidden` of the next rows of each."""

    def __init__(self, model: MossTTSNano, sequences: int, rows: int = 64) -> None:
        self.model = model
        pages = -(-rows // 16)
        self.table = torch.arange(1, sequences * pages + 1, dtype=torch.int32).reshape(sequences, pages)
        dtype = model.transformer.wte.weight.dtype
        self.cache = PagedCache.allocate(model.kv_shape, sequences * pages + 1, 16, dtype, torch.device("cpu"))
        self.lengths = [0] * sequences

    @torch.inference_mode()
    def hidden(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        pieces, slots, positions, start = [], [], [], 0
        for slot, new in enumerate(rows):
            pieces.append(CachePiece(slice(start, start + len(new)), slot, self.lengths[slot]))
            slots += [slot] * len(new)
            positions += range(self.lengths[slot], self.lengths[slot] + len(new))
            self.lengths[slot] += len(new)
            start += len(new)
        place = torch.tensor([slots, positions], dtype=torch.int32)
        batch = RowBatch(self.cache, self.table, place[0], place[1], 0, tuple(pieces))
        out = self.model(torch.cat(rows), batch)
        return [out[piece.rows] for piece in pieces]


class GreedyRecorder:
    """A `Draw` that takes the best and keeps what it was shown."""

    def __init__(self, sequences: int) -> None:
        self.modes = self.generated = self.min_rows = torch.zeros(sequences, dtype=torch.long)
        self.stop: torch.Tensor | None = None
        self.codes: list[torch.Tensor] = []

    def choose(self, channel: int, logits: torch.Tensor) -> torch.Tensor:
        self.stop = logits
        return logits.argmax(-1)

    def sample(self, channel: int, logits: torch.Tensor) -> torch.Tensor:
        assert channel == len(self.codes) + 1
        self.codes.append(logits)
        return logits.argmax(-1)


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "moss_tts_nano_lm.safetensors")


@pytest.fixture(scope="module")
def nano():
    """The true sizes, weights made by name."""
    model = MossTTSNano(MossTTSNanoConfig())
    load_weights(model, NamedCheckpoint(KEYS, 1, lambda *_: torch.zeros(0)))
    return model.eval()


@torch.inference_mode()
def test_embeddings_and_hidden_states_equal_the_official_code(nano, golden):
    rows = golden["input_ids"][0]
    torch.testing.assert_close(nano.embed(rows), golden["embeds"][0], rtol=0, atol=1e-5)
    torch.testing.assert_close(Pages(nano, 1).hidden([rows])[0], golden["hidden"][0], **CLOSE)


@torch.inference_mode()
def test_frames_and_the_cached_step_equal_the_official_code(nano, golden):
    pages = Pages(nano, 1)
    hidden = pages.hidden([golden["input_ids"][0]])[0][-1:]
    first = GreedyRecorder(1)
    row = nano.next_rows(hidden, first)
    torch.testing.assert_close(first.stop, golden["stop_logits"], **CLOSE)
    torch.testing.assert_close(torch.cat(first.codes), golden["audio_logits"], **CLOSE)
    assert row.tolist() == golden["next_row"][0].tolist()
    stepped = pages.hidden([row])[0]
    torch.testing.assert_close(stepped, golden["step_hidden"][0], **CLOSE)
    second = GreedyRecorder(1)
    row = nano.next_rows(stepped, second)
    torch.testing.assert_close(second.stop, golden["stop_logits_2"], **CLOSE)
    torch.testing.assert_close(torch.cat(second.codes), golden["audio_logits_2"], **CLOSE)
    assert row[0, 1:].tolist() == golden["codes_2"].tolist()


@torch.inference_mode()
def test_a_flat_batch_equals_the_official_left_padded_one(nano, golden):
    masks = golden["batch_mask"].bool()
    prompts = [rows[mask] for rows, mask in zip(golden["batch_input_ids"], masks, strict=True)]
    assert len(prompts[0]) != len(prompts[1])
    pages = Pages(nano, 2)
    hidden = pages.hidden(prompts)
    for ours, theirs, mask in zip(hidden, golden["batch_hidden"], masks, strict=True):
        torch.testing.assert_close(ours, theirs[mask], **CLOSE)
    draw = GreedyRecorder(2)
    rows = nano.next_rows(torch.stack([ours[-1] for ours in hidden]), draw)
    torch.testing.assert_close(draw.stop, golden["batch_stop_logits"], **CLOSE)
    codes = torch.stack([logits.argmax(-1) for logits in draw.codes], dim=1)
    assert codes.tolist() == golden["batch_codes"].tolist()
    forced = torch.cat([torch.full((2, 1), 9), codes], dim=1)
    stops = golden["batch_stop_logits"].argmax(-1, keepdim=True) == 1
    assert rows.tolist() == torch.where(stops, torch.tensor([7, *[1024] * 16]), forced).tolist()
    stepped = pages.hidden([forced[:1], forced[1:]])
    torch.testing.assert_close(torch.stack(stepped), golden["batch_step_hidden"], **CLOSE)


def frames_of(rows: list[tuple[int, ...]]) -> list[list[int]]:
    return [list(row[1:]) for row in rows if row[0] == 9]


@pytest.mark.parametrize(
    ("name", "penalty", "codebooks"),
    [("generate", 1.0, 16), ("generate_penalty", 1.2, 16), ("generate_nq8", 1.0, 8)],
)
def test_the_engine_generates_the_official_frames(nano, golden, name, penalty, codebooks):
    limits = EngineLimits(cache_rows=96, rows_per_step=17, page_size=4)
    nano.codebooks = codebooks
    try:
        engine = Engine(nano, pick("cpu"), torch.float32, limits)
        sampling = Sampling(temperature=0.0, repetition_penalty=penalty)
        generation = Generation(sampling, max_new_rows=golden[name].shape[1], penalise_prompt=False)
        rows = engine.complete(engine.open(as_rows(golden["input_ids"][0])), generation)
        assert frames_of(rows) == golden[name][0].tolist()
        assert nano.spoken_frames(rows) == [tuple(row[1 : 1 + codebooks]) for row in rows]
    finally:
        nano.codebooks = 16


def test_the_engine_generates_the_official_batch_side_by_side(nano, golden):
    engine = Engine(nano, pick("cpu"), torch.float32, EngineLimits(cache_rows=160))
    masks = golden["batch_mask"].bool()
    prompts = [as_rows(rows[mask]) for rows, mask in zip(golden["batch_input_ids"], masks, strict=True)]
    sequences = [engine.open(prompt) for prompt in prompts]
    for sequence in sequences:
        engine.generate(sequence, Generation(GREEDY, max_new_rows=golden["batch_generate"].shape[1]))
    while engine.has_work:
        engine.step()
    for sequence, prompt, expected in zip(sequences, prompts, golden["batch_generate"], strict=True):
        spoken = [frame for frame in expected.tolist() if frame[0] != 1024]
        assert frames_of(sequence.rows[len(prompt) :]) == spoken


def test_the_true_config_makes_the_published_tensors():
    with torch.device("meta"):
        shapes = {
            name: tuple(tensor.shape) for name, tensor in published_tensors(MossTTSNano(MossTTSNanoConfig())).items()
        }
    assert shapes == weights.shapes(GOLDEN / "keys" / KEYS)
    assert len(shapes) + len(all_tied()) == 194
    assert sum(math.prod(shape) for shape in shapes.values()) == 117_311_232


# From here on a tiny model, beside a reference that recomputes everything.

SEEDS = (0, 4, 8, 10, 11, 14)  # some of whose greedy replies stop at once, some later, some never
GENERATION = Generation(Sampling(0.9, 10, 0.95, 1.3), max_new_rows=12, seed=4, penalise_prompt=False)


def prompt(length: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Rows of text, speech and speech with fewer codebooks."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(10, CONFIG.vocab_size, (length,), generator=generator)
    codes = torch.randint(0, PAD, (length, CONFIG.n_vq), generator=generator)
    kinds = torch.randint(0, 3, (length, 1), generator=generator)
    depth = torch.arange(CONFIG.n_vq) < kinds * 3  # none, three, all
    return as_rows(torch.cat([text[:, None], torch.where(depth, codes, PAD)], dim=1))


def tiny_engine(model: MossTTSNano, cache_rows: int = 1024, rows_per_step: int = 64) -> Engine:
    limits = EngineLimits(4, cache_rows, rows_per_step=rows_per_step, sequences_per_step=8)
    return Engine(model, pick("cpu"), torch.float64, limits)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("codebooks", [5, 2])
def test_greedy_speech_equals_the_plain_reference(seed, penalty, codebooks):
    model = tiny_nano(seed, codebooks=codebooks)
    reference = NanoReference(CONFIG, published_tensors(model))
    rows = prompt(9 + seed, seed)
    ours = Pages(model, 1).hidden([torch.tensor(rows)])[0]
    torch.testing.assert_close(ours, reference.hidden(rows), rtol=0, atol=1e-5)  # its angles are in float32
    sampling = Sampling(temperature=0.0, repetition_penalty=penalty)
    engine = tiny_engine(model, rows_per_step=5)
    made = engine.complete(engine.open(rows), Generation(sampling, max_new_rows=8, penalise_prompt=False))
    assert made == reference.generate(rows, 8, penalty, codebooks)


def test_some_of_the_references_stop_and_some_go_on():
    """Or the test above would show one half only."""
    ends = set()
    for seed in SEEDS:
        model = tiny_nano(seed)
        engine = tiny_engine(model)
        made = engine.complete(engine.open(prompt(9 + seed, seed)), Generation(GREEDY, max_new_rows=8))
        ends.add(model.ends(made[-1]))
    assert ends == {True, False}


def test_a_reply_that_must_be_long_does_not_stop():
    for seed in SEEDS:
        engine = tiny_engine(tiny_nano(seed))
        made = engine.complete(engine.open(prompt(9 + seed, seed)), Generation(GREEDY, max_new_rows=8, min_new_rows=9))
        assert [row[0] for row in made] == [SLOT] * 8


@pytest.mark.parametrize("cache_rows", [1024, 72])
def test_speech_in_a_batch_equals_speech_alone(cache_rows):
    """Also where the sequences evict each other, so that a reply is computed again with its reference."""
    model = tiny_nano(1)
    prompts = [prompt(length, length) for length in (7, 12, 3, 20, 9)]
    generations = [dataclasses.replace(GENERATION, seed=seed, min_new_rows=12) for seed in range(5)]
    engine = tiny_engine(model, cache_rows, rows_per_step=16)
    sequences = [engine.open(rows) for rows in prompts]
    for sequence, generation in zip(sequences, generations, strict=True):
        engine.generate(sequence, generation)
    while engine.has_work:
        engine.step()
    assert (engine.scheduler.evictions > 0) == (cache_rows == 72)
    for sequence, rows, generation in zip(sequences, prompts, generations, strict=True):
        alone = tiny_engine(model)
        assert sequence.rows[len(rows) :] == alone.complete(alone.open(rows), generation)


def test_a_reply_counts_its_codes_while_another_prompt_is_read_beside_it():
    model = tiny_nano(3)
    forbid = Generation(
        Sampling(temperature=0.0, repetition_penalty=1e6), max_new_rows=8, min_new_rows=8, penalise_prompt=False
    )
    engine = tiny_engine(model, rows_per_step=6)
    reading, speaking = engine.open(), engine.open(prompt(8, 3))
    while speaking.pending:
        engine.step()
    engine.append(reading, prompt(60, 1))
    engine.generate(reading, forbid)  # as the older it stands first in a step
    made = engine.complete(speaking, forbid)
    alone = tiny_engine(model)
    assert made == alone.complete(alone.open(prompt(8, 3)), forbid)


def test_a_forked_voice_speaks_as_one_never_forked():
    model = tiny_nano(2)
    voice, text = prompt(14, 1), prompt(6, 2)
    engine = tiny_engine(model)
    kept = engine.open(voice)
    engine.step()
    alone = tiny_engine(model)
    expected = alone.complete(alone.open(voice + text), GENERATION)
    for _ in range(2):
        chunk = engine.fork(kept)
        engine.append(chunk, text)
        assert engine.complete(chunk, GENERATION) == expected
        engine.close(chunk)


def repeated(made: list[tuple[int, ...]]) -> bool:
    return any(len(set(column)) < len(column) for column in list(zip(*made, strict=True))[1:])


def test_the_penalty_counts_this_reply_alone():
    """So strong a penalty forbids repeating; what the prompt holds stays allowed, and a second reply starts afresh."""
    model = tiny_nano(3)
    forbid = Sampling(temperature=0.0, repetition_penalty=1e6)
    of_reply = Generation(forbid, max_new_rows=6, min_new_rows=6, penalise_prompt=False)
    free = Generation(GREEDY, max_new_rows=6, min_new_rows=6)
    engine = tiny_engine(model)
    rows = prompt(8, 3)
    unpenalised = engine.complete(engine.open(rows), free)
    assert repeated(unpenalised), "greedy speech repeats nothing; the test shows nothing"
    # With the very codes it would say first standing in the prompt:
    context = [(SLOT, *unpenalised[0][1:]), *rows]
    first = engine.complete(engine.open(context), of_reply)
    assert first[0] == engine.complete(engine.open(context), free)[0]
    assert not repeated(first)
    counted = engine.complete(engine.open(context), dataclasses.replace(of_reply, penalise_prompt=True))
    for channel, code in enumerate(unpenalised[0][1:], start=1):
        assert code not in {row[channel] for row in counted}

    sequence = engine.open(rows)
    engine.complete(sequence, of_reply)
    length = len(sequence)
    again = engine.complete(sequence, of_reply)  # the same settings object, a new reply
    fresh = tiny_engine(model)
    assert again == fresh.complete(fresh.open(sequence.rows[:length]), of_reply)


def test_the_stop_is_chosen_as_often_as_its_chance_says():
    model = tiny_nano(4)
    rows = prompt(6, 4)
    state = NanoReference(CONFIG, published_tensors(model))
    text = state.weights["transformer.wte.weight"] @ state._local([state.hidden(rows)[-1]])
    chance = float(torch.stack([text[SLOT], text[END]]).div(4.0).softmax(0)[1])
    assert 0.02 < chance < 0.98
    engine = tiny_engine(model)
    voice = engine.open(rows)
    stops = 0
    for seed in range(150):
        fork = engine.fork(voice)
        settings = (Sampling(4.0, 0, 1.0, 1.7), *[GREEDY] * CONFIG.n_vq)
        stops += model.ends(engine.complete(fork, Generation(settings, max_new_rows=1, seed=seed))[0])
        engine.close(fork)
    deviation = math.sqrt(150 * chance * (1 - chance))
    assert abs(stops - 150 * chance) < 4 * deviation


def test_the_published_sampling_fits_the_channels():
    settings = tuple(Sampling(*values) for values in NanoSampling().per_channel(CONFIG.n_vq))
    engine = tiny_engine(tiny_nano(5))
    generation = Generation(settings, max_new_rows=NanoSampling().max_new_frames // 25, penalise_prompt=False)
    assert engine.complete(engine.open(prompt(5)), generation)
    assert settings[0] == Sampling(1.0, 50, 1.0, 1.0)
    assert settings[1:] == (Sampling(0.8, 25, 0.95, 1.2),) * CONFIG.n_vq


@pytest.mark.parametrize("row", [(0, 0, 0, 0, 0), (300, *[0] * 5), (0, *[PAD + 1] * 5), (-1, *[0] * 5)])
def test_rows_that_cannot_be_are_refused(row):
    with pytest.raises(InputError) as caught:
        tiny_engine(tiny_nano()).open([row])
    assert "\n" not in str(caught.value)


def test_a_prompt_longer_than_the_context_is_refused():
    with pytest.raises(CapacityError, match="513 rows are more than the 512"):
        tiny_engine(tiny_nano(), cache_rows=2048).open(prompt(513))


@pytest.mark.parametrize("codebooks", [0, 6])
def test_codebooks_that_are_not_there_are_refused(codebooks):
    with pytest.raises(InputError, match=f"1 to 5 codebooks, not {codebooks}"):
        tiny_nano(codebooks=codebooks)


# Checkpoints.


@pytest.fixture
def tied_folder(tmp_path):
    """The published layout: one `.bin` in bfloat16, every head a second name of its embedding."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in published_tensors(tiny_nano(7)).items()}
    for head, source in all_tied().items():
        if source in state:
            state[head] = state[source]
    torch.save(state, tmp_path / "pytorch_model.bin")
    CONFIG.write(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_published_formats_load(tied_folder, tmp_path, dtype):
    model = MossTTSNano.load(tied_folder, dtype=dtype)
    for name, tensor in published_tensors(tiny_nano(7)).items():
        assert torch.equal(published_tensors(model)[name].data, tensor.to(torch.bfloat16).to(dtype)), name
    again = tmp_path / "safetensors"
    save_weights(model, again)
    model.config.write(again)
    assert MossTTSNanoConfig.read(again) == CONFIG
    reloaded = published_tensors(MossTTSNano.load(again, dtype=dtype, codebooks=2))
    assert all(torch.equal(reloaded[name], tensor) for name, tensor in published_tensors(model).items())
    with Checkpoint(tied_folder) as checkpoint:
        assert "text_lm_head.weight" in checkpoint
    with Checkpoint(again) as checkpoint:
        assert "text_lm_head.weight" not in checkpoint


def rewrite(folder: Path, trunk: dict | None = None, **changes: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["gpt2_config"] |= trunk or {}
    content |= changes
    (folder / "config.json").write_text(json.dumps(content))


def break_ties(folder: Path) -> None:
    state = torch.load(folder / "pytorch_model.bin")
    state["audio_lm_heads.1.weight"] = state["audio_lm_heads.1.weight"] + 1
    torch.save(state, folder / "pytorch_model.bin")


def break_file(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 no more of it")


def break_extra(folder: Path) -> None:
    (folder / "pytorch_model.bin").unlink()
    state = {name: tensor.float() for name, tensor in published_tensors(tiny_nano()).items()}
    save_file(state | {"transformer.wpe.weight": torch.zeros(3)}, folder / "model.safetensors")


BREAKAGES = {
    "untied heads": (break_ties, "audio_lm_heads.1.weight is not audio_embeddings.1.weight"),
    "damaged": (break_file, "cannot be read as a torch"),
    "extra tensor": (break_extra, "1 not of this model: transformer.wpe.weight"),
    "missing layer": (lambda f: rewrite(f, {"n_layer": 4}), r"missing: transformer\.h\.3\."),
    "wrong size": (lambda f: rewrite(f, {"vocab_size": 301}), r"transformer.wte.weight is \[300, 32\]"),
    "another model": (lambda f: rewrite(f, model_type="gpt2"), "'gpt2' model, not 'moss_tts_nano'"),
    "not JSON": (lambda f: (f / "config.json").write_text("["), "is this a MOSS-TTS-Nano folder"),
    "no sizes": (lambda f: (f / "config.json").write_text('{"model_type": "moss_tts_nano"}'), "lacks audio_"),
    "learned positions": (lambda f: rewrite(f, {"position_embedding_type": "absolute"}), "only 'rope'"),
    "another GELU": (lambda f: rewrite(f, {"activation_function": "gelu"}), "only 'gelu_new'"),
    "another architecture": (lambda f: rewrite(f, model_architecture="delay"), "'delay'"),
    "uneven codebooks": (lambda f: rewrite(f, audio_codebook_sizes=[24, 12]), "5 codebooks of 24 codes"),
    "odd heads": (lambda f: rewrite(f, {"n_head": 5}), "5 heads"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_bad_folder_gets_one_line_that_says_what_is_wrong(tied_folder, name):
    breakage, says = BREAKAGES[name]
    breakage(tied_folder)
    with pytest.raises(CheckpointError, match=says) as caught:
        MossTTSNano.load(tied_folder)
    assert "\n" not in str(caught.value)
