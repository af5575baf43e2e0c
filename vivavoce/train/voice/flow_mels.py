"""A corpus's mels as the flow decoder makes them from its codes: what the vocoder meets in use."""

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.models.flow import FlowDecoder
from vivavoce.models.flow_state import FlowPass, Pasts, VoicePrompt
from vivavoce.nn.chunk_mask import KeySpan
from vivavoce.nn.past import Silence
from vivavoce.train.voice.flow_lessons import CodedSpeech
from vivavoce.train.voice.teacher import TeacherSpeech

LEFT_CHUNKS = 4


@torch.no_grad()
def flow_mels(flow: FlowDecoder, speech: CodedSpeech, prompt: VoicePrompt, codes: int = 125, rows: int = 32) -> Tensor:
    """The mel of every code, in passages of so many codes behind the prompt.  # [code · ratio, band]"""
    device, config = speech.codes.device, flow.config
    begins = torch.arange(0, len(speech.codes), codes, device=device)
    places = begins[:, None] + torch.arange(codes + config.lookahead, device=device)
    passages = speech.codes[places.clamp(max=len(speech.codes) - 1)]
    mels = [_passage_mels(flow, some, prompt) for some in passages.split(rows)]
    return torch.cat(mels).flatten(0, 1)[: len(speech.codes) * config.ratio]


def _passage_mels(flow: FlowDecoder, passages: Tensor, prompt: VoicePrompt) -> Tensor:
    rows, device, config = len(passages), passages.device, flow.config
    length = len(prompt.codes)
    codes = torch.cat([prompt.codes.to(device).expand(rows, -1), passages], dim=1)
    time = codes.shape[1] - config.lookahead
    nowhere = torch.zeros(rows, dtype=torch.int64, device=device)
    sink = max(0, (length - config.lookahead) // config.chunk * config.chunk)
    span = KeySpan(nowhere, time, nowhere + sink)
    prompt_mel = torch.zeros(rows, time * config.ratio, config.mel_bands, device=device)
    prompt_mel[:, : length * config.ratio] = prompt.mel.to(device)
    speaker = flow.spk_embed_affine_layer(functional.normalize(prompt.speaker.to(device), dim=0)).expand(rows, -1)
    pasts = Pasts(Silence(), Silence(), lambda step: Silence())
    mel = flow.decode(FlowPass(codes, speaker, prompt_mel, span, pasts, config.chunk, LEFT_CHUNKS))
    return mel[:, length * config.ratio :]


def with_flow_mels(speech: TeacherSpeech, utterances: Tensor, coded: CodedSpeech, mels: Tensor) -> Tensor:
    """The mels of speech, those of the coded utterances in it replaced.  # [frame, band]"""
    replaced = speech.mel.clone()
    begins, ends = coded.starts[:-1].tolist(), coded.starts[1:].tolist()
    for utterance, begin, end in zip(utterances.tolist(), begins, ends, strict=True):
        first, count = int(speech.starts[utterance]), (end - begin) * coded.ratio
        replaced[first : first + count] = mels[begin * coded.ratio : end * coded.ratio]
    return replaced
