"""Conditional flow matching: from fixed noise to mel in a few Euler steps, under classifier-free guidance."""

import functools
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from vivavoce.nn.ahead import is_compiling_ahead
from vivavoce.nn.past import Past

MAX_FRAMES = 15_000
GUIDANCE_ROWS = 2  # with the conditions, and without


@functools.cache
def fixed_noise(bands: int, device: torch.device) -> Tensor:
    """The noise every reply starts from: the published models draw it once, from seed 0.  # [frame, band]"""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, bands, MAX_FRAMES, generator=generator, device="cpu", dtype=torch.float32)
    return noise[0].T.contiguous().to(device)


def cosine_times(steps: int, device: torch.device) -> Tensor:
    """Where the Euler steps begin and end: small steps first.  # [step + 1]"""
    return 1 - torch.cos(torch.linspace(0, 1, steps + 1, device=device) * (0.5 * math.pi))


class Estimator(Protocol):
    """What gives the velocity: a UNet in CosyVoice 2 and MOSS-Speech, a transformer in CosyVoice 3."""

    def time_conditions(self, times: Tensor) -> Tensor:
        """All that depends on the time alone.  # [step] → [step, …]"""
        ...

    def __call__(self, rows: Tensor, time_conditions: Tensor, bias: Tensor | None, past: Past) -> Tensor:
        """The velocity at one step.  # [row, frame, 4 · band], noise first → [row, frame, band]"""
        ...


class FlowMatching(nn.Module):
    """Solves the flow; the estimator runs on a batch of guided and unguided rows."""

    estimator: Estimator

    def __init__(self, estimator: Estimator, steps: int, guidance: float) -> None:
        super().__init__()
        self.steps = steps
        self.guidance = guidance
        self.estimator = estimator

    def forward(
        self,
        noise: Tensor,  # float32 [stream, frame, band]
        features: Tensor,  # [stream, frame, band]
        speaker: Tensor,  # [stream, band]
        prompt_mel: Tensor,  # [stream, frame, band], zero after the prompt
        bias: Tensor | None,  # [stream, 1, frame, key]
        past_at: Callable[[int], Past],
    ) -> Tensor:
        """The mel.  # float32 [stream, frame, band]"""
        times = cosine_times(self.steps, noise.device)
        time_conditions = self.estimator.time_conditions(times[:-1])
        conditions = torch.cat([features, speaker[:, None].expand_as(features), prompt_mel], dim=-1)
        guided = torch.stack([conditions, torch.zeros_like(conditions)], dim=1)
        if bias is not None:
            bias = bias.repeat_interleave(GUIDANCE_ROWS, dim=0)
        x = noise
        for step in range(1 if is_compiling_ahead() else self.steps):  # all of them launch the same kernels
            noisy = x.to(guided.dtype)[:, None].expand(-1, GUIDANCE_ROWS, -1, -1)
            rows = torch.cat([noisy, guided], dim=-1).flatten(0, 1)
            velocity = self.estimator(rows, time_conditions[step], bias, past_at(step)).float()
            with_conditions, without = velocity.unflatten(0, (-1, GUIDANCE_ROWS)).unbind(1)
            velocity = (1 + self.guidance) * with_conditions - self.guidance * without
            x = x + (times[step + 1] - times[step]) * velocity
        return x
