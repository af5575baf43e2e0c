"""Whisper's log-mel of many sounds of different lengths at once, each as it would be alone."""

import torch
from torch import Tensor, nn

from vivavoce.audio.mel import WHISPER_SPEECH_MAXIMUM, WhisperMel, whisper_normalise, whisper_normalise_running

SILENCE = -10.0  # log10 of the smallest power that a log-mel holds
REACH = WhisperMel.N_FFT // 2  # how far a frame sees past its centre


class BatchMel(nn.Module):
    """Rows of samples, each with its own length, to normalised log-mels; frames past a row's end are silence."""

    def __init__(self, bins: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.mel = WhisperMel(bins).to(device)

    @torch.no_grad()
    def forward(self, samples: Tensor, lengths: Tensor, running: bool = False) -> Tensor:
        """Each row by its own maximum, or as a stream hears it by the maximum so far.

        # [batch, time], [batch] → [batch, bins, time // 160]
        """
        power = self.log_mel_power(samples, lengths)
        if running:
            return whisper_normalise_running(power, power.new_full((len(power),), WHISPER_SPEECH_MAXIMUM))[0]
        return whisper_normalise(power, power.amax(dim=(-2, -1)))

    @torch.no_grad()
    def log_mel_power(self, samples: Tensor, lengths: Tensor) -> Tensor:
        """The log-mels before normalisation.  # [batch, time], [batch] → [batch, bins, time // 160]"""
        with torch.autocast(samples.device.type, enabled=False):
            power = self.mel.log_mel_power(_reflected(samples.float(), lengths))
        power = power[..., : samples.shape[-1] // WhisperMel.HOP]
        frame = torch.arange(power.shape[-1], device=power.device)
        past = frame >= (lengths // WhisperMel.HOP)[:, None]
        return power.masked_fill(past[:, None], SILENCE)


def _reflected(samples: Tensor, lengths: Tensor) -> Tensor:
    """Rows that go on as their own mirror image where they end, for as long as a frame sees.  # [batch, time + 200]"""
    time = torch.arange(samples.shape[-1] + REACH, device=samples.device)
    past = time - lengths[:, None]  # [batch, time], 0 at the first sample that is not there
    mirrored = torch.where(past < 0, time, lengths[:, None] - 2 - past)
    known = (past < REACH) & ((past < 0) | (lengths[:, None] > REACH))
    padded = samples.gather(1, mirrored.clamp(0, samples.shape[-1] - 1))
    return padded.masked_fill(~known, 0.0)
