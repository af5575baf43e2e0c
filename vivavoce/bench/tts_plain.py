"""MOSS-TTS-Nano as its published PyTorch code runs it, for comparison: nothing fused, kept or batched.

The whole prompt is read for every text, the local transformer reads its growing prefix again for each code, the stop
choice computes the head over all text ids, and the codec takes one frame at a time. float32, torch's own threads.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vivavoce.models.interface import Row
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import NanoSampling
from vivavoce.nn.rope import rotate_pairs

Samples = NDArray[np.float32]
Past = list[tuple[Tensor, Tensor]]  # keys and values of each layer: [1, head, row, head_dim]


class PlainNano:
    """Speaks a prompt, a fixed number of frames of it."""

    name = "plain"

    def __init__(
        self,
        model: MossTTSNano,
        codec: MossAudioTokenizerNano,
        rows: Sequence[Row],
        frames: int,
        sampling: NanoSampling,
    ) -> None:
        self.model, self.codec, self.frames, self.sampling = model, codec, frames, sampling
        self.device = model.transformer.wte.weight.device
        self.rows = torch.tensor(rows, device=self.device)
        self.rate = codec.config.sample_rate

    def stream(self, seed: int) -> Iterator[Samples]:
        """The sound of the prompt's text, frame by frame."""
        torch.manual_seed(seed)
        past: Past = []
        hidden = self.read(self.rows, past)
        state, made = self.codec.decoder_state(), list[Tensor]()
        for _ in range(self.frames):
            codes = self.frame(hidden, made)
            made.append(codes)
            sound, state = self.codec.decode_step(state, codes[:, None])
            yield sound.cpu().numpy()
            hidden = self.read(self.row(codes), past)

    def stages(self) -> dict[str, Callable[[], object]]:
        """One frame's work of each part, behind a prompt."""
        past: Past = []
        hidden = self.read(self.rows, past)
        codes = self.frame(hidden, [])
        state = self.codec.decoder_state()

        def codec_frame() -> None:
            nonlocal state
            _, state = self.codec.decode_step(state, codes[:, None])

        return {
            "global": lambda: self.read(self.row(codes), list(past)),
            "local": lambda: self.frame(hidden, []),
            "codec": codec_frame,
        }

    def row(self, codes: Tensor) -> Tensor:
        """# [1, channel]"""
        slot = torch.tensor([self.model.config.audio_assistant_slot_token_id], device=self.device)
        return torch.cat([slot, codes])[None]

    @torch.inference_mode()
    def read(self, rows: Tensor, past: Past) -> Tensor:
        """The state of the last of new rows, which join the past.  # [1, hidden]"""
        place = past[0][0].shape[2] if past else 0
        states = self._layers(self.model.transformer.h, self.model.embed(rows), place, past)
        return functional.layer_norm(states, states.shape[-1:], *self._norm(self.model.transformer.ln_f))[-1:]

    @torch.inference_mode()
    def frame(self, hidden: Tensor, made: list[Tensor]) -> Tensor:
        """The next frame's codes; speech is never ended here.  # [codebook]"""
        model = self.model
        slot = model.transformer.wte.weight[model.config.audio_assistant_slot_token_id]
        inputs, codes = [hidden[0]], list[Tensor]()
        functional.linear(self._local(inputs), model.transformer.wte.weight)
        inputs.append(slot)
        for codebook in range(model.codebooks):
            logits = model.code_logits(codebook, self._local(inputs)[None])[0]
            earlier = torch.stack([each[codebook] for each in made]) if made else None
            codes.append(self._drawn(logits, earlier))
            inputs.append(model.audio_embeddings.embed(codebook, codes[-1]))
        return torch.stack(codes)

    def _local(self, inputs: list[Tensor]) -> Tensor:
        local = self.model.local_transformer
        states = self._layers(local.h, torch.stack(inputs), 0, [])
        return functional.layer_norm(states, states.shape[-1:], *self._norm(local.ln_f))[-1]

    def _layers(self, layers: torch.nn.ModuleList, x: Tensor, place: int, past: Past) -> Tensor:
        is_first = not past
        positions = slice(place, place + x.shape[0])
        cos, sin = self.model.rotary.cos[positions], self.model.rotary.sin[positions]
        for index, layer in enumerate(layers):

            def attend(queries: Tensor, keys: Tensor, values: Tensor, index: int = index) -> Tensor:
                new = [rotate_pairs(keys, cos, sin).transpose(0, 1)[None], values.transpose(0, 1)[None]]
                if not is_first:
                    new = [torch.cat(pair, dim=2) for pair in zip(past[index], new, strict=True)]
                    past[index] = (new[0], new[1])
                else:
                    past.append((new[0], new[1]))
                turned = rotate_pairs(queries, cos, sin).transpose(0, 1)[None]
                causal = queries.shape[0] > 1
                mixed = functional.scaled_dot_product_attention(turned, new[0], new[1], is_causal=causal)
                return mixed[0].transpose(0, 1)

            x = layer(x, attend)
        return x

    def _drawn(self, logits: Tensor, earlier: Tensor | None) -> Tensor:
        drawn = self.sampling
        if earlier is not None:
            told = logits[earlier]
            penalty = drawn.audio_repetition_penalty
            logits = logits.scatter(0, earlier, torch.where(told < 0, told * penalty, told / penalty))
        scores, ids = (logits / drawn.audio_temperature).topk(min(drawn.audio_top_k, len(logits)))
        chances = scores.softmax(-1)
        kept = chances.cumsum(-1) - chances < drawn.audio_top_p
        return ids[torch.multinomial(chances * kept, 1)[0]]

    @staticmethod
    def _norm(norm: torch.nn.LayerNorm) -> tuple[Tensor, Tensor, float]:
        return norm.weight, norm.bias, norm.eps
