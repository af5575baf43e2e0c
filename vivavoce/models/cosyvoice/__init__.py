"""CosyVoice 2 and 3: text to speech codes, mel and sound, from the published folders."""

from vivavoce.models.cosyvoice.dit import CosyVoice3Flow, CosyVoice3FlowConfig
from vivavoce.models.cosyvoice.folder import CosyVoiceParts, CosyVoiceSpeechTokenizer, load_cosyvoice
from vivavoce.models.cosyvoice.lm import CosyVoiceLM, CosyVoiceLMConfig, CosyVoicePrompt

__all__ = [
    "CosyVoice3Flow",
    "CosyVoice3FlowConfig",
    "CosyVoiceLM",
    "CosyVoiceLMConfig",
    "CosyVoiceParts",
    "CosyVoicePrompt",
    "CosyVoiceSpeechTokenizer",
    "load_cosyvoice",
]
