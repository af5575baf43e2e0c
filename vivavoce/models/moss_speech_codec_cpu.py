"""MOSS-Speech's codec on a CPU: `flow_cpu.py` and `hift_cpu.py` in the place of flow and vocoder."""

from vivavoce.models.flow_cpu import CpuFlow
from vivavoce.models.flow_state import FlowVoice
from vivavoce.models.hift_cpu import CpuHiFT
from vivavoce.models.hift_stream import HiFTStream
from vivavoce.models.moss_speech_codec import MossSpeechCodec


class CpuCodec(MossSpeechCodec):
    """A codec, on the weights of another, that speaks sooner; its sound is that of the other but for rounding."""

    def __init__(self, codec: MossSpeechCodec) -> None:
        self.ear, self.speaker, self.mel = codec.ear, codec.speaker, codec.mel
        self.named = codec.named
        self.ready: dict[str, FlowVoice] = {}
        self.flow = CpuFlow(codec.flow) if CpuFlow.suits(codec.flow) else codec.flow
        vocoder = codec.vocoder.hift
        self.vocoder = HiFTStream(CpuHiFT(vocoder) if CpuHiFT.suits(vocoder) else vocoder, codec.vocoder.delay_frames)
