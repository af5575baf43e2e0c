"""Which tiles a Whisper's step is fastest with on this GPU, by how many texts are written at once: tried, and kept.

`python -m vivavoce.bench.asr_tiles --shape large-v2 --texts 1,8` computes a step of random weights as it is, then with
every layer in one launch on tensor cores (`kernels/row_linear.py`), one setting changed at a time. What is
faster and says the same goes to `linear_tiles.json` in `VIVA_CACHE`, where every later step finds it.
"""

import argparse
import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from vivavoce.device import pick
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import read_bandwidth
from vivavoce.kernels import Entries, Tile, keep_tiles, known_tiles, name_around, window_attention_name
from vivavoce.models.whisper.config import SIZES, WhisperTokens
from vivavoce.models.whisper.cuda import single_rows_step
from vivavoce.models.whisper.engine import WhisperWriter
from vivavoce.models.whisper.model import Whisper
from vivavoce.models.whisper.windows import WhisperSettings
from vivavoce.nn.cuda_graphs import GraphCapture, compiling_ahead
from vivavoce.nn.paged_kv import PagedCache, RowBatch

logger = logging.getLogger(__name__)

PAGE = 16
CONTEXT = 64  # tokens each text has
REPLAYS, ROUNDS = 20, 3
FASTER = 0.98  # of the time, that is worth an entry
STEADY = 0.995  # of the time, that is not chance
NEAR = 2e-2  # how far two ways to compute a step in 16 bits may be apart
WINDOWS = (
    Tile(0, 64, 0, 4),
    Tile(0, 256, 0, 8),
    *(Tile(0, 128, stages, 4, parts=parts) for stages in (2, 3) for parts in (2, 3, 4, 6)),
)


def candidates(inputs: int, model_width: int) -> list[Tile]:
    """Tiles of a matrix of so many inputs: its columns in one round, or in several."""
    parts = [(1, 4), (1, 8)] if inputs == model_width else [(1, 16), (2, 8), (4, 4), (4, 8)]
    found = [Tile(16, inputs // rounds, 0, warps) for rounds, warps in parts]
    return [*(replace(tile, early=True) for tile in found), *found]


class StepOfTexts:
    """A step of so many texts on random weights, as a graph, by whatever tiles there are."""

    def __init__(self, model: Whisper, texts: int) -> None:
        config, like = model.config, model.decoder.embed_tokens.weight
        self.model, self.texts, self.device = model, texts, like.device
        tokens = WhisperTokens.of_vocabulary(config.vocab_size)
        self.writer = WhisperWriter(model, tokens, WhisperSettings.of_size(config, tokens), texts)
        store, pages = self.writer.store, -(-(CONTEXT + 1) // PAGE)
        store.keys.normal_()
        store.values.normal_()
        store.lengths.fill_(config.max_source_positions)
        cache = PagedCache.allocate(self.writer.kv_shape, texts * pages, PAGE, like.dtype, self.device)
        cache.keys.normal_()
        cache.values.normal_()
        counted = torch.arange(texts * pages, dtype=torch.int32, device=self.device)
        positions = torch.full((texts,), CONTEXT, dtype=torch.int32, device=self.device)
        self.batch = RowBatch(cache, counted.view(texts, pages), counted[:texts], positions, texts, ())
        self.rows = torch.randn(texts, config.d_model, device=self.device, dtype=like.dtype)
        self.windows = 1 + counted[:texts]

    def __call__(self) -> Tensor:
        """What the rows' texts may go on with.  # [row, vocabulary]"""
        decoder, writer = self.model.decoder, self.writer
        look = writer.looking(self.windows)
        return writer.logits(single_rows_step(decoder, writer.packed, self.rows, self.batch, look))

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of all matrices, as they are multiplied one after another."""
        config = self.model.config
        width, inner = config.d_model, config.decoder_ffn_dim
        return [(3 * width, width), (width, width), (inner, width), (width, inner), (config.vocab_size, width)]

    def milliseconds(self) -> tuple[float, Tensor]:
        """Of a replay, and what it says."""
        graph, made = GraphCapture(self.device)(self)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        took = []
        for _ in range(ROUNDS):
            graph.replay()
            begun.record()
            for _ in range(REPLAYS):
                graph.replay()
            ended.record()
            ended.synchronize()
            took.append(begun.elapsed_time(ended) / REPLAYS)
        return min(took), made.float().clone()


class TileSearch:
    """The best entries for a step, one changed at a time; those of the device meanwhile are what is tried."""

    def __init__(self, step: StepOfTexts) -> None:
        self.step, self.entries = step, known_tiles(step.device)
        with self.trying(dict.fromkeys(self.names())):
            self.plain_ms, self.plain = step.milliseconds()
        self.best_ms, self.best = self.plain_ms, Entries()

    def names(self) -> list[str]:
        """Of all entries that the step may ask for."""
        dtype, texts = self.step.rows.dtype, self.step.texts
        return [*(name_around(dtype, *shape, texts) for shape in self.step.shapes), self.window_name]

    @functools.cached_property
    def window_name(self) -> str:
        """Of the entry of attention to windows."""
        config = self.step.model.config
        heads = config.decoder_attention_heads
        return window_attention_name(self.step.texts, heads, config.d_model // heads)

    @contextmanager
    def trying(self, entries: Entries) -> Iterator[None]:
        """Within, the step finds these."""
        before = dict(self.entries)
        self.entries.update(entries)
        try:
            yield
        finally:
            self.entries.clear()
            self.entries.update(before)

    def rounds(self) -> Iterator[list[Entries]]:
        """Settings of which the best is to be found: first all layers, then matrix by matrix, then the windows."""
        dtype, texts, shapes = self.step.rows.dtype, self.step.texts, self.step.shapes
        width = self.step.model.config.d_model
        named = {name_around(dtype, *shape, texts): candidates(shape[1], width) for shape in shapes[:-1]}
        yield [{name: some[0] for name, some in named.items()}, {name: some[-1] for name, some in named.items()}]
        for name, some in named.items():
            yield [{name: tile} for tile in some]
        yield [{name_around(dtype, *shapes[-1], texts): tile} for tile in candidates(width, width)]
        yield [{self.window_name: tile} for tile in WINDOWS]

    def compile_all(self) -> None:
        """Have every kernel ready, many being compiled at a time."""
        every = [each for some in self.rounds() for each in some]
        base = every[0]  # more texts than four are multiplied here only if all matrices have their tile
        try:
            with compiling_ahead() as is_ahead:
                for entries in every if is_ahead else ():
                    with self.trying(base | entries):
                        self.step()
        except Exception as error:  # it will fail again when it is tried
            logger.debug("compiling ahead failed", exc_info=True)
            print(f"  compiling ahead: {type(error).__name__} {str(error)[:120]}", flush=True)

    def run(self) -> None:
        """Try everything."""
        for some in self.rounds():
            for entries in some:
                self._try(entries)

    def _try(self, entries: Entries) -> None:
        tried = self.best | entries
        told = ", ".join(f"{name}: {_short(tile)}" for name, tile in entries.items())
        try:
            with self.trying(tried):
                took, made = self.step.milliseconds()
        except Exception as error:  # too much shared memory, or a compiler that cannot: another one will do
            logger.debug("%s failed", told, exc_info=True)
            print(f"  {self.step.texts} texts: {told} failed: {type(error).__name__} {str(error)[:120]}", flush=True)
            return
        off = float((made - self.plain).norm() / self.plain.norm())
        is_better = took < STEADY * self.best_ms and off < NEAR
        print(f"  {self.step.texts} texts: {took:.3f} ms{' *' if is_better else ''} ({off:.0e} off) {told}", flush=True)
        if is_better:
            self.best_ms, self.best = took, tried

    def found(self) -> Entries:
        """What is worth keeping."""
        return self.best if self.best_ms < FASTER * self.plain_ms else {}


def _short(tile: Tile | None) -> str:
    return "-" if tile is None else f"{tile.inputs}x{tile.warps}" + "e" * tile.early + f"/{tile.stages}.{tile.parts}"


@torch.inference_mode()
def run(shape: str = "large-v2", texts: Sequence[int] = (8, 1), device: str = "auto", keeps: bool = True) -> Entries:
    """Search for every number of texts, print, and keep what was found."""
    place = pick(device)
    if place.kind != "cuda":
        raise InputError(f"tiles are those of a GPU's kernels, and {place.name} is none; ask for --device cuda")
    bandwidth = read_bandwidth(place)
    model = Whisper.random(SIZES[shape], place.torch_device, torch.bfloat16)
    found: Entries = {}
    for count in texts:
        search = TileSearch(StepOfTexts(model, count))
        floor = bytes_of(search.step) / bandwidth * 1e3
        print(
            f"{count} texts: {search.plain_ms:.3f} ms as it is, {search.plain_ms / floor:.2f} x {floor:.3f}", flush=True
        )
        search.compile_all()
        search.run()
        print(f"{count} texts: best {search.best_ms:.3f} ms, {search.best_ms / floor:.2f} x the floor", flush=True)
        found |= search.found()
    for name, tile in found.items():
        print(f'        "{name}": {tile},', flush=True)
    if keeps and found:
        print(f"kept in {keep_tiles(place.name, found)}", flush=True)
    return found


def bytes_of(step: StepOfTexts) -> int:
    """What a step reads: matrices, and the memory of every text's window."""
    like, config = step.rows, step.model.config
    attention = 6 * config.d_model**2 + 2 * config.d_model * config.decoder_ffn_dim  # packed, both outputs, the query
    weights = config.decoder_layers * attention + config.vocab_size * config.d_model
    row = step.writer.kv_shape.bytes_per_row(like.dtype)
    return weights * like.element_size() + step.texts * row * (config.max_source_positions + CONTEXT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="large-v2", choices=sorted(SIZES))
    parser.add_argument("--texts", default="8,1")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    run(asked.shape, [int(each) for each in asked.texts.split(",")], asked.device)
