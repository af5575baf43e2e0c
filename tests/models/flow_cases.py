"""Small flow decoders of both kinds, prompts and codes for them, and a stream of steps."""

import torch

from tests.golden import weights
from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.cosyvoice.dit import CosyVoice3Flow, CosyVoice3FlowConfig, DiTConfig, LookaheadConfig
from vivavoce.models.flow.estimator import FlowEstimatorConfig
from vivavoce.models.flow.model import FlowConfig, FlowDecoder, FlowEncoderConfig
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.nn.modules import allocating

CHUNK, CODES, BANDS, SPEAKER, RATIO, LOOKAHEAD = 3, 50, 6, 5, 2, 3
SHARED = {"vocabulary": CODES, "chunk": CHUNK, "mel_bands": BANDS, "speaker_dim": SPEAKER, "euler_steps": 3}
UNET = FlowConfig(
    **SHARED,
    encoder=FlowEncoderConfig(ratio=RATIO, dim=16, heads=2, feed_forward=24, code_layers=2, frame_layers=2),
    estimator=FlowEstimatorConfig(
        in_channels=24, out_channels=6, channels=12, middle_blocks=2, transformers=1, heads=2, head_dim=8
    ),
)
DIT = CosyVoice3FlowConfig(
    **SHARED,
    encoder=LookaheadConfig(dim=16),
    estimator=DiTConfig(
        mel_bands=6, dim=32, blocks=2, heads=4, head_dim=8, time_waves=8, position_kernel=5, position_groups=4
    ),
)
TOLERANCE = 1e-5


def tiny_decoder(config, dtype=torch.float32):
    """A decoder whose weights follow from their names."""
    with allocating("cpu", dtype):
        decoder = (FlowDecoder if isinstance(config, FlowConfig) else CosyVoice3Flow)(config)
    for name, tensor in published_tensors(decoder.requires_grad_(False).eval()).items():
        if not weights.is_constant(name):
            tensor.copy_(torch.from_numpy(weights.tensor(name, tuple(tensor.shape), seed=3)))
    return decoder


def a_prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return VoicePrompt(
        codes=some_codes(length, seed),
        mel=torch.randn(length * RATIO, BANDS, generator=generator),
        speaker=torch.randn(SPEAKER, generator=generator),
    )


def some_codes(length, seed=1):
    return torch.randint(CODES, (length,), generator=torch.Generator().manual_seed(seed))


def streamed(decoder, state, codes, sizes):
    """The mel of steps of these sizes, the last one final, and how many frames each gave."""
    mels = []
    pieces = list(codes.split(sizes))
    for number, piece in enumerate(pieces, start=1):
        mel, state = decoder.step(state, piece, final=number == len(pieces))
        mels.append(mel)
    return torch.cat(mels, dim=1), [mel.shape[1] for mel in mels]


def assert_close(actual, expected, tolerance=TOLERANCE):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()
