"""On a GPU: the kernels of Whisper's step agree with their PyTorch references, and texts are those of the CPU."""

import sys

import pytest
import torch
from torch.nn import functional

from tests.models.test_whisper_engine import CONFIG, SETTINGS, TOKENS, windows_of
from vivavoce import kernels
from vivavoce.device import pick
from vivavoce.engine.drafts import EarlierHypothesis
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.engine.speculative import Speculation
from vivavoce.kernels.tiles import CACHE_VARIABLE, name_around, store_tiles, tiles
from vivavoce.models.whisper.cuda import WindowEncoder
from vivavoce.models.whisper.engine import BEFORE_IS_TIME, BEGUN, LAST_IS_TIME, LATEST_SHIFT, WhisperWriter
from vivavoce.models.whisper.model import Whisper
from vivavoce.nn.paged_kv import KVShape, PagedCache, RowBatch

pytestmark = pytest.mark.gpu
HEADS, DIM = 2, 64


def pages_on_gpu(rows: int) -> RowBatch:
    """Rows of three sequences at rising positions, in a cache full of noise."""
    cache = PagedCache.allocate(KVShape(2, HEADS, DIM), 31, 4, torch.float32, torch.device("cuda"))
    cache.keys.normal_()
    cache.values.normal_()
    table = torch.arange(1, 31, dtype=torch.int32, device="cuda").view(3, 10)
    slots = torch.tensor([row % 3 for row in range(rows)], dtype=torch.int32, device="cuda")
    positions = torch.tensor([2 + row for row in range(rows)], dtype=torch.int32, device="cuda")
    return RowBatch(cache, table, slots, positions, rows, ())


@pytest.mark.parametrize("enough", [2, 40, 512])  # programs: one a row and head, several, and those of short shares
@pytest.mark.parametrize("numbers", [[1], [1, 2, 3], [1] * 8 + [2] * 8 + [3] * 3 + [0] * 2, [3] * 20])
def test_rows_find_in_their_windows_what_attention_finds(numbers, enough, monkeypatch):
    monkeypatch.setattr(sys.modules["vivavoce.kernels.window_attention"], "ENOUGH", enough)
    torch.manual_seed(0)
    keys, values = torch.randn(2, 4, HEADS, 300, DIM, device="cuda")
    lengths = torch.tensor([1, 300, 129, 40], dtype=torch.int32, device="cuda")
    queries = torch.randn(len(numbers), HEADS, DIM, device="cuda")
    arrived = torch.zeros(64 * HEADS, dtype=torch.int32, device="cuda")
    windows = torch.tensor(numbers, dtype=torch.int32, device="cuda")
    for _ in range(2):  # the counters are left as they were found
        found = kernels.window_attention(queries, keys, values, windows, lengths, arrived)
    for row, number in enumerate(numbers):
        held = (number, slice(None), slice(int(lengths[number])))
        plain = functional.scaled_dot_product_attention(queries[row][:, None], keys[held], values[held])[:, 0]
        torch.testing.assert_close(found[row], plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize(("inputs", "outputs"), [(1280, 1280), (128, 200), (5120, 1280)])
def test_a_few_rows_are_multiplied_as_by_the_plain_layers(rows, inputs, outputs):
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(inputs, device="cuda").requires_grad_(False)
    norm.weight.normal_()
    norm.bias.normal_()
    weight, bias = 0.1 * torch.randn(outputs, inputs, device="cuda"), torch.randn(outputs, device="cuda")
    x, residual = torch.randn(rows, inputs, device="cuda"), torch.randn(rows, outputs, device="cuda")
    around = None if inputs > 2048 else (norm.weight, norm.bias, norm.eps)
    made = kernels.row_linear(x, weight, bias, around, True, residual)
    plain = functional.gelu(functional.linear(x.double() if around is None else norm(x).double(),
                                              weight.double(), bias.double())) + residual  # fmt: skip
    torch.testing.assert_close(made, plain.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("rows", [1, 5, 8, 12])
@pytest.mark.parametrize(
    ("inputs", "outputs", "tile"),
    [
        (1280, 1290, kernels.Tile(16, 1280, 0, 4, early=True)),
        (1024, 64, kernels.Tile(16, 1024, 0, 8)),
        (5120, 48, kernels.Tile(16, 1280, 0, 4)),
        (5120, 48, kernels.Tile(16, 2560, 0, 8, early=True)),
    ],
)
def test_rows_in_tiles_are_multiplied_as_by_the_plain_layers(rows, inputs, outputs, tile, dtype, error):
    torch.manual_seed(0)
    if dtype == torch.float32 and tile.inputs > 1024:
        tile = kernels.Tile(16, tile.inputs // 4, 0, 4)  # twice the bytes, which shared memory has no room for
    given = [torch.randn(*size, device="cuda").to(dtype) for size in [(rows, inputs), (outputs, inputs), (outputs,)]]
    (x, weight, bias), residual = given, torch.randn(rows, outputs, device="cuda").to(dtype)
    scale, shift = torch.randn(2, inputs, device="cuda").to(dtype)
    norm = (scale, shift, 1e-5) if tile.inputs == inputs else None
    made = kernels.row_tile_linear(x, weight / inputs**0.5, bias, tile, norm, True, residual, following=weight)
    wide = functional.layer_norm(x.double(), (inputs,), scale.double(), shift.double(), 1e-5) if norm else x.double()
    plain = functional.linear(wide, (weight / inputs**0.5).double(), bias.double())
    plain = functional.gelu(plain) + residual.double()
    assert (made.double() - plain).norm() / plain.norm() < error


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 12])
def test_keys_and_values_go_to_their_pages_and_are_found_there(rows, tiled):
    torch.manual_seed(0)
    batch, reference = pages_on_gpu(rows), pages_on_gpu(rows)
    reference.cache.keys.copy_(batch.cache.keys)
    reference.cache.values.copy_(batch.cache.values)
    width = HEADS * DIM
    x, weight = torch.randn(rows, width, device="cuda"), 0.1 * torch.randn(3 * width, width, device="cuda")
    packed = functional.linear(x, weight)
    query, key, value = packed.view(rows, 3, HEADS, DIM).unbind(1)
    if tiled:
        pages = kernels.Pages(batch, 1)
        queries = kernels.row_tile_linear(x, weight, None, kernels.Tile(16, width, 0, 4), pages=pages).view(
            rows, HEADS, DIM
        )
    elif rows <= kernels.MAX_UNTILED_ROWS:
        queries = kernels.row_linear(x, weight, None, pages=kernels.Pages(batch, 1)).view(rows, HEADS, DIM)
    else:
        kernels.store_rows(packed, 1, batch)
        queries = query
    reference.write(1, key, value)
    for mine, plain in (
        (queries, query),
        (batch.cache.keys, reference.cache.keys),
        (batch.cache.values, reference.cache.values),
    ):
        torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-3)
    found = kernels.page_attention(queries, 1, batch)
    for row in range(rows):
        length = int(batch.positions[row]) + 1
        pages = batch.page_table[batch.slots[row]].long()
        held = [one[1, pages].flatten(0, 1)[:length].transpose(0, 1) for one in (batch.cache.keys, batch.cache.values)]
        plain = functional.scaled_dot_product_attention(queries[row][:, None], *held)[:, 0]
        torch.testing.assert_close(found[row], plain, rtol=1e-3, atol=1e-3)


def test_sums_are_normed_as_by_the_plain_layer():
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(1280, device="cuda").requires_grad_(False)
    norm.weight.normal_()
    norm.bias.normal_()
    x, added = torch.randn(2, 5, 1280, device="cuda")
    total, normed = kernels.add_layer_norm(x, added, (norm.weight, norm.bias, norm.eps))
    torch.testing.assert_close(total, x + added)
    torch.testing.assert_close(normed, norm(x + added), rtol=1e-4, atol=1e-4)
    alone, normed = kernels.add_layer_norm(x, None, (norm.weight, norm.bias, norm.eps))
    assert alone is x
    torch.testing.assert_close(normed, norm(x), rtol=1e-4, atol=1e-4)


def test_the_rules_of_a_transcript_are_the_plain_ones():
    model = Whisper.random(CONFIG, seed=1)
    on_gpu, plain = (WhisperWriter(model.to(device), TOKENS, SETTINGS, 3) for device in ("cuda", "cpu"))
    kinds = [0, LAST_IS_TIME, BEFORE_IS_TIME, LAST_IS_TIME | BEFORE_IS_TIME]
    modes = [times | BEGUN * begun | kind | latest << LATEST_SHIFT
             for times in (0, 1) for begun in (0, 1) for kind in kinds for latest in (0, 1, 17, 60)]  # fmt: skip
    logits = torch.randn(len(modes), CONFIG.vocab_size, generator=torch.Generator().manual_seed(0))
    logits[::3, TOKENS.timestamps :] += 4
    wanted = plain.ruled(logits, torch.tensor(modes))
    assert torch.equal(on_gpu.ruled(logits.cuda(), torch.tensor(modes).cuda()).cpu(), wanted)


@torch.inference_mode()
def test_windows_of_any_length_are_encoded_the_same_when_they_come_again():
    model = Whisper.random(CONFIG, seed=1).cuda()
    encode, frames = WindowEncoder(model.encoder), CONFIG.window_frames
    for length in (frames, frames // 2, frames // 4) * 3:
        mel = torch.randn(1, CONFIG.num_mel_bins, length, device="cuda")
        torch.testing.assert_close(encode(mel), model.encoder(mel), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, 0, 1.0)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
def test_texts_of_the_gpu_are_those_of_the_cpu_with_and_without_drafts(
    sampling, timestamps, tiled, tmp_path, monkeypatch
):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    shapes = [(96, 32), (32, 32), (64, 32), (32, 64), (CONFIG.vocab_size, 32)]
    if tiled:
        found = {name_around(torch.float32, *shape, rows): kernels.Tile(16, shape[1], 0, 2, early=True)
                 for shape in shapes for rows in (1, 2, 4, 8, 16)}  # fmt: skip
        store_tiles(torch.cuda.get_device_name(), found)
    tiles.cache_clear()

    def texts(device: str, drafts=None):
        model = Whisper.random(CONFIG, seed=1)
        model.decoder.embed_positions.weight.normal_(generator=torch.Generator().manual_seed(0))
        memory = windows_of(model, 5)
        model = model.to(device)
        writer = WhisperWriter(model, TOKENS, SETTINGS, 5)
        limits = EngineLimits(page_size=4, cache_rows=512, rows_per_step=64, sequences_per_step=8)
        engine = Engine(writer, pick(device), torch.float32, limits)
        memory = type(memory)(memory.keys.to(device), memory.values.to(device))
        prompt = TOKENS.prompt("en", timestamps=timestamps)
        sequences = []
        for seed, window in enumerate(writer.store.hold(memory)):
            sequences.append(engine.open(writer.prompt(window, prompt, timestamps)))
            guesses = None if drafts is None else Speculation(EarlierHypothesis(drafts[seed]), 6)
            generation = Generation(sampling, max_new_rows=20, seed=seed)
            engine.generate(sequences[-1], generation, speculation=guesses)
        while engine.has_work:
            engine.step()
        return [sequence.rows[len(prompt) :] for sequence in sequences]

    torch.backends.cuda.matmul.allow_tf32 = False
    wanted = texts("cpu")
    assert texts("cuda") == wanted
    assert texts("cuda", [text[:5] + text[6:] for text in wanted]) == wanted
    tiles.cache_clear()
