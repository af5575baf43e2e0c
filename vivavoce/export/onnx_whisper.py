"""Whisper as two ONNX graphs: windows to what the decoder reads of them, and tokens to logits with a past."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.export.onnx_graph import OnnxExport, Stream
from vivavoce.models.whisper import Whisper

MEMORY = ("memory_keys", "memory_values")
PAST = ("past_keys", "past_values")


class WhisperEncoderGraph(nn.Module):
    """Log-mel windows to the keys and values that every decoder layer reads of them."""

    def __init__(self, whisper: Whisper) -> None:
        super().__init__()
        self.whisper = whisper

    def forward(self, mel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """# [window, mel, frame] → [window, position, d_model], twice [layer, window, head, position, head_dim]"""
        states = self.whisper.encoder(mel)
        memory = self.whisper.decoder.remember(states)
        return states, memory.keys, memory.values


class TokenDecoder(nn.Module):
    """The next tokens of texts, one a window, behind what was read of them before."""

    def __init__(self, whisper: Whisper) -> None:
        super().__init__()
        self.decoder = whisper.decoder

    def forward(
        self, tokens: Tensor, past_keys: Tensor, past_values: Tensor, memory_keys: Tensor, memory_values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, and the past with these tokens in it.

        # [window, token], each past [layer, window, head, past, head_dim] → [window, token, id], past + token
        """
        decoder, before = self.decoder, past_keys.shape[3]
        new = tokens.shape[1]
        places = before + torch.arange(new, device=tokens.device)
        visible = torch.arange(before + new, device=tokens.device) <= places[:, None]
        x = decoder.embed_tokens(tokens) + decoder.embed_positions(places)
        keys, values = [], []
        for index, layer in enumerate(decoder.stack):
            query, key, value = layer.self_attn._project(layer.self_attn_layer_norm(x))
            keys.append(torch.cat([past_keys[index], key], dim=2))
            values.append(torch.cat([past_values[index], value], dim=2))
            mixed = functional.scaled_dot_product_attention(query, keys[-1], values[-1], attn_mask=visible)
            x = x + layer.self_attn._output(mixed)
            x = layer.after_text(x, memory_keys[index], memory_values[index])
        return decoder.logits(decoder.layer_norm(x)), torch.stack(keys), torch.stack(values)


def whisper_graphs(whisper: Whisper) -> Iterator[OnnxExport]:
    """Encoder and decoder."""
    config = whisper.config
    mels = [{"mel": torch.randn(batch, config.num_mel_bins, frames)} for batch, frames in ((3, 61), (1, 30), (2, 100))]
    axes = {"mel": {0: "window", 2: "frame"}}
    yield OnnxExport("encoder", WhisperEncoderGraph(whisper), mels[0], axes, ("states", *MEMORY), tuple(mels[1:]))
    layers, heads = config.decoder_layers, config.decoder_attention_heads
    head_dim = config.d_model // heads

    def example(windows: int, tokens: int, past: int, positions: int) -> dict[str, Tensor]:
        given = {"tokens": torch.randint(0, config.vocab_size, (windows, tokens))}
        sizes = dict.fromkeys(PAST, past) | dict.fromkeys(MEMORY, positions)
        return given | {name: torch.randn(layers, windows, heads, size, head_dim) for name, size in sizes.items()}

    remembered = {name: {1: "window", 3: "past" if name in PAST else "position"} for name in (*PAST, *MEMORY)}
    axes = {"tokens": {0: "window", 1: "token"}, **remembered}
    outputs = ("logits", "keys", "values")
    following = tuple(example(1, tokens, 0, 9) for tokens in (1, 2, 1))
    stream = Stream(example(1, 4, 0, 9), following, dict(zip(PAST, outputs[1:], strict=True)))
    checks = (example(2, 1, 12, 50),)
    yield OnnxExport("decoder", TokenDecoder(whisper), example(3, 5, 7, 31), axes, outputs, checks, stream=stream)
