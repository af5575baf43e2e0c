"""MOSS-Speech's codec on a CPU: `flow_cpu.py` and `hift_cpu.py` in the place of flow and vocoder."""

import torch

from vivavoce.models.flow_cpu import CpuFlow
from vivavoce.models.flow_state import FlowVoice
from vivavoce.models.hift_cpu import CpuHiFT
from vivavoce.models.hift_stream import HiFTStream
from vivavoce.models.moss_speech_codec import MossSpeechCodec


class CpuCodec(MossSpeechCodec):
    """A codec, on the weights of another, that speaks sooner; its sound is that of the other but for rounding.

    The voice multiplies in `dtype`: bfloat16 where the CPU has tiles for it. On the bundled weights the rounding error
    of the flow's mel and of the vocoder's sound of one mel is then 50 dB below the signal, on random weights 44 and
    30 dB. The waveform of a whole reply agrees less (13 dB): a mel that differs slightly has a pitch that differs
    slightly, and the excitation's phase adds that up. Its log spectrum differs by 1 dB on average.
    """

    def __init__(self, codec: MossSpeechCodec, dtype: torch.dtype = torch.float32) -> None:
        self.ear, self.speaker, self.mel = codec.ear, codec.speaker, codec.mel
        self.named = codec.named
        self.ready: dict[str, FlowVoice] = {}
        self.flow = CpuFlow(codec.flow, dtype) if CpuFlow.suits(codec.flow) else codec.flow
        vocoder = codec.vocoder.hift
        flat = CpuHiFT(vocoder, dtype) if CpuHiFT.suits(vocoder) else vocoder
        self.vocoder = HiFTStream(flat, codec.vocoder.delay_frames)
