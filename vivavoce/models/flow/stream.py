"""Streaming for flow decoders: voices, states, steps, batches and the left attention window.

Offline, a decoder attends to all positions, or under the chunk mask of its streaming weights. A stream decodes a chunk
as soon as its look-ahead codes have arrived and caches keys, values and convolution contexts per Euler step, guidance
row and layer, so that the cost of a step does not grow with the reply. A stream equals `forward(…, streaming=True)`
with the same left window.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.errors import CapacityError, InputError
from vivavoce.models.checkpoint import Checkpoint, load_weights
from vivavoce.models.flow.estimator import MAX_FRAMES, FlowMatching
from vivavoce.models.flow.state import (
    EncoderSizes,
    EstimatorSizes,
    FlowAddresses,
    FlowCache,
    FlowPass,
    FlowState,
    FlowVoice,
    Pasts,
    VoicePrompt,
    addressable,
    addressed_pasts,
)
from vivavoce.nn.attention import KeySpan, visible_slots
from vivavoce.nn.modules import allocating
from vivavoce.nn.streaming import Past, Silence, StreamPast

TRAINING_LEFTOVERS = ("epoch", "step")


@dataclass(frozen=True, kw_only=True)
class FlowSizes:
    """Sizes of a flow decoder. `chunk` is how many codes the streaming weights attend to together."""

    vocabulary: int
    chunk: int
    encoder: EncoderSizes
    estimator: EstimatorSizes
    mel_bands: int = 80
    speaker_dim: int = 192
    euler_steps: int = 10
    guidance: float = 0.7

    @property
    def ratio(self) -> int:
        """Mel frames per code."""
        return self.encoder.ratio

    @property
    def lookahead(self) -> int:
        """Codes that a chunk needs beyond its end."""
        return self.encoder.lookahead


Flow = TypeVar("Flow", bound="StreamingFlow")


def load_flow(make: Callable[[], Flow], source: str | Path, device: torch.device | str, dtype: torch.dtype) -> Flow:
    """A decoder with the weights of a published `flow*.pt` file."""
    with allocating(device, dtype, drawn=False):
        decoder = make()
    with Checkpoint(source) as checkpoint:
        load_weights(decoder, checkpoint.renamed(lambda name: None if name in TRAINING_LEFTOVERS else name))
    return decoder.requires_grad_(False).eval()


class StreamingFlow(nn.Module):
    """Base of codes-to-mel decoders with a voice prompt; subclasses implement `decode`."""

    decoder: FlowMatching

    def __init__(self, config: FlowSizes, input_embedding: nn.Embedding, spk_embed_affine_layer: nn.Linear) -> None:
        super().__init__()
        self.config = config
        self.input_embedding = input_embedding
        self.spk_embed_affine_layer = spk_embed_affine_layer

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.spk_embed_affine_layer.weight.device

    @abstractmethod
    def decode(self, flow_pass: FlowPass) -> Tensor:
        """The whole model over one pass.  # → float32 [stream, frame, band]"""

    @torch.no_grad()
    def forward(
        self,
        codes: Tensor,
        prompt: VoicePrompt,
        streaming: bool = False,
        final: bool = True,
        left_chunks: int | None = None,
    ) -> Tensor:
        """The mel of a whole reply.  # [code] → float32 [band, frame]

        `streaming` applies the chunk mask. If the reply is not `final`, its last codes are look-ahead and give no mel.
        """
        voice = self._blank_voice(prompt)
        self._check(codes, already=len(voice.codes))
        if not len(codes):
            raise InputError("there are no codes to decode; give at least one")
        all_codes = torch.cat([voice.codes, codes.cpu()])
        time = len(all_codes) - (0 if final else self.config.lookahead)
        if time <= len(voice.codes):
            raise InputError(f"{len(codes)} codes are all look-ahead; give more than {self.config.lookahead} or final")
        span = KeySpan(self._indices([0]), time, self._indices([self._sink(len(voice.codes))]))
        pasts = Pasts(Silence(), Silence(), lambda step: Silence())
        chunk = self.config.chunk if streaming else None
        mel = self.decode(FlowPass(all_codes[None], *self._conditions([voice], span), span, pasts, chunk, left_chunks))
        return mel[0, len(voice.codes) * self.config.ratio :].T.contiguous()

    @torch.no_grad()
    def voice(self, prompt: VoicePrompt, cache: FlowCache | None = None) -> FlowVoice:
        """A voice with its prompt's cache precomputed; it can be shared by any number of replies.

        `cache` is one that was computed earlier from the same prompt and weights.
        """
        blank = self._blank_voice(prompt)
        sink = self._sink(len(blank.codes))
        if sink == 0:
            return blank
        if cache is not None:
            return replace(blank, sink=sink, cache=cache)
        codes = blank.codes[None, : sink + self.config.lookahead]
        span = self.span([blank], [0], sink, blank.cache)
        _, cache = self.hop(codes, [blank], span, blank.cache, left_chunks=None)
        return replace(blank, sink=sink, cache=cache)

    def aligned(self, prompt: VoicePrompt, first_hop: int) -> VoicePrompt:
        """The prompt with leading codes removed so that the reply's first chunk ends after `first_hop` codes.

        Chunks are counted from the start of the prompt, so its length determines how many codes the first sound needs.
        """
        config = self.config
        if not 1 <= first_hop <= config.chunk:
            raise InputError(f"first_hop is {first_hop}; give 1…{config.chunk} codes")
        length = min(len(prompt.codes), len(prompt.mel) // config.ratio)
        cut = (length + first_hop) % config.chunk
        if cut > length:
            raise InputError(f"a prompt of {length} codes is too short to make the first hop {first_hop} codes")
        return VoicePrompt(
            prompt.codes[cut:length], prompt.mel[cut * config.ratio : length * config.ratio], prompt.speaker
        )

    def first_hop(self, voice: FlowVoice) -> int:
        """Reply codes that fill the chunk in which the voice's prompt ends."""
        return self.config.chunk - len(voice.codes) % self.config.chunk

    def start(self, voice: FlowVoice, left_chunks: int | None = None, recompute: bool = False) -> FlowState:
        """The state of a new reply. `left_chunks` bounds its attention window; None: unbounded.

        With `recompute` only codes are stored, and each step decodes the whole left window again. That needs
        `left_chunks`, and equals the cached state only while the reply fits into the window.
        """
        if recompute and left_chunks is None:
            raise InputError("recompute needs a left window; give left_chunks")
        if left_chunks is not None and left_chunks < 0:
            raise InputError(f"left_chunks is {left_chunks}; give 0 or more, or None for all")
        cache = None
        if not recompute:
            slots = 0 if left_chunks is None else left_chunks * self.config.chunk
            cache = voice.cache.with_empty_windows(slots)
        tail = voice.codes[voice.sink :]
        return FlowState(voice, left_chunks, cache, tail, first=voice.sink, position=voice.sink)

    def step(self, state: FlowState, codes: Tensor, final: bool = False) -> tuple[Tensor, FlowState]:
        """The mel of every chunk completed by these codes.  # [code] → float32 [band, frame]

        Any number of codes is accepted; the mel is empty until a chunk and its look-ahead are complete. The `final`
        step decodes all remaining codes.
        """
        mels, states = self.step_batch([state], [codes], final)
        return mels[0], states[0]

    @torch.no_grad()
    def step_batch(
        self, states: Sequence[FlowState], codes: Sequence[Tensor], final: bool | Sequence[bool] = False
    ) -> tuple[list[Tensor], list[FlowState]]:
        """`step` for several replies; those with equally many codes to decode run as one batch.

        If there are several, the input states stay valid, so that each can be stepped separately if the batch fails.
        The memory of a single state is reused.
        """
        finals = [final] * len(states) if isinstance(final, bool) else list(final)
        extended = [self._append_codes(*stream) for stream in zip(states, codes, finals, strict=True)]
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, (state, last) in enumerate(zip(extended, finals, strict=True)):
            until = self._decodable_end(state, last)
            key = (until - self._start(state), last, state.left_chunks, state.cache is None)
            if until > state.position:
                groups.setdefault(key, []).append(index)
        mels = [torch.zeros(self.config.mel_bands, 0, device=self.device) for _ in extended]
        for indices in groups.values():
            if len(indices) == 1 < len(states):  # a batch works on a stacked copy
                extended[indices[0]] = extended[indices[0]].fork()
            decoded = self._step_group([extended[index] for index in indices], finals[indices[0]])
            for index, (mel, state) in zip(indices, decoded, strict=True):
                mels[index], extended[index] = mel, state
        return mels, [replace(state, finished=last) for state, last in zip(extended, finals, strict=True)]

    def _step_group(self, states: Sequence[FlowState], final: bool) -> list[tuple[Tensor, FlowState]]:
        """One pass over replies with equally many codes to decode, the same left window and the same caching."""
        starts = [self._start(state) for state in states]
        time = self._decodable_end(states[0], final) - starts[0]
        length = time if final else time + self.config.lookahead
        rows = [state.codes[start - state.first :][:length] for state, start in zip(states, starts, strict=True)]
        voices, left_chunks = [state.voice for state in states], states[0].left_chunks
        cache = FlowCache.stack([state.cache or state.voice.cache.with_empty_windows(0) for state in states])
        span = self.span(voices, starts, time, cache)
        mels, cache = self.hop(torch.stack(rows), voices, span, cache, left_chunks)
        results = []
        for index, (state, start) in enumerate(zip(states, starts, strict=True)):
            first_new = max(state.position, len(state.voice.codes)) - start
            mel = mels[index, first_new * self.config.ratio :].T.contiguous()
            results.append((mel, self._advance_state(state, start + time, cache, index)))
        return results

    def _advance_state(self, state: FlowState, position: int, cache: FlowCache, index: int) -> FlowState:
        """The state once everything before `position` is decoded, without codes that are no longer needed."""
        stream_cache = None
        if state.cache is not None:
            past = position - state.voice.sink
            stream_cache = cache.stream(index, past if state.left_chunks is None else cache.code_slots)
        advanced = replace(state, position=position, cache=stream_cache)
        first = self._start(advanced)
        return replace(advanced, codes=state.codes[first - state.first :], first=first)

    @torch.no_grad()
    def hop(
        self,
        codes: Tensor,  # [stream, time (+ look-ahead)]
        voices: Sequence[FlowVoice],
        span: KeySpan,
        cache: FlowCache,
        left_chunks: int | None,
    ) -> tuple[Tensor, FlowCache]:
        """The mel of the next codes of a batch of streams, and the next cache.  # → float32 [stream, frame, band]

        Under a left window all shapes are fixed and nothing synchronises with the device, so a hop can be captured in a
        CUDA graph. With the Triton kernels the next cache is new memory; otherwise `cache` is overwritten.
        """
        if left_chunks is not None and addressable(voices, cache, span.time * self.config.ratio):
            next_cache = cache.empty_like_this()
            addresses = FlowAddresses.of(voices, cache, next_cache)
            seen = self.seen_frames(span, left_chunks)
            pasts = addressed_pasts(self.config.estimator, addresses, cache, next_cache, seen)
        else:
            next_cache = cache.resize_windows(cache.code_slots + span.time) if left_chunks is None else cache
            pasts = self._pasts(voices, cache, next_cache)
        conditions, chunk = self._conditions(voices, span), self.config.chunk
        return self.decode(FlowPass(codes, *conditions, span, pasts, chunk, left_chunks)), next_cache

    def seen_frames(self, span: KeySpan, left_chunks: int) -> tuple[Tensor, Tensor]:
        """The slots that each new mel frame sees under a left window."""
        ratio = self.config.ratio
        return visible_slots(span.scaled(ratio), self.config.chunk * ratio, left_chunks)

    def span(self, voices: Sequence[FlowVoice], starts: Sequence[int], time: int, cache: FlowCache) -> KeySpan:
        """Positions of the next `time` codes of a batch of streams."""
        sinks = [voice.sink for voice in voices]
        return KeySpan(self._indices(starts), time, self._indices(sinks), max(sinks), cache.code_slots)

    def _pasts(self, voices: Sequence[FlowVoice], cache: FlowCache, next_cache: FlowCache) -> Pasts:
        shared = all(voice is voices[0] for voice in voices)
        prefixes = [voice.cache for voice in (voices[:1] if shared else voices)]
        channels = self.config.estimator.context_channels

        def mel_at(step: int) -> Past:
            contexts = cache.mel_contexts[step]
            return StreamPast(
                [prefix.mel_windows[step, :, :, 0] for prefix in prefixes],
                cache.mel_windows[step],
                contexts.view(-1, *contexts.shape[-2:]).split(channels, dim=-1),
                next_cache.mel_windows[step],
            )

        return Pasts(
            StreamPast(
                [prefix.code_windows[:, :, 0] for prefix in prefixes],
                cache.code_windows,
                [cache.lookahead_context],
                next_cache.code_windows,
            ),
            StreamPast(
                [prefix.frame_windows[:, :, 0] for prefix in prefixes],
                cache.frame_windows,
                [cache.upsample_context],
                next_cache.frame_windows,
            ),
            mel_at,
        )

    def _conditions(self, voices: Sequence[FlowVoice], span: KeySpan) -> tuple[Tensor, Tensor]:
        """Speaker and prompt mel of each stream, as `decode` takes them."""
        frames = span.scaled(self.config.ratio)
        rows = voices[0].mel.new_zeros(len(voices), frames.time, self.config.mel_bands)
        for row, voice, positions in zip(rows, voices, frames.query_positions(), strict=True):
            last = len(voice.mel) - 1
            if last >= 0:
                row.copy_(voice.mel[positions.clamp(max=last)] * (positions <= last)[:, None])
        return torch.stack([voice.speaker for voice in voices]), rows

    def _blank_voice(self, prompt: VoicePrompt) -> FlowVoice:
        """A voice without a computed cache; codes and mel are cut to equal length."""
        config = self.config
        self._check(prompt.codes, already=0)
        if prompt.mel.ndim != 2 or prompt.mel.shape[1] != config.mel_bands:
            raise InputError(f"the prompt mel is {list(prompt.mel.shape)}; give [frames, {config.mel_bands}]")
        if prompt.speaker.shape != (config.speaker_dim,):
            raise InputError(f"the speaker embedding is {list(prompt.speaker.shape)}; give [{config.speaker_dim}]")
        length = min(len(prompt.codes), len(prompt.mel) // config.ratio)
        weight = self.spk_embed_affine_layer.weight
        mel = prompt.mel[: length * config.ratio].to(weight)
        cache = FlowCache.blank(config.encoder, config.estimator, config.euler_steps, like=weight)
        speaker = self.spk_embed_affine_layer(functional.normalize(prompt.speaker.float(), dim=0).to(weight))
        return FlowVoice(prompt.codes[:length].cpu(), mel, speaker, sink=0, cache=cache)

    def _sink(self, prompt_length: int) -> int:
        """Prompt codes that can be decoded before a reply: whole chunks whose look-ahead is in the prompt."""
        return max(0, (prompt_length - self.config.lookahead) // self.config.chunk * self.config.chunk)

    def _start(self, state: FlowState) -> int:
        """The first code a step decodes: the state's position, or the start of its window to recompute."""
        if state.cache is not None or state.left_chunks is None:
            return state.position
        return max(state.voice.sink, state.position - state.left_chunks * self.config.chunk)

    def _decodable_end(self, state: FlowState, final: bool) -> int:
        """The absolute index up to which codes can be decoded now."""
        known = state.first + len(state.codes)
        if final:
            return known if known > len(state.voice.codes) else state.position
        chunk = self.config.chunk
        return max(state.position, (known - self.config.lookahead) // chunk * chunk)

    def _append_codes(self, state: FlowState, codes: Tensor, final: bool) -> FlowState:
        """The state with these codes appended."""
        if state.finished:
            raise InputError("this reply has had its final step; start a new one")
        if not len(codes) and not final:
            raise InputError("there are no codes to decode; give at least one, or make the step final")
        self._check(codes, already=state.first + len(state.codes))
        return replace(state, codes=torch.cat([state.codes, codes.cpu()]))

    def _check(self, codes: Tensor, already: int) -> None:
        config = self.config
        if codes.ndim != 1 or codes.dtype.is_floating_point or codes.dtype == torch.bool:
            raise InputError(f"codes are {codes.dtype} {list(codes.shape)}; give a list of integers")
        if len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < config.vocabulary:
            raise InputError(
                f"codes go from {codes.min()} to {codes.max()}; this decoder has 0…{config.vocabulary - 1}"
            )
        frames = (already + len(codes)) * config.ratio
        if frames > MAX_FRAMES:
            raise CapacityError(f"prompt and reply have {frames} mel frames; the flow can decode {MAX_FRAMES}")

    def _indices(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.device)
