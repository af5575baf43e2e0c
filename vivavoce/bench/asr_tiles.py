"""Autotuning of the tiles of a Whisper decoder step on this GPU, by batch size.

`python -m vivavoce.bench.asr_tiles --shape large-v2 --texts 1,8` times a step of random weights with the library's
kernels, then with every layer in one tensor-core launch (`kernels/row_linear.py`), changing one setting at a time.
Faster tiles with the same output are stored in `linear_tiles.json` in `VIVA_CACHE`, which later runs load.
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
from vivavoce.kernels import Entries, Tile, known_tiles, name_around, store_tiles, window_attention_name
from vivavoce.models.whisper.config import SIZES, WhisperSettings, WhisperTokens
from vivavoce.models.whisper.cuda import single_rows_step
from vivavoce.models.whisper.engine import WhisperWriter
from vivavoce.models.whisper.model import Whisper
from vivavoce.nn.cuda_graphs import GraphCapture, compiling_ahead
from vivavoce.nn.paged_kv import PagedCache, RowBatch

logger = logging.getLogger(__name__)

PAGE = 16
CONTEXT = 64  # tokens of each text
REPLAYS, ROUNDS = 20, 3
FASTER = 0.98  # share of the library's time below which tiles are stored
STEADY = 0.995  # share of the best time below which a difference is not noise
NEAR = 2e-2  # relative difference allowed between two 16-bit implementations
WINDOWS = (
    Tile(0, 64, 0, 4),
    Tile(0, 256, 0, 8),
    *(Tile(0, 128, stages, 4, parts=parts) for stages in (2, 3) for parts in (2, 3, 4, 6)),
)


def candidates(inputs: int, model_width: int) -> list[Tile]:
    """Candidate tiles for a matrix: all input columns in one iteration, or in several."""
    parts = [(1, 4), (1, 8)] if inputs == model_width else [(1, 16), (2, 8), (4, 4), (4, 8)]
    found = [Tile(16, inputs // rounds, 0, warps) for rounds, warps in parts]
    return [*(replace(tile, early=True) for tile in found), *found]


class StepOfTexts:
    """A captured decoder step of `texts` sequences on random weights, with the tiles currently registered."""

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
        """Logits.  # [row, vocabulary]"""
        decoder, writer = self.model.decoder, self.writer
        look = writer.cross_attention(self.windows)
        return writer.logits(single_rows_step(decoder, writer.packed, self.rows, self.batch, look))

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of all matrices, in order of use."""
        config = self.model.config
        width, inner = config.d_model, config.decoder_ffn_dim
        return [(3 * width, width), (width, width), (inner, width), (width, inner), (config.vocab_size, width)]

    def milliseconds(self) -> tuple[float, Tensor]:
        """Time of a graph replay, and its output."""
        graph, output = GraphCapture(self.device)(self)
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        elapsed = []
        for _ in range(ROUNDS):
            graph.replay()
            started.record()
            for _ in range(REPLAYS):
                graph.replay()
            ended.record()
            ended.synchronize()
            elapsed.append(started.elapsed_time(ended) / REPLAYS)
        return min(elapsed), output.float().clone()


class TileSearch:
    """Coordinate search over tile entries; the candidate is registered for the device while it is timed."""

    def __init__(self, step: StepOfTexts) -> None:
        self.step, self.entries = step, known_tiles(step.device)
        with self.trying(dict.fromkeys(self.names())):
            self.plain_ms, self.plain = step.milliseconds()
        self.best_ms, self.best = self.plain_ms, Entries()

    def names(self) -> list[str]:
        """Names of all entries that the step looks up."""
        dtype, texts = self.step.rows.dtype, self.step.texts
        return [*(name_around(dtype, *shape, texts) for shape in self.step.shapes), self.window_name]

    @functools.cached_property
    def window_name(self) -> str:
        """Name of the cross-attention entry."""
        config = self.step.model.config
        heads = config.decoder_attention_heads
        return window_attention_name(self.step.texts, heads, config.d_model // heads)

    @contextmanager
    def trying(self, entries: Entries) -> Iterator[None]:
        """Register these entries for the duration of the block."""
        before = dict(self.entries)
        self.entries.update(entries)
        try:
            yield
        finally:
            self.entries.clear()
            self.entries.update(before)

    def rounds(self) -> Iterator[list[Entries]]:
        """Groups of candidates: first all layers together, then each matrix, then cross-attention."""
        dtype, texts, shapes = self.step.rows.dtype, self.step.texts, self.step.shapes
        width = self.step.model.config.d_model
        named = {name_around(dtype, *shape, texts): candidates(shape[1], width) for shape in shapes[:-1]}
        yield [{name: some[0] for name, some in named.items()}, {name: some[-1] for name, some in named.items()}]
        for name, some in named.items():
            yield [{name: tile} for tile in some]
        yield [{name_around(dtype, *shapes[-1], texts): tile} for tile in candidates(width, width)]
        yield [{self.window_name: tile} for tile in WINDOWS]

    def compile_all(self) -> None:
        """Compile every kernel in parallel before timing."""
        every = [each for some in self.rounds() for each in some]
        base = every[0]  # above four texts these kernels run only if every matrix has a tile
        try:
            with compiling_ahead() as is_ahead:
                for entries in every if is_ahead else ():
                    with self.trying(base | entries):
                        self.step()
        except Exception as error:  # timing it will report the failure again
            logger.debug("compiling ahead failed", exc_info=True)
            print(f"  compiling ahead: {type(error).__name__} {str(error)[:120]}", flush=True)

    def run(self) -> None:
        for some in self.rounds():
            for entries in some:
                self._try(entries)

    def _try(self, entries: Entries) -> None:
        tried = self.best | entries
        description = ", ".join(f"{name}: {_short(tile)}" for name, tile in entries.items())
        try:
            with self.trying(tried):
                elapsed, output = self.step.milliseconds()
        except Exception as error:  # too much shared memory, or a compiler error: skip this candidate
            logger.debug("%s failed", description, exc_info=True)
            print(
                f"  {self.step.texts} texts: {description} failed: {type(error).__name__} {str(error)[:120]}",
                flush=True,
            )
            return
        off = float((output - self.plain).norm() / self.plain.norm())
        is_better = elapsed < STEADY * self.best_ms and off < NEAR
        print(
            f"  {self.step.texts} texts: {elapsed:.3f} ms{' *' if is_better else ''} ({off:.0e} off) {description}",
            flush=True,
        )
        if is_better:
            self.best_ms, self.best = elapsed, tried

    def found(self) -> Entries:
        """The best entries, if they are clearly faster than the library."""
        return self.best if self.best_ms < FASTER * self.plain_ms else {}


def _short(tile: Tile | None) -> str:
    return "-" if tile is None else f"{tile.inputs}x{tile.warps}" + "e" * tile.early + f"/{tile.stages}.{tile.parts}"


@torch.inference_mode()
def run(shape: str = "large-v2", texts: Sequence[int] = (8, 1), device: str = "auto", store: bool = True) -> Entries:
    """Search for every batch size, print, and store the result."""
    target = pick(device)
    if target.kind != "cuda":
        raise InputError(f"tiles belong to GPU kernels, and {target.name} is not a GPU; use --device cuda")
    bandwidth = read_bandwidth(target)
    model = Whisper.random(SIZES[shape], target.torch_device, torch.bfloat16)
    found: Entries = {}
    for count in texts:
        search = TileSearch(StepOfTexts(model, count))
        floor = bytes_read(search.step) / bandwidth * 1e3
        print(
            f"{count} texts: {search.plain_ms:.3f} ms by the library, {search.plain_ms / floor:.2f} x {floor:.3f}",
            flush=True,
        )
        search.compile_all()
        search.run()
        print(f"{count} texts: best {search.best_ms:.3f} ms, {search.best_ms / floor:.2f} x the floor", flush=True)
        found |= search.found()
    for name, tile in found.items():
        print(f'        "{name}": {tile},', flush=True)
    if store and found:
        print(f"stored in {store_tiles(target.name, found)}", flush=True)
    return found


def bytes_read(step: StepOfTexts) -> int:
    """Bytes a step reads: matrices, and the cross-attention keys and values of every text."""
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
