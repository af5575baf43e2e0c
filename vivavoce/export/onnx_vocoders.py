"""Vocoders and whole codecs that keep no state, as ONNX graphs: BigVGAN, and XY-Tokenizer with its Vocos."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vivavoce.export.onnx_graph import OnnxExport
from vivavoce.models.bigvgan import BigVGAN
from vivavoce.models.vocos import LOUDEST_BIN, FourierHead
from vivavoce.models.xy_tokenizer import XYTokenizer
from vivavoce.nn.short_fourier import ShortFourier

SOUND_TOLERANCE = 2e-3
CODE_TOLERANCE = 0.01  # the share of codes that may differ: two vectors may be equally near


class WholeBigVGAN(nn.Module):
    """A whole mel at once."""

    def __init__(self, vocoder: BigVGAN) -> None:
        super().__init__()
        self.vocoder = vocoder

    def forward(self, mel: Tensor) -> Tensor:
        """# [batch, band, frame] → [batch, frame · hop]"""
        return self.vocoder.bounded(self.vocoder.render(mel))


class RealHead(nn.Module):
    """Vocos' head without complex numbers, which ONNX has none of: the inverse transform is a convolution."""

    def __init__(self, head: FourierHead) -> None:
        super().__init__()
        self.out = head.out
        self.fourier = ShortFourier(head.istft.n_fft, head.istft.hop)
        self.margin = (head.istft.n_fft - head.istft.hop) // 2

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, frame, dim] → [batch, frame · hop]"""
        log_magnitude, phase = self.out(x).transpose(1, 2).chunk(2, dim=1)
        magnitude = log_magnitude.exp().clamp(max=LOUDEST_BIN)
        sound = self.fourier.inverse(torch.cat([magnitude * phase.cos(), magnitude * phase.sin()], dim=1))
        return sound[:, self.margin : -self.margin]


class XYEncoder(nn.Module):
    """A log-mel of at most 30 s, cut to whole codes, to codes."""

    def __init__(self, tokenizer: XYTokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def forward(self, mel: Tensor) -> Tensor:
        """# [batch, mel, frame] of 8 frames a code → [batch, codebook, frame / 8]"""
        xy = self.tokenizer
        states = mel.shape[-1] // 2
        semantic = xy.semantic_encoder_adapter(xy.semantic_encoder(mel, states))
        mixed = xy.pre_rvq_adapter(torch.cat([semantic, xy.acoustic_encoder(mel, states)], dim=-1))
        return xy.quantizer.encode(xy.downsample(mixed).transpose(1, 2))


class XYDecoder(nn.Module):
    """Codes of at most 30 s to sound."""

    def __init__(self, tokenizer: XYTokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.head = RealHead(tokenizer.vocos.head)

    def forward(self, codes: Tensor) -> Tensor:
        """# [batch, codebook, code] → [batch, time]"""
        xy = self.tokenizer
        states = xy.upsample(xy.post_rvq_adapter(xy.quantizer.decode(codes).transpose(1, 2)))
        sound: Tensor = self.head(xy.vocos.backbone(xy.acoustic_decoder(states)))
        return sound


def bigvgan_graphs(vocoder: BigVGAN) -> Iterator[OnnxExport]:
    """mel → sound."""
    bands = vocoder.config.num_mels
    mels = [{"mel": torch.randn(batch, bands, frames)} for batch, frames in ((3, 11), (1, 7), (2, 24))]
    axes = {"mel": {0: "batch", 2: "frame"}}
    yield OnnxExport("vocoder", WholeBigVGAN(vocoder), mels[0], axes, ("sound",), tuple(mels[1:]), SOUND_TOLERANCE)


def xy_graphs(tokenizer: XYTokenizer) -> Iterator[OnnxExport]:
    """mel → codes, and codes → sound."""
    config, per_code = tokenizer.config, 2 * tokenizer.config.pooling
    sizes = ((3, 11), (1, 3), (2, 20))
    mels = [{"mel": torch.randn(batch, config.mel_bins, codes * per_code)} for batch, codes in sizes]
    axes = {"mel": {0: "batch", 2: f"{per_code}*code"}}
    yield OnnxExport("encoder", XYEncoder(tokenizer), mels[0], axes, ("codes",), tuple(mels[1:]), CODE_TOLERANCE)
    books, entries = config.codebooks, config.codebook_entries
    codes = [{"codes": torch.randint(0, entries, (batch, books, count))} for batch, count in sizes]
    axes = {"codes": {0: "batch", 2: "code"}}
    yield OnnxExport("decoder", XYDecoder(tokenizer), codes[0], axes, ("sound",), tuple(codes[1:]), SOUND_TOLERANCE)
