"""MOSS-TTS-Nano and its codec written straight down: no cache, no batch, no window but a mask, weights by name."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.models.moss_audio_tokenizer.config import MossAudioTokenizerConfig, StageConfig
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoConfig

Weights = dict[str, Tensor]


def rotated(x: Tensor) -> Tensor:
    """Pairs of neighbours as complex numbers, turned by position.  # [head, time, dim]"""
    heads, time, dim = x.shape
    frequencies = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=x.dtype) / dim)
    turn = torch.polar(torch.ones(time, dim // 2, dtype=x.dtype), torch.arange(time)[:, None] * frequencies)
    pairs = torch.view_as_complex(x.reshape(heads, time, dim // 2, 2).contiguous())
    return torch.view_as_real(pairs * turn).reshape(heads, time, dim)


def attention(packed: Tensor, heads: int, window: int | None = None) -> Tensor:
    """Causal attention of queries | keys | values side by side.  # [time, 3 · hidden] → [time, hidden]"""
    time = packed.shape[0]
    query, key, value = (part.reshape(time, heads, -1).transpose(0, 1) for part in packed.chunk(3, dim=-1))
    scores = rotated(query) @ rotated(key).transpose(1, 2) / math.sqrt(query.shape[-1])
    distance = torch.arange(time)[:, None] - torch.arange(time)
    allowed = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    mixed = scores.masked_fill(~allowed, -math.inf).softmax(-1) @ value
    return mixed.transpose(0, 1).reshape(time, -1)


class NanoReference:
    """The language model, one sequence at a time, everything recomputed for every code."""

    def __init__(self, config: MossTTSNanoConfig, weights: Weights) -> None:
        self.config, self.weights = config, weights

    def hidden(self, rows: list[tuple[int, ...]]) -> Tensor:
        """Global states of all rows.  # [row, hidden]"""
        embedded = torch.stack([self.weights["transformer.wte.weight"][row[0]] for row in rows])
        for place, row in enumerate(rows):
            for index, code in enumerate(row[1:]):
                if code != self.config.audio_pad_token_id:
                    embedded[place] += self.weights[f"audio_embeddings.{index}.weight"][code]
        return self._layers("transformer", embedded, self.config.num_layers)

    def generate(
        self, rows: list[tuple[int, ...]], max_frames: int, penalty: float = 1.0, codebooks: int | None = None
    ) -> list[tuple[int, ...]]:
        """Greedy rows, the one that stops included."""
        config, made = self.config, []
        pad = config.audio_pad_token_id
        while len(made) < max_frames:
            local = [self.hidden(rows + made)[-1]]
            slot, end = config.audio_assistant_slot_token_id, config.audio_end_token_id
            text = self.weights["transformer.wte.weight"] @ self._local(local)
            if text[end] > text[slot]:
                return [*made, (end, *[pad] * config.n_vq)]
            local.append(self.weights["transformer.wte.weight"][slot])
            codes: list[int] = []
            for index in range(codebooks or config.n_vq):
                table = self.weights[f"audio_embeddings.{index}.weight"]
                logits = table @ self._local(local)
                for code in {row[1 + index] for row in made}:
                    logits[code] = logits[code] * penalty if logits[code] < 0 else logits[code] / penalty
                codes.append(int(logits.argmax()))
                local.append(table[codes[-1]])
            made.append((slot, *codes, *[pad] * (config.n_vq - len(codes))))
        return made

    def _local(self, inputs: list[Tensor]) -> Tensor:
        return self._layers("local_transformer", torch.stack(inputs), self.config.local_transformer_layers)[-1]

    def _layers(self, name: str, x: Tensor, layers: int) -> Tensor:
        for index in range(layers):
            prefix = f"{name}.h.{index}"
            packed = self._linear(f"{prefix}.attn.c_attn", self._norm(f"{prefix}.ln_1", x))
            x = x + self._linear(f"{prefix}.attn.c_proj", attention(packed, self.config.num_heads))
            inner = self._linear(f"{prefix}.mlp.fc_in", self._norm(f"{prefix}.ln_2", x))
            cubic = math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)
            x = x + self._linear(f"{prefix}.mlp.fc_out", 0.5 * inner * (1 + torch.tanh(cubic)))
        return self._norm(f"{name}.ln_f", x)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + self.config.layer_norm_eps)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


class CodecReference:
    """The codec, one whole sound at a time."""

    def __init__(self, config: MossAudioTokenizerConfig, weights: Weights) -> None:
        self.config, self.weights = config, weights

    def encode(self, sound: Tensor) -> Tensor:
        """# [2, sample] → [codebook, frame]"""
        x = sound.T.reshape(-1, 1)
        rate = float(self.config.sample_rate * self.config.channels)
        for index, part in enumerate(self.config.encoder):
            if isinstance(part, int):
                x = x.reshape(-1, part, x.shape[1]).transpose(1, 2).reshape(x.shape[0] // part, -1)
                rate /= part
            else:
                x = self._stage(f"encoder.{index}", part, x, round(rate * part.context_duration))
        residual, codes = self._projected("quantizer.input_proj", x), []
        for index in range(self.config.quantizer.num_quantizers):
            prefix = f"quantizer.quantizers.{index}"
            wanted = functional.normalize(self._projected(f"{prefix}.in_proj", residual), dim=-1)
            table = self.weights[f"{prefix}.codebook.weight"]
            codes.append((wanted @ functional.normalize(table, dim=-1).T).argmax(-1))
            residual = residual - self._projected(f"{prefix}.out_proj", table[codes[-1]])
        return torch.stack(codes)

    def decode(self, codes: Tensor) -> Tensor:
        """# [codebook, frame] → [2, sample]"""
        total = torch.zeros(codes.shape[1], self.config.quantizer.rvq_dim, dtype=torch.float32)
        for index, code in enumerate(codes):
            prefix = f"quantizer.quantizers.{index}"
            total = total + self._projected(f"{prefix}.out_proj", self.weights[f"{prefix}.codebook.weight"][code])
        x = self._projected("quantizer.output_proj", total)
        rate = self.config.frame_rate
        for index, part in enumerate(self.config.decoder):
            if isinstance(part, int):
                x = x.reshape(x.shape[0], -1, part).transpose(1, 2).reshape(x.shape[0] * part, -1)
                rate *= part
            else:
                x = self._stage(f"decoder.{index}", part, x, round(rate * part.context_duration))
        return x.reshape(-1, self.config.channels).T

    def _stage(self, name: str, stage: StageConfig, x: Tensor, window: int) -> Tensor:
        x = x @ self.weights[f"{name}.input_proj.weight"].T
        for layer in range(stage.num_layers):
            prefix = f"{name}.transformer.layers.{layer}"
            packed = self._norm(f"{prefix}.norm1", x) @ self.weights[f"{prefix}.self_attn.in_proj.weight"].T
            mixed = attention(packed, stage.num_heads, window) @ self.weights[f"{prefix}.self_attn.out_proj.weight"].T
            x = x + self.weights[f"{prefix}.layer_scale_1.scale"] * mixed
            inner = functional.gelu(self._norm(f"{prefix}.norm2", x) @ self.weights[f"{prefix}.ffn.0.weight"].T)
            x = x + self.weights[f"{prefix}.layer_scale_2.scale"] * (inner @ self.weights[f"{prefix}.ffn.2.weight"].T)
        return x @ self.weights[f"{name}.output_proj.weight"].T

    def _projected(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"][..., 0].T + self.weights[f"{name}.bias"]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        size = x.shape[-1:]
        return functional.layer_norm(x, size, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])
