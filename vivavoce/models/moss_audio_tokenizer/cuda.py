"""MOSS-Audio-Tokenizer-Nano's decoder for many streams on a GPU: KV ring buffers, steps replayed as CUDA graphs.

Tests hold the sound equal to that of `model.py`. Each stream has a slot in ring buffers for the windows of all layers.
The inputs of a step are slots, positions and codes, so one graph serves all batches of its size: batches are padded to
the next bucket, frames to the next hop. The keys and values of padding frames are overwritten by the next frames of
the stream before they can be read.
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
from vivavoce.nn.cuda_graphs import Graphed, bucket_for
from vivavoce.nn.streaming import attend_within
from vivavoce.nn.vq import ProjectedCodebook, ProjectedResidualVQ

Samples = NDArray[np.float32]
HOPS = (1, 2, 4, 8)  # frames
BATCHES = (1, 2, 4, 8, 16, 32, 64)
NUMBERS = 2  # per stream, before its codes: slot, frames so far


class CodecSlot:
    """A stream's slot in the ring buffers; freed when it is garbage-collected."""

    def __init__(self, free: deque[int]) -> None:
        self.index = free.popleft()
        weakref.finalize(self, free.append, self.index)


@dataclass(frozen=True)
class SlotState:
    """State of one stream. Steps write into its slot, so only the newest state of a stream is valid."""

    slot: CodecSlot
    frames: int = 0


class SlotGraphKey(NamedTuple):
    """The key of a captured step."""

    streams: int
    codebooks: int
    frames: int


class Ring:
    """Key and value windows of one stage's layers for all slots."""

    def __init__(self, stage: CodecStage, slots: int, positions_per_frame: int) -> None:
        config, like = stage.config, stage.input_proj.weight
        self.window, self.positions_per_frame = stage.window, positions_per_frame
        # One hop larger than the window: new positions do not overwrite those that the same step attends to.
        self.size = -(-(stage.window + HOPS[-1] * positions_per_frame) // 8) * 8
        size = (config.num_layers, slots, config.num_heads, self.size, config.d_model // config.num_heads)
        self.keys, self.values = like.new_zeros(size), like.new_zeros(size)

    @staticmethod
    def slot_bytes(stage: CodecStage, positions_per_frame: int) -> int:
        """Bytes of one slot."""
        positions = stage.window + HOPS[-1] * positions_per_frame
        return 2 * stage.config.num_layers * stage.config.d_model * positions * stage.input_proj.weight.itemsize


class RingAttention:
    """Positions, ring columns and mask of a step of some slots."""

    def __init__(self, ring: Ring, slots: Tensor, frames: Tensor, new: int) -> None:
        self.ring, self.slots = ring, slots
        self.positions = frames[:, None] * ring.positions_per_frame + torch.arange(new, device=slots.device)
        self.columns = self.positions % ring.size
        columns = torch.arange(ring.size, device=slots.device)
        last = self.positions[:, -1:]
        stored = last - (last - columns) % ring.size  # position in each column after this step
        distance = self.positions[:, :, None] - stored[:, None]
        hidden = (stored[:, None] < 0) | (distance < 0) | (distance >= ring.window)
        self.bias = torch.zeros(hidden.shape, dtype=ring.keys.dtype, device=slots.device)
        self.bias = self.bias.masked_fill_(hidden, -torch.inf)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write new keys and values and attend to the windows.  # [stream, head, new, head_dim]"""
        keys, values = self.ring.keys[layer], self.ring.values[layer]
        keys[self.slots[:, None], :, self.columns] = key.transpose(1, 2)
        values[self.slots[:, None], :, self.columns] = value.transpose(1, 2)
        return attend_within(query, keys.index_select(0, self.slots), values.index_select(0, self.slots), self.bias)


class SlotDecoder:
    """Batched decoder of many streams. Not thread-safe."""

    def __init__(self, codec: MossAudioTokenizerNano, slots: int) -> None:
        self.codec, self.slots = codec, slots
        self._free = deque(range(slots))
        self._rings = {
            stage: Ring(stage, slots + 1, positions)  # the last slot serves padding rows
            for stage, positions in _stages(codec)
        }
        self._vectors, self._bias = _code_vectors(codec.quantizer)
        self._graphs = Graphed(self._graph_body)

    @staticmethod
    def slot_bytes(codec: MossAudioTokenizerNano) -> int:
        """Bytes of one stream's windows."""
        return sum(Ring.slot_bytes(stage, positions) for stage, positions in _stages(codec))

    def start(self) -> SlotState | None:
        """The state of a new stream; None if every slot is taken."""
        try:  # a check first would race with other threads
            return SlotState(CodecSlot(self._free))
        except IndexError:
            return None

    @torch.inference_mode()
    def warm_up(self, codebooks: int) -> None:
        """Capture all graphs before the first stream."""
        for streams in sorted(BATCHES, reverse=True):  # the largest first: the smaller ones reuse its memory
            for frames in sorted(HOPS, reverse=True):
                shape = SlotGraphKey(streams, codebooks, frames)
                if self._vectors.is_cuda and shape not in self._graphs:
                    self._graphs.capture(shape, [self._packed([], shape).to(self.codec.device)])

    def step(self, state: SlotState, codes: NDArray[np.int64]) -> tuple[Samples, SlotState]:
        """Sound of the next frames.  # [codebook, frame] → [channel, sample]"""
        (sound,), (new_state,) = self.step_batch([state], [codes])
        return sound, new_state

    @torch.inference_mode()
    def step_batch(
        self, states: Sequence[SlotState], codes: Sequence[NDArray[np.int64]]
    ) -> tuple[list[Samples], list[SlotState]]:
        """Step several streams, any number of frames each.  # [codebook, frame] → [channel, sample]"""
        for each in codes:
            self.codec.check_codes(torch.from_numpy(each)[None])
        sounds: list[list[Samples]] = [[] for _ in states]
        done = [0] * len(states)
        while any(each.shape[1] > finished for each, finished in zip(codes, done, strict=True)):
            for shape, members in self._groups(codes, done).items():
                pieces = [codes[index][:, done[index] : done[index] + shape.frames] for index in members]
                rows = [
                    (states[index].slot.index, states[index].frames + done[index], piece)
                    for index, piece in zip(members, pieces, strict=True)
                ]
                for index, sound, piece in zip(members, self._run(rows, shape), pieces, strict=True):
                    sounds[index].append(sound[:, : piece.shape[1] * self.codec.config.frame_samples])
                    done[index] += piece.shape[1]
        new_states = [SlotState(state.slot, state.frames + frames) for state, frames in zip(states, done, strict=True)]
        return [np.concatenate(parts, axis=1) for parts in sounds], new_states

    def _groups(self, codes: Sequence[NDArray[np.int64]], done: Sequence[int]) -> dict[SlotGraphKey, list[int]]:
        """The members of the next batches by graph key."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for index, (each, finished) in enumerate(zip(codes, done, strict=True)):
            if each.shape[1] > finished:
                hop = bucket_for(HOPS, min(each.shape[1] - finished, HOPS[-1]))
                by_shape.setdefault((each.shape[0], hop), []).append(index)
        groups = {}
        for (codebooks, hop), members in by_shape.items():
            batch = members[: BATCHES[-1]]
            groups[SlotGraphKey(bucket_for(BATCHES, len(batch)), codebooks, hop)] = batch
        return groups

    def _run(self, rows: Sequence[tuple[int, int, NDArray[np.int64]]], shape: SlotGraphKey) -> Samples:
        packed = self._packed(rows, shape)
        if self._vectors.is_cuda:
            packed = packed.pin_memory()
        (sound,) = self._graphs(shape, [packed.to(self.codec.device, non_blocking=True)])
        samples: Samples = sound[: len(rows)].cpu().numpy()
        return samples

    def _packed(self, rows: Sequence[tuple[int, int, NDArray[np.int64]]], shape: SlotGraphKey) -> Tensor:
        """One row per stream: slot, frames so far, codes.  # [stream, number]"""
        packed = np.zeros((shape.streams, NUMBERS + shape.codebooks * shape.frames), dtype=np.int64)
        packed[:, 0] = self.slots
        codes = packed[:, NUMBERS:].reshape(shape.streams, shape.codebooks, shape.frames)
        for row, (slot, frames, piece) in enumerate(rows):
            packed[row, :NUMBERS] = slot, frames
            codes[row, :, : piece.shape[1]] = piece
        return torch.from_numpy(packed)

    def _graph_body(self, shape: SlotGraphKey, tensors: Sequence[Tensor]) -> tuple[Tensor]:
        """The captured computation: the sound of a step.  # [stream, channel, sample]"""
        (packed,) = tensors
        slots, frames = packed[:, 0], packed[:, 1]
        books, entries = self._vectors.shape[0] // self._entries, self._entries
        codes = packed[:, NUMBERS:].unflatten(1, (shape.codebooks, shape.frames))
        first = torch.arange(0, books * entries, entries, device=packed.device)[: shape.codebooks, None]
        x = torch.nn.functional.embedding(codes + first, self._vectors).sum(dim=1) + self._bias
        x = x.to(self.codec.dtype)
        for module in self.codec.decoder:
            if isinstance(module, CodecStage):
                step = RingAttention(self._rings[module], slots, frames, x.shape[1])
                x = module.advance(x, step.positions, step)
            else:
                x = module(x)
        return (self.codec.samples_of(x),)

    @property
    def _entries(self) -> int:
        return self.codec.config.quantizer.codebook_size


def _stages(codec: MossAudioTokenizerNano) -> list[tuple[CodecStage, int]]:
    """The decoder's stages with their positions per frame."""
    stages, positions = [], 1
    for module in codec.decoder:
        if isinstance(module, CodecStage):
            stages.append((module, positions))
        elif isinstance(module, Patch):
            positions *= module.size
    return stages


def _code_vectors(quantizer: ProjectedResidualVQ) -> tuple[Tensor, Tensor]:
    """The output vector of every code, and the bias of every frame.  # [book · code, output]"""
    out, bias = quantizer.output_proj.weight[..., 0], quantizer.output_proj.bias
    assert bias is not None
    vectors = [
        book(torch.arange(book.codebook.num_embeddings, device=out.device))
        for book in quantizer.quantizers
        if isinstance(book, ProjectedCodebook)
    ]
    return torch.cat(vectors) @ out.T, bias
