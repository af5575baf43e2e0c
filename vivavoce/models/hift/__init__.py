"""The HiFT vocoders: mel frames to 24 kHz sound."""

from vivavoce.models.hift.causal import CausalHiFT, CausalHiFTConfig
from vivavoce.models.hift.cpu import CpuHiFT
from vivavoce.models.hift.cuda import GraphedCausalHiFT, GraphedVocoder
from vivavoce.models.hift.model import HiFT, HiFTConfig
from vivavoce.models.hift.stream import HiFTStream, PublishedHiFTStream

__all__ = [
    "CausalHiFT",
    "CausalHiFTConfig",
    "CpuHiFT",
    "GraphedCausalHiFT",
    "GraphedVocoder",
    "HiFT",
    "HiFTConfig",
    "HiFTStream",
    "PublishedHiFTStream",
]
