"""XY-Tokenizer: speech to 8 codes every 80 ms and back, with its Vocos decoder.

Encode: log-mel at 100 Hz → a semantic and an acoustic encoder in parallel at 50 Hz → adapter → four states in one at
12.5 Hz → residual quantiser. Decode: codes → adapter → ×4 → decoder → ×2 → Vocos → sound at 16, 24 or 32 kHz.

Every transformer attends in both directions over at most 30 s of positions, so longer sound is processed in overlapping
windows: see `xy_tokenizer/windows.py`. Vocos stays at the frame rate until one inverse Fourier transform at the end.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.audio.mel import WhisperMel
from vivavoce.errors import CheckpointError
from vivavoce.models.checkpoint import Checkpoint, fold_weight_norm, load_weights
from vivavoce.models.registry import XY_TOKENIZER_FILES
from vivavoce.models.whisper.model import WhisperLayer
from vivavoce.nn.attention import sinusoids
from vivavoce.nn.vq import ResidualVQ

RATE = 16_000
MEL_HOP = WhisperMel.HOP
CONV_STRIDE = 2
HEAD_DIM = 64
FRAMES_PER_SECOND = RATE // MEL_HOP
CHECKPOINT_NAMES = XY_TOKENIZER_FILES
TRAINING_ONLY = ("inited", "cluster_size", "embed_avg")


@dataclass(frozen=True)
class XYTokenizerConfig:
    """Sizes; the defaults are the paper's model. The published variants differ only in `n_fft`, hence in the rate."""

    n_fft: int = 640
    mel_bins: int = 80
    d_model: int = 768
    heads: int = 12
    ffn: int = 3072
    layers: int = 12
    adapter_layers: int = 4
    pooling: int = 4
    window_seconds: int = 30
    codebooks: int = 8
    codebook_entries: int = 1024
    codebook_size: int = 512
    vocos_dim: int = 512
    vocos_inner: int = 4096
    vocos_layers: int = 30

    @property
    def hop(self) -> int:
        """Output samples per mel frame."""
        return self.n_fft // 4

    @property
    def output_rate(self) -> int:
        """Output sample rate."""
        return self.hop * FRAMES_PER_SECOND

    @property
    def samples_in(self) -> int:
        """16 kHz input samples per code."""
        return MEL_HOP * CONV_STRIDE * self.pooling

    @property
    def samples_out(self) -> int:
        """Output samples per code."""
        return self.hop * CONV_STRIDE * self.pooling

    @property
    def positions(self) -> int:
        """Positions at 50 Hz in one window."""
        return self.window_seconds * FRAMES_PER_SECOND // CONV_STRIDE

    @property
    def window_codes(self) -> int:
        """Codes in one window."""
        return self.positions // self.pooling


XY_TOKENIZER_16KHZ = XYTokenizerConfig(n_fft=640)
XY_TOKENIZER_24KHZ = XYTokenizerConfig(n_fft=960)
XY_TOKENIZER_32KHZ = XYTokenizerConfig(n_fft=1280)


class XYTransformer(nn.Module):
    """Sinusoidal positions, bidirectional layers and a norm."""

    positional_embedding: Tensor

    def __init__(self, config: XYTokenizerConfig, layers: int, positions: int) -> None:
        super().__init__()
        self.register_buffer("positional_embedding", sinusoids(positions, config.d_model))
        self.layers = nn.ModuleList(WhisperLayer(config.d_model, config.heads, config.ffn) for _ in range(layers))
        self.layer_norm = nn.LayerNorm(config.d_model)

    def transform(self, x: Tensor) -> Tensor:
        """# [batch, time, d_model] → [batch, time, d_model]"""
        x = x + self.positional_embedding[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        normed: Tensor = self.layer_norm(x)
        return normed


class AudioEncoder(XYTransformer):
    """Log-mel frames to states at half their rate."""

    def __init__(self, config: XYTokenizerConfig) -> None:
        super().__init__(config, config.layers, config.positions)
        self.conv1 = nn.Conv1d(config.mel_bins, config.d_model, 3, padding=1)
        self.conv2 = nn.Conv1d(config.d_model, config.d_model, 3, stride=CONV_STRIDE, padding=1)

    def forward(self, mel: Tensor, states: int) -> Tensor:
        """The first `states` states, which see one frame more.  # [batch, mel, frame] → [batch, states, d_model]"""
        x = functional.gelu(self.conv2(functional.gelu(self.conv1(mel[..., : CONV_STRIDE * states + 1]))))
        return self.transform(x.transpose(1, 2)[:, :states])


class Adapter(XYTransformer):
    """A small transformer between two widths."""

    def __init__(self, config: XYTokenizerConfig, inputs: int, outputs: int, positions: int) -> None:
        super().__init__(config, config.adapter_layers, positions)
        self.proj = nn.Identity() if inputs == config.d_model else nn.Linear(inputs, config.d_model)
        self.out_proj = nn.Identity() if outputs == config.d_model else nn.Linear(config.d_model, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, time, inputs] → [batch, time, outputs]"""
        adapted: Tensor = self.out_proj(self.transform(self.proj(x)))
        return adapted


class Downsample(nn.Module):
    """Concatenate `pooling` states into one and add a gated convolution over them."""

    def __init__(self, d_model: int, pooling: int) -> None:
        super().__init__()
        self.width = d_model * pooling
        self.gate_proj = nn.Conv1d(d_model, self.width, pooling, stride=pooling, bias=False)
        self.up_proj = nn.Conv1d(d_model, self.width, pooling, stride=pooling, bias=False)
        self.down_proj = nn.Linear(self.width, self.width, bias=False)
        self.layer_norm = nn.LayerNorm(self.width)

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, time, d_model] → [batch, time / pooling, d_model * pooling]"""
        channels = x.transpose(1, 2)
        gated = (functional.silu(self.gate_proj(channels)) * self.up_proj(channels)).transpose(1, 2)
        pooled: Tensor = self.layer_norm(self.down_proj(gated) + x.reshape(x.shape[0], -1, self.width))
        return pooled


class Upsample(nn.Module):
    """One state to `pooling` states by a transposed convolution."""

    def __init__(self, d_model: int, pooling: int) -> None:
        super().__init__()
        self.up_conv = nn.ConvTranspose1d(d_model * pooling, d_model, pooling, stride=pooling, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, time, d_model * pooling] → [batch, time * pooling, d_model]"""
        spread: Tensor = self.up_conv(x.transpose(1, 2))
        return spread.transpose(1, 2)


class AudioDecoder(XYTransformer):
    """States to mel-like frames at twice their rate."""

    def __init__(self, config: XYTokenizerConfig) -> None:
        super().__init__(config, config.layers, config.positions)
        self.deconv1 = nn.ConvTranspose1d(config.d_model, config.d_model, 3, stride=CONV_STRIDE)
        self.deconv2 = nn.ConvTranspose1d(config.d_model, config.mel_bins, 3)

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, time, d_model] → [batch, mel, 2 time]"""
        frames = CONV_STRIDE * x.shape[1]
        x = self.transform(x).transpose(1, 2)
        return functional.gelu(self.deconv2(functional.gelu(self.deconv1(x))))[..., :frames]


VOCOS_KERNEL = 7
LOUDEST_BIN = 1e2


class ConvNeXtBlock(nn.Module):
    """x + scale · pointwise(gelu(pointwise(norm(depthwise conv(x)))))."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv1d(dim, dim, VOCOS_KERNEL, padding=VOCOS_KERNEL // 2, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, inner)
        self.pwconv2 = nn.Linear(inner, dim)
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, dim, frame] → [batch, dim, frame]"""
        y = self.norm(self.dwconv(x).transpose(1, 2))
        y = self.gamma * self.pwconv2(functional.gelu(self.pwconv1(y)))
        return x + y.transpose(1, 2)


class VocosBackbone(nn.Module):
    """Frames to features; the receptive field is `3 · (layers + 1)` frames to either side."""

    def __init__(self, channels: int, dim: int, inner: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Conv1d(channels, dim, VOCOS_KERNEL, padding=VOCOS_KERNEL // 2)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.convnext = nn.ModuleList(ConvNeXtBlock(dim, inner) for _ in range(layers))
        self.final_layer_norm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, channel, frame] → [batch, frame, dim]"""
        x = self.norm(self.embed(x).transpose(1, 2)).transpose(1, 2)
        for block in self.convnext:
            x = block(x)
        out: Tensor = self.final_layer_norm(x.transpose(1, 2))
        return out


class InverseSTFT(nn.Module):
    """Windowed overlap-add, trimmed to exactly one hop per frame."""

    window: Tensor

    def __init__(self, n_fft: int, hop: int) -> None:
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, spectrum: Tensor) -> Tensor:
        """# complex [batch, frame, n_fft/2 + 1] → [batch, frame * hop]"""
        window = self.window.float()
        frames = torch.fft.irfft(spectrum, self.n_fft) * window
        weight = self._overlap_add(window.square().expand(1, frames.shape[1], -1))
        return self._overlap_add(frames) / weight

    def _overlap_add(self, frames: Tensor) -> Tensor:
        length = (frames.shape[1] - 1) * self.hop + self.n_fft
        added = functional.fold(frames.transpose(1, 2), (1, length), (1, self.n_fft), stride=(1, self.hop))
        margin = (self.n_fft - self.hop) // 2
        return added[:, 0, 0, margin : length - margin]


class FourierHead(nn.Module):
    """Features to log-magnitude and phase, then to sound."""

    def __init__(self, dim: int, n_fft: int, hop: int) -> None:
        super().__init__()
        self.out = nn.Linear(dim, n_fft + 2)
        self.istft = InverseSTFT(n_fft, hop)

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, frame, dim] → [batch, frame * hop], float32"""
        log_magnitude, phase = self.out(x).float().chunk(2, dim=-1)
        sound: Tensor = self.istft(torch.polar(log_magnitude.exp().clamp(max=LOUDEST_BIN), phase))
        return sound


class Vocos(nn.Module):
    """Vocos: backbone and Fourier head."""

    def __init__(self, channels: int, dim: int, inner: int, layers: int, n_fft: int, hop: int) -> None:
        super().__init__()
        self.backbone = VocosBackbone(channels, dim, inner, layers)
        self.head = FourierHead(dim, n_fft, hop)

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, channel, frame] → [batch, frame * hop]"""
        sound: Tensor = self.head(self.backbone(x))
        return sound


class XYTokenizer(nn.Module):
    """One window at a time: sound to codes, codes to sound."""

    def __init__(self, config: XYTokenizerConfig) -> None:
        super().__init__()
        self.config = config
        width, packed = config.d_model, config.d_model * config.pooling
        self.semantic_encoder = AudioEncoder(config)
        self.semantic_encoder_adapter = Adapter(config, width, width, config.positions)
        self.acoustic_encoder = AudioEncoder(config)
        self.pre_rvq_adapter = Adapter(config, 2 * width, width, config.positions)
        self.downsample = Downsample(width, config.pooling)
        self.quantizer = ResidualVQ(packed, config.codebook_size, packed, config.codebooks, config.codebook_entries)
        self.post_rvq_adapter = Adapter(config, packed, packed, config.window_codes)
        self.upsample = Upsample(width, config.pooling)
        self.acoustic_decoder = AudioDecoder(config)
        self.vocos = Vocos(
            config.mel_bins, config.vocos_dim, config.vocos_inner, config.vocos_layers, config.n_fft, config.hop
        )
        self.mel = WhisperMel(config.mel_bins)

    @classmethod
    def load(
        cls, source: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> "XYTokenizer":
        """A published variant from its checkpoint file or folder; sizes are inferred from tensor shapes."""
        with fold_weight_norm(open_checkpoint(Path(source))) as checkpoint:
            tokenizer = cls.allocate(config_of(checkpoint), device, dtype)
            load_weights(tokenizer, checkpoint)
        return tokenizer

    @classmethod
    def allocate(
        cls, config: XYTokenizerConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> "XYTokenizer":
        """A model with uninitialised weights. Quantiser and mel stay in float32."""
        with torch.device("meta"):
            tokenizer = cls(config)
        tokenizer = tokenizer.to(dtype)
        tokenizer.quantizer.float()
        tokenizer = tokenizer.to_empty(device=device).eval().requires_grad_(False)
        tokenizer.mel = WhisperMel(config.mel_bins).to(device)
        return tokenizer

    def encode_window(self, pcm: Tensor) -> Tensor:
        """Codes of at most 30 s at 16 kHz.  # [batch, time] → [batch, codebook, time // 1280]"""
        return self.quantizer.encode(self.latents(pcm).transpose(1, 2))

    def latents(self, pcm: Tensor) -> Tensor:
        """The input of the quantiser.  # [batch, time] → [batch, time // 1280, d_model * 4]"""
        config, samples = self.config, pcm.shape[-1]
        silence = config.window_seconds * RATE - samples
        mel = self.mel(functional.pad(pcm.float(), (0, silence))).to(self.downsample.down_proj.weight.dtype)
        states = -(-samples // MEL_HOP) // CONV_STRIDE
        semantic = self.semantic_encoder_adapter(self.semantic_encoder(mel, states))
        acoustic = self.acoustic_encoder(mel, states)
        mixed = self.pre_rvq_adapter(torch.cat([semantic, acoustic], dim=-1))
        pooled: Tensor = self.downsample(mixed[:, : samples // config.samples_in * config.pooling])
        return pooled

    def decode_window(self, codes: Tensor) -> Tensor:
        """Sound of at most 30 s; fewer codebooks give lower quality.  # [batch, codebook, code] → [batch, time]"""
        quantised = self.quantizer.decode(codes).transpose(1, 2).to(self.downsample.down_proj.weight.dtype)
        states = self.upsample(self.post_rvq_adapter(quantised))
        sound: Tensor = self.vocos(self.acoustic_decoder(states))
        return sound


def config_of(checkpoint: Checkpoint) -> XYTokenizerConfig:
    """The sizes of a checkpoint, inferred from its shapes; heads have 64 channels, as in Whisper."""

    def count(stack: str) -> int:
        indices = {name.removeprefix(stack).split(".")[0] for name in checkpoint.shapes if name.startswith(stack)}
        return len(indices)

    try:
        shapes = checkpoint.shapes
        d_model, mel_bins, _ = shapes["semantic_encoder.conv1.weight"]
        entries, size = shapes["quantizer.quantizers.0.codebook"]
        inner, dim = shapes["vocos.backbone.convnext.0.pwconv1.weight"]
        positions = shapes["semantic_encoder.positional_embedding"][0]
        return XYTokenizerConfig(
            n_fft=shapes["vocos.head.out.bias"][0] - 2,
            mel_bins=mel_bins,
            d_model=d_model,
            heads=d_model // HEAD_DIM,
            ffn=shapes["semantic_encoder.layers.0.fc1.bias"][0],
            layers=count("semantic_encoder.layers."),
            adapter_layers=count("pre_rvq_adapter.layers."),
            pooling=shapes["downsample.gate_proj.weight"][2],
            window_seconds=positions * CONV_STRIDE // FRAMES_PER_SECOND,
            codebooks=count("quantizer.quantizers."),
            codebook_entries=entries,
            codebook_size=size,
            vocos_dim=dim,
            vocos_inner=inner,
            vocos_layers=count("vocos.backbone.convnext."),
        )
    except KeyError as error:
        raise CheckpointError(f"{checkpoint.source} is not an XY-Tokenizer: it has no tensor {error}") from error


def open_checkpoint(source: Path) -> Checkpoint:
    """A published checkpoint under this module's names: a file, its folder, or a `transformers` folder."""
    if source.is_dir():
        source = next((source / name for name in CHECKPOINT_NAMES if (source / name).is_file()), source)
    return Checkpoint(source).renamed(published_name)


def published_name(name: str) -> str | None:
    """The module's name of a published tensor; None for tensors that only training needs."""
    if name.rsplit(".", 1)[-1] in TRAINING_ONLY:
        return None
    return name.removeprefix("generator.").replace("enhanced_vocos.", "vocos.").replace(".mlp.fc", ".fc")
