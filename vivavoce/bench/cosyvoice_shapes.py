"""CosyVoice 3 on random weights, of the published shapes or small ones, and texts and voices for it."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from vivavoce.device import Device
from vivavoce.engine.sampling import Generation
from vivavoce.models.causal_hift import CausalHiFT, CausalHiFTConfig
from vivavoce.models.cosyvoice3_dit import DiTConfig
from vivavoce.models.cosyvoice3_flow import CosyVoice3Flow, CosyVoice3FlowConfig, LookaheadConfig
from vivavoce.models.cosyvoice_lm import CosyVoiceLM, CosyVoiceLMConfig
from vivavoce.models.flow_speech import FlowSpeech
from vivavoce.models.flow_state import VoicePrompt
from vivavoce.models.flow_stream import StreamingFlow
from vivavoce.models.interface import Row
from vivavoce.nn.allocation import allocating, fill_randomly
from vivavoce.speech.cosyvoice_speaker import CODES_A_SECOND, PUBLISHED, CosyVoiceSettings

LEFT_CHUNKS = CosyVoiceSettings().left_chunks
assert LEFT_CHUNKS is not None
TEXT_TOKENS, TRANSCRIPT_TOKENS, REFERENCE_CODES = 30, 25, 125  # a sentence, and a reference of five seconds
TINY_LM = CosyVoiceLMConfig(
    version=3,
    speech_rows=6761,
    vocab_size=600,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    end_of_prompt=500,
)
TINY_FLOW = CosyVoice3FlowConfig(
    encoder=LookaheadConfig(dim=32),
    estimator=DiTConfig(dim=64, blocks=2, heads=4, head_dim=16, time_waves=32, position_kernel=5, position_groups=4),
    euler_steps=2,
)
TINY_VOCODER = CausalHiFTConfig(channels=32, f0_channels=16, overtones=1)


@dataclass
class CosyVoiceBenchSetup:
    """What is measured, and where."""

    device: Device
    dtype: torch.dtype
    tiny: bool
    lm_layers: list[Tensor] = field(default_factory=list)
    """The matrices that every code reads."""

    @property
    def reply_codes(self) -> int:
        """Of a text: ten seconds, or two."""
        return 50 if self.tiny else 250

    @property
    def extreme_runs(self) -> int:
        """On inputs that no sound has."""
        return 8 if self.tiny else 64

    @property
    def voice_seconds(self) -> float:
        """Of the voice: what the speaker takes at the most, or less where that takes too long."""
        return CosyVoiceSettings().prompt_seconds if self.tiny or self.device.kind != "cpu" else 2.0

    def lm(self) -> CosyVoiceLM:
        """The language model."""
        config = TINY_LM if self.tiny else CosyVoiceLMConfig.cosyvoice3()
        model = CosyVoiceLM.random(config, self.device.torch_device, self.dtype)
        self.lm_layers = [*model.trunk.layers.parameters(), model.llm_decoder.weight]
        return model

    @cached_property
    def vocoder(self) -> CausalHiFT:
        """The vocoder, always in float32."""
        with allocating(self.device.torch_device, torch.float32):
            vocoder = CausalHiFT(TINY_VOCODER if self.tiny else None).requires_grad_(False).eval()
        fill_randomly(vocoder)
        vocoder.conv_post.weight.mul_(0.1)
        vocoder.f0_predictor.classifier.bias.fill_(150.0)
        return vocoder

    @torch.no_grad()
    def speech(self, dtype: torch.dtype) -> FlowSpeech:
        """Flow and vocoder."""
        with allocating(self.device.torch_device, dtype):
            flow = CosyVoice3Flow(TINY_FLOW if self.tiny else None).requires_grad_(False).eval()
        fill_randomly(flow)
        flow.tabulate()
        return FlowSpeech(flow, self.vocoder)

    def codes(self, count: int, seed: int = 0) -> Tensor:
        """Some speech codes."""
        return torch.randint(6561, (count,), generator=torch.Generator().manual_seed(seed))

    def prompt(self, flow: StreamingFlow, seconds: float | None = None, seed: int = 0) -> VoicePrompt:
        """A voice of this length, cut so that the first hop has the usual codes."""
        generator = torch.Generator().manual_seed(seed)
        count = round((self.voice_seconds if seconds is None else seconds) * CODES_A_SECOND)
        mel = torch.randn(2 * count, flow.config.mel_bands, generator=generator)
        speaker = torch.randn(flow.config.speaker_dim, generator=generator)
        return flow.aligned(VoicePrompt(self.codes(count, seed), mel, speaker), CosyVoiceSettings().first_hop)

    def text(self, lm: CosyVoiceLM, codes: int, seed: int) -> tuple[list[Row], Generation]:
        """A sentence behind a reference of five seconds; just so many codes are made of it."""
        config, generator = lm.config, torch.Generator().manual_seed(seed)
        ids = torch.randint(256, (TRANSCRIPT_TOKENS + TEXT_TOKENS,), generator=generator).tolist()
        before = [config.end_of_prompt, *ids[:TRANSCRIPT_TOKENS]]
        rows = lm.prompt(ids[TRANSCRIPT_TOKENS:], before, self.codes(REFERENCE_CODES, seed).tolist())
        return rows, Generation(PUBLISHED, max_new_rows=codes, min_new_rows=codes, seed=seed)
