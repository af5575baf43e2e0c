"""MOSS-Audio-Tokenizer-Nano's decoder for many streams on a GPU: windows in slots, steps replayed as CUDA graphs.

A stream has a slot of its own in rings that hold every layer's window. A step is given slots, positions and codes and
nothing else, so one graph serves all batches of its size: batches are filled up to the next bucket, frames up to the
next hop. What is written behind a stream's last frame by that is overwritten by its next ones before anybody sees it.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivavoce.models.moss_audio_tokenizer.model import CodecStage, MossAudioTokenizerNano, Patch
from vivavoce.nn.cuda_graphs import Graphed
from vivavoce.nn.streaming import attend_within
from vivavoce.nn.vq import ProjectedCodebook, ProjectedResidualVQ

Samples = NDArray[np.float32]
HOPS = (1, 2, 4, 8)  # frames
BATCHES = (1, 2, 4, 8, 16, 32, 64)
NUMBERS = 2  # before the codes of a stream: its slot and its frames so far


class CodecSlot:
    """A stream's place in the rings; free again when nobody holds it any more."""

    def __init__(self, free: deque[int]) -> None:
        self.index = free.popleft()
        weakref.finalize(self, free.append, self.index)


@dataclass(frozen=True)
class SlotState:
    """Where one stream stands. Steps write into its slot, so only the newest state of a stream can go on."""

    slot: CodecSlot
    frames: int = 0


class RingShape(NamedTuple):
    """What must be equal for two steps to replay the same graph."""

    streams: int
    codebooks: int
    frames: int


class Ring:
    """The windows of one stage's layers for all slots."""

    def __init__(self, stage: CodecStage, slots: int, positions_a_frame: int) -> None:
        config, like = stage.config, stage.input_proj.weight
        self.window, self.positions_a_frame = stage.window, positions_a_frame
        # With a hop more than the window, new positions never take the place of what the same step still sees.
        self.size = -(-(stage.window + HOPS[-1] * positions_a_frame) // 8) * 8
        size = (config.num_layers, slots, config.num_heads, self.size, config.d_model // config.num_heads)
        self.keys, self.values = like.new_zeros(size), like.new_zeros(size)

    @staticmethod
    def slot_bytes(stage: CodecStage, positions_a_frame: int) -> int:
        """What a slot takes."""
        positions = stage.window + HOPS[-1] * positions_a_frame
        return 2 * stage.config.num_layers * stage.config.d_model * positions * stage.input_proj.weight.itemsize


class RingStep:
    """The next positions of some slots, as a stage sees them."""

    def __init__(self, ring: Ring, slots: Tensor, frames: Tensor, new: int) -> None:
        self.ring, self.slots = ring, slots
        self.positions = frames[:, None] * ring.positions_a_frame + torch.arange(new, device=slots.device)
        self.places = self.positions % ring.size
        columns = torch.arange(ring.size, device=slots.device)
        last = self.positions[:, -1:]
        held = last - (last - columns) % ring.size  # the position that each column holds once all new ones are there
        behind = self.positions[:, :, None] - held[:, None]
        hidden = (held[:, None] < 0) | (behind < 0) | (behind >= ring.window)
        self.bias = torch.zeros(hidden.shape, dtype=ring.keys.dtype, device=slots.device)
        self.bias = self.bias.masked_fill_(hidden, -torch.inf)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the new keys and values, and look at the windows.  # [stream, head, new, head_dim]"""
        keys, values = self.ring.keys[layer], self.ring.values[layer]
        keys[self.slots[:, None], :, self.places] = key.transpose(1, 2)
        values[self.slots[:, None], :, self.places] = value.transpose(1, 2)
        return attend_within(query, keys.index_select(0, self.slots), values.index_select(0, self.slots), self.bias)


class SlotDecoder:
    """Decodes many streams, as many of them in one pass as wait. One thread at a time may use it."""

    def __init__(self, codec: MossAudioTokenizerNano, slots: int) -> None:
        self.codec, self.slots = codec, slots
        self._free = deque(range(slots))
        self._rings = {
            stage: Ring(stage, slots + 1, positions)  # the last slot is for what fills up a batch
            for stage, positions in _stages(codec)
        }
        self._vectors, self._bias = _summands(codec.quantizer)
        self._graphs = Graphed(self._replayed)

    @staticmethod
    def slot_bytes(codec: MossAudioTokenizerNano) -> int:
        """What a stream's windows take."""
        return sum(Ring.slot_bytes(stage, positions) for stage, positions in _stages(codec))

    def start(self) -> SlotState | None:
        """A stream before its first frame; None where every slot is taken."""
        try:  # asking first would leave time for somebody else to take the last one
            return SlotState(CodecSlot(self._free))
        except IndexError:
            return None

    @torch.inference_mode()
    def warm_up(self, codebooks: int) -> None:
        """Capture every step now: later, somebody would wait for it."""
        for streams in sorted(BATCHES, reverse=True):  # the largest first: the smaller ones reuse its memory
            for frames in sorted(HOPS, reverse=True):
                shape = RingShape(streams, codebooks, frames)
                if self._vectors.is_cuda and shape not in self._graphs:
                    self._graphs.capture(shape, [self._packed([], shape).to(self.codec.device)])

    @torch.inference_mode()
    def step_batch(
        self, states: Sequence[SlotState], codes: Sequence[NDArray[np.int64]]
    ) -> tuple[list[Samples], list[SlotState]]:
        """The next frames of several streams, however many each has.  # [codebook, frame] → [channel, sample]"""
        for each in codes:
            self.codec.check_codes(torch.from_numpy(each)[None])
        sounds: list[list[Samples]] = [[] for _ in states]
        done = [0] * len(states)
        while any(each.shape[1] > begun for each, begun in zip(codes, done, strict=True)):
            for shape, members in self._groups(codes, done).items():
                pieces = [codes[index][:, done[index] : done[index] + shape.frames] for index in members]
                order = [
                    (states[index].slot.index, states[index].frames + done[index], piece)
                    for index, piece in zip(members, pieces, strict=True)
                ]
                for index, sound, piece in zip(members, self._run(order, shape), pieces, strict=True):
                    sounds[index].append(sound[:, : piece.shape[1] * self.codec.config.frame_samples])
                    done[index] += piece.shape[1]
        after = [SlotState(state.slot, state.frames + frames) for state, frames in zip(states, done, strict=True)]
        return [np.concatenate(parts, axis=1) for parts in sounds], after

    def _groups(self, codes: Sequence[NDArray[np.int64]], done: Sequence[int]) -> dict[RingShape, list[int]]:
        """Who goes through which graph next."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for index, (each, begun) in enumerate(zip(codes, done, strict=True)):
            if each.shape[1] > begun:
                hop = _next_of(HOPS, min(each.shape[1] - begun, HOPS[-1]))
                by_shape.setdefault((each.shape[0], hop), []).append(index)
        groups = {}
        for (codebooks, hop), members in by_shape.items():
            some = members[: BATCHES[-1]]
            groups[RingShape(_next_of(BATCHES, len(some)), codebooks, hop)] = some
        return groups

    def _run(self, order: Sequence[tuple[int, int, NDArray[np.int64]]], shape: RingShape) -> Samples:
        packed = self._packed(order, shape)
        if self._vectors.is_cuda:
            packed = packed.pin_memory()
        (sound,) = self._graphs(shape, [packed.to(self.codec.device, non_blocking=True)])
        made: Samples = sound[: len(order)].cpu().numpy()
        return made

    def _packed(self, order: Sequence[tuple[int, int, NDArray[np.int64]]], shape: RingShape) -> Tensor:
        """A stream a row: its slot, the frames before, the codes.  # [stream, number]"""
        packed = np.zeros((shape.streams, NUMBERS + shape.codebooks * shape.frames), dtype=np.int64)
        packed[:, 0] = self.slots
        codes = packed[:, NUMBERS:].reshape(shape.streams, shape.codebooks, shape.frames)
        for row, (slot, frames, piece) in enumerate(order):
            packed[row, :NUMBERS] = slot, frames
            codes[row, :, : piece.shape[1]] = piece
        return torch.from_numpy(packed)

    def _replayed(self, shape: RingShape, tensors: Sequence[Tensor]) -> tuple[Tensor]:
        """The sound of a step: what the graph holds.  # [stream, channel, sample]"""
        (packed,) = tensors
        slots, frames = packed[:, 0], packed[:, 1]
        books, entries = self._vectors.shape[0] // self._entries, self._entries
        codes = packed[:, NUMBERS:].unflatten(1, (shape.codebooks, shape.frames))
        first = torch.arange(0, books * entries, entries, device=packed.device)[: shape.codebooks, None]
        x = torch.nn.functional.embedding(codes + first, self._vectors).sum(dim=1) + self._bias
        x = x.to(self.codec.dtype)
        for module in self.codec.decoder:
            if isinstance(module, CodecStage):
                step = RingStep(self._rings[module], slots, frames, x.shape[1])
                x = module.advance(x, step.positions, step)
            else:
                x = module(x)
        return (self.codec.samples_of(x),)

    @property
    def _entries(self) -> int:
        return self.codec.config.quantizer.codebook_size


def _stages(codec: MossAudioTokenizerNano) -> list[tuple[CodecStage, int]]:
    """The decoder's stages, with how many positions each has in a frame."""
    stages, positions = [], 1
    for module in codec.decoder:
        if isinstance(module, CodecStage):
            stages.append((module, positions))
        elif isinstance(module, Patch):
            positions *= module.size
    return stages


def _summands(quantizer: ProjectedResidualVQ) -> tuple[Tensor, Tensor]:
    """What each code of each codebook adds to a frame, and what every frame has besides.  # [book · code, output]"""
    out, bias = quantizer.output_proj.weight[..., 0], quantizer.output_proj.bias
    assert bias is not None
    vectors = [
        book(torch.arange(book.codebook.num_embeddings, device=out.device))
        for book in quantizer.quantizers
        if isinstance(book, ProjectedCodebook)
    ]
    return torch.cat(vectors) @ out.T, bias


def _next_of(sizes: Sequence[int], least: int) -> int:
    return next(size for size in sizes if size >= least)
