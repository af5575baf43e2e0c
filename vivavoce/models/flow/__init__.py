"""The flow-matching decoder of MOSS-Speech and CosyVoice 2: speech codes to mel frames."""

from vivavoce.models.flow.cpu import CpuFlow
from vivavoce.models.flow.cuda import GraphedFlow
from vivavoce.models.flow.model import FlowConfig, FlowDecoder, FlowSpeech, SpokenState
from vivavoce.models.flow.state import FlowState, FlowVoice, VoicePrompt

__all__ = [
    "CpuFlow",
    "FlowConfig",
    "FlowDecoder",
    "FlowSpeech",
    "FlowState",
    "FlowVoice",
    "GraphedFlow",
    "SpokenState",
    "VoicePrompt",
]
