"""Random CosyVoice 3 models of published or small shapes with inputs, and the check that half precision is finite."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from vivavoce.device import Device
from vivavoce.engine.sampling import Generation
from vivavoce.models.cosyvoice.dit import CosyVoice3Flow, CosyVoice3FlowConfig, DiTConfig, LookaheadConfig
from vivavoce.models.cosyvoice.lm import CosyVoiceLM, CosyVoiceLMConfig
from vivavoce.models.flow.model import FlowSpeech
from vivavoce.models.flow.state import FlowVoice, VoicePrompt
from vivavoce.models.flow.stream import StreamingFlow
from vivavoce.models.hift.causal import CausalHiFT, CausalHiFTConfig
from vivavoce.models.interface import Row
from vivavoce.nn.modules import allocating, fill_randomly
from vivavoce.tts.cosyvoice import CODES_A_SECOND, PUBLISHED, CosyVoiceSettings

LEFT_CHUNKS = CosyVoiceSettings().left_chunks
assert LEFT_CHUNKS is not None
TEXT_TOKENS, TRANSCRIPT_TOKENS, REFERENCE_CODES = 30, 25, 125  # a sentence and a five-second reference
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
    """Models and inputs of one benchmark run."""

    device: Device
    dtype: torch.dtype
    tiny: bool
    lm_layers: list[Tensor] = field(default_factory=list)
    """Matrices read for every generated code."""

    @property
    def reply_codes(self) -> int:
        """Codes generated per text: ten seconds, or two."""
        return 50 if self.tiny else 250

    @property
    def extreme_runs(self) -> int:
        """Runs with out-of-range inputs."""
        return 8 if self.tiny else 64

    @property
    def voice_seconds(self) -> float:
        """Length of the voice prompt: the maximum, or less on a CPU."""
        return CosyVoiceSettings().prompt_seconds if self.tiny or self.device.kind != "cpu" else 2.0

    def lm(self) -> CosyVoiceLM:
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
        with allocating(self.device.torch_device, dtype):
            flow = CosyVoice3Flow(TINY_FLOW if self.tiny else None).requires_grad_(False).eval()
        fill_randomly(flow)
        flow.tabulate()
        return FlowSpeech(flow, self.vocoder)

    def codes(self, count: int, seed: int = 0) -> Tensor:
        return torch.randint(6561, (count,), generator=torch.Generator().manual_seed(seed))

    def prompt(self, flow: StreamingFlow, seconds: float | None = None, seed: int = 0) -> VoicePrompt:
        """A random voice prompt, aligned so that the first hop has its usual size."""
        generator = torch.Generator().manual_seed(seed)
        count = round((self.voice_seconds if seconds is None else seconds) * CODES_A_SECOND)
        mel = torch.randn(2 * count, flow.config.mel_bands, generator=generator)
        speaker = torch.randn(flow.config.speaker_dim, generator=generator)
        return flow.aligned(VoicePrompt(self.codes(count, seed), mel, speaker), CosyVoiceSettings().first_hop)

    def text(self, lm: CosyVoiceLM, codes: int, seed: int) -> tuple[list[Row], Generation]:
        """Prompt rows of a sentence after a five-second reference; exactly `codes` codes are generated."""
        config, generator = lm.config, torch.Generator().manual_seed(seed)
        ids = torch.randint(256, (TRANSCRIPT_TOKENS + TEXT_TOKENS,), generator=generator).tolist()
        prefix = [config.end_of_prompt, *ids[:TRANSCRIPT_TOKENS]]
        rows = lm.prompt(ids[TRANSCRIPT_TOKENS:], prefix, self.codes(REFERENCE_CODES, seed).tolist())
        return rows, Generation(PUBLISHED, max_new_rows=codes, min_new_rows=codes, seed=seed)


LOUD = 30.0  # a log-mel value outside the range of real audio
EXTREME_SCALE = 1e4  # scale of the speaker vector
PROMPT_SECONDS = 2.0
HOPS = ((28, False), (10, True))  # codes, and whether this is the final hop
BATCH = 16


def finite(setup: CosyVoiceBenchSetup) -> dict[str, int]:
    """Runs with non-finite output, by precision."""
    counts, runs = {}, range(setup.extreme_runs)
    for dtype in (torch.float16, torch.bfloat16):
        if dtype not in setup.device.dtypes:
            continue
        name, began, failed = str(dtype).removeprefix("torch."), time.perf_counter(), 0
        speech = setup.speech(dtype)
        voices = _voices(setup, speech)
        for first in runs[::BATCH]:
            batch = runs[first : first + BATCH]
            failed += _are_finite(setup, speech, voices, batch).count(False)
            print(f"  {name}: {batch.stop} runs, {failed} not finite, {time.perf_counter() - began:.1f} s", flush=True)
        counts[f"{name}_not_finite_of_{len(runs)}"] = failed
    return counts


def _voices(setup: CosyVoiceBenchSetup, speech: FlowSpeech) -> list[FlowVoice]:
    """Extreme voice prompts: maximal or minimal mel, zero or very large speaker vector, two of each."""
    voices = []
    for seed, is_loud, is_extreme in product(range(2), (True, False), (True, False)):
        prompt = setup.prompt(speech.flow, PROMPT_SECONDS, seed)
        prompt.mel = prompt.mel.sign() * LOUD if is_loud else torch.full_like(prompt.mel, -LOUD)
        prompt.speaker = prompt.speaker * (EXTREME_SCALE if is_extreme else 0.0)
        voices.append(speech.flow.voice(prompt))
    return voices


def _are_finite(
    setup: CosyVoiceBenchSetup, speech: FlowSpeech, voices: Sequence[FlowVoice], numbers: Sequence[int]
) -> list[bool]:
    """Whether the audio of each run is finite over all hops; every third run repeats one code."""
    states = [speech.start(voices[number % len(voices)], LEFT_CHUNKS, number) for number in numbers]
    is_finite = torch.ones(len(numbers), dtype=torch.bool, device=setup.device.torch_device)
    for size, is_last in HOPS:
        codes = [setup.codes(size, number) if number % 3 else torch.zeros(size).long() for number in numbers]
        sounds, states = speech.step_batch(states, codes, [is_last] * len(numbers))
        is_finite &= torch.stack([sound.isfinite().all() for sound in sounds])
    finite_runs: list[bool] = is_finite.tolist()
    return finite_runs
