"""Kokoro's text side: PL-BERT, the text encoder, and the predictors of duration, pitch and loudness."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.kokoro.config import AlbertConfig, KokoroConfig
from vivavoce.models.kokoro.layers import SLOPE, StyledLayerNorm, StyledResBlock, masked
from vivavoce.nn.lstm import BidirectionalLSTM


class AlbertAttention(nn.Module):
    """Self-attention with its residual add and norm."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query, self.key, self.value, self.dense = (nn.Linear(config.hidden, config.hidden) for _ in range(4))
        self.LayerNorm = nn.LayerNorm(config.hidden, config.epsilon)

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:
        """# [batch, time, hidden], [batch, 1, 1, time]"""
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        normalised: Tensor = self.LayerNorm(x + self.dense(mixed.transpose(1, 2).flatten(2)))
        return normalised


class AlbertLayer(nn.Module):
    """The layer that is applied repeatedly."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.attention = AlbertAttention(config)
        self.ffn = nn.Linear(config.hidden, config.feed_forward)
        self.ffn_output = nn.Linear(config.feed_forward, config.hidden)
        self.full_layer_layer_norm = nn.LayerNorm(config.hidden, config.epsilon)

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:
        attended = self.attention(x, visible)
        inner = functional.gelu(self.ffn(attended), approximate="tanh")
        normalised: Tensor = self.full_layer_layer_norm(self.ffn_output(inner) + attended)
        return normalised


class AlbertEmbeddings(nn.Module):
    """Phoneme, position and segment embeddings."""

    def __init__(self, config: AlbertConfig, symbols: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(symbols, config.embedding)
        self.position_embeddings = nn.Embedding(config.positions, config.embedding)
        self.token_type_embeddings = nn.Embedding(2, config.embedding)
        self.LayerNorm = nn.LayerNorm(config.embedding, config.epsilon)

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.position_embeddings.weight[: ids.shape[1]]
        normalised: Tensor = self.LayerNorm(
            self.word_embeddings(ids) + positions + self.token_type_embeddings.weight[0]
        )
        return normalised


class _LayerGroup(nn.Module):
    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.albert_layers = nn.ModuleList([AlbertLayer(config)])


class _AlbertEncoder(nn.Module):
    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.embedding_hidden_mapping_in = nn.Linear(config.embedding, config.hidden)
        self.albert_layer_groups = nn.ModuleList([_LayerGroup(config)])


class PhonemeBert(nn.Module):
    """PL-BERT: phoneme ids → contextual vectors."""

    def __init__(self, config: AlbertConfig, symbols: int) -> None:
        super().__init__()
        self.layers = config.layers
        self.embeddings = AlbertEmbeddings(config, symbols)
        self.encoder = _AlbertEncoder(config)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """# [batch, time], [batch, 1, time] → [batch, time, hidden]"""
        visible = None if mask is None else mask[:, None].bool()
        x: Tensor = self.encoder.embedding_hidden_mapping_in(self.embeddings(ids))
        group = self.encoder.albert_layer_groups[0]
        assert isinstance(group, _LayerGroup)
        layer = group.albert_layers[0]
        for _ in range(self.layers):
            x = layer(x, visible)
        return x


class ChannelNorm(nn.Module):
    """Layer norm over the channels of [batch, channel, time]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        normalised = functional.layer_norm(x.transpose(1, 2), self.gamma.shape, self.gamma, self.beta)
        return normalised.transpose(1, 2)


class TextEncoder(nn.Module):
    """Phoneme ids → the features that the decoder speaks."""

    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        width, kernel = config.hidden, config.text_kernel
        self.embedding = nn.Embedding(config.symbols, width)
        self.cnn = nn.ModuleList(
            nn.Sequential(nn.Conv1d(width, width, kernel, padding=kernel // 2), ChannelNorm(width), nn.LeakyReLU(SLOPE))
            for _ in range(config.layers)
        )
        self.lstm = BidirectionalLSTM(width, width)

    def forward(self, ids: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor:
        """# [batch, time] → [batch, time, hidden]"""
        x = masked(self.embedding(ids).transpose(1, 2), mask)
        for layer in self.cnn:
            x = masked(layer(x), mask)
        return self.lstm.run(x.transpose(1, 2), lengths)


class DurationEncoder(nn.Module):
    """LSTMs and styled norms in turn, the style concatenated before each LSTM."""

    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        self.lstms = nn.ModuleList()
        for _ in range(config.layers):
            self.lstms.append(BidirectionalLSTM(config.hidden + config.style, config.hidden))
            self.lstms.append(StyledLayerNorm(config.style, config.hidden))

    def forward(self, x: Tensor, style: Tensor, lengths: Tensor | None) -> Tensor:
        """# [batch, time, hidden], [batch, style] → [batch, time, hidden + style]"""
        x = with_style(x, style)
        for layer in self.lstms:
            x = layer.run(x, lengths) if isinstance(layer, BidirectionalLSTM) else with_style(layer(x, style), style)
        return x


def with_style(x: Tensor, style: Tensor) -> Tensor:
    """The style beside every step.  # [batch, time, channel], [batch, style] → [batch, time, channel + style]"""
    return torch.cat([x, style[:, None].expand(-1, x.shape[1], -1)], dim=-1)


class _DurationProjection(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear_layer = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.linear_layer(x)
        return projected


class ProsodyPredictor(nn.Module):
    """Durations per phoneme; pitch and loudness at two values per frame."""

    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        width, style = config.hidden, config.style
        self.text_encoder = DurationEncoder(config)
        self.lstm = BidirectionalLSTM(width + style, width)
        self.duration_proj = _DurationProjection(width, config.max_duration)
        self.shared = BidirectionalLSTM(width + style, width)
        self.F0, self.N = self._curve(width, style), self._curve(width, style)
        self.F0_proj, self.N_proj = nn.Conv1d(width // 2, 1, 1), nn.Conv1d(width // 2, 1, 1)

    @staticmethod
    def _curve(width: int, style: int) -> nn.ModuleList:
        half = width // 2
        blocks = [
            StyledResBlock(width, width, style),
            StyledResBlock(width, half, style, upsamples=True),
            StyledResBlock(half, half, style),
        ]
        return nn.ModuleList(blocks)

    def durations(self, encoded: Tensor, lengths: Tensor | None) -> Tensor:
        """Frames of each phoneme at speed 1, not rounded.  # [batch, time, hidden + style] → [batch, time]"""
        return torch.sigmoid(self.duration_proj(self.lstm.run(encoded, lengths))).sum(-1)

    def curves(
        self, aligned: Tensor, style: Tensor, mask: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Pitch in Hz and loudness.  # [batch, frame, hidden + style] → [batch, 2 · frame] twice"""
        shared = self.shared.run(aligned, lengths).transpose(1, 2)
        results = []
        for blocks, projection in ((self.F0, self.F0_proj), (self.N, self.N_proj)):
            x, inner = shared, mask
            for block in blocks:
                x = block(x, style, inner)
                inner = mask if mask is None or x.shape[-1] == mask.shape[-1] else mask.repeat_interleave(2, dim=-1)
            results.append(projection(x).squeeze(1))
        return results[0], results[1]
