"""The loss of the language model: the next row of packed conversations, with changes to some codes of the input."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.models.moss_speech.model import AUDIO, TEXT, MossSpeech, MossSpeechConfig
from vivavoce.train.lm import CodeJitter, hidden_states, within_segments
from vivavoce.train.lm.batches import REPLY_SPEECH, REPLY_SPEECH_CONTEXT, REPLY_TEXT, USER_SPEECH
from vivavoce.train.lm.recipe import LMRecipe
from vivavoce.train.loop import Batch, LossFunction


def make_loss(model: MossSpeech, recipe: LMRecipe, dropout: float) -> LossFunction:
    """Next-row loss of a packed batch: reply text, reply speech, and user speech with a small weight."""
    is_lattice = math.prod(recipe.lattice) == model.config.eosp_token_id
    jitter = CodeJitter(recipe.lattice, model.text_lm_head.weight.device) if is_lattice else None

    def loss(batch: Batch) -> dict[str, Tensor]:
        packed = batch["packed"].long()
        rows, positions, segments, kinds = packed[..., :2], packed[..., 2], packed[..., 3], packed[..., 4]
        inputs = rows if jitter is None else jittered(jitter, rows, kinds, recipe.heard_stray)
        inputs = corrupted_codes(model.config, inputs, kinds, recipe.heard_noise, recipe.said_noise)
        text, audio = hidden_states(model, inputs, positions, within_segments(segments), dropout)
        following, kind = rows[:, 1:], kinds[:, 1:]
        written = _cross_entropy(model.text_lm_head(text[:, :-1]), following[..., TEXT])
        spoken, is_right = _audio_cross_entropy(model.audio_lm_head(audio[:, :-1]), following[..., AUDIO])
        parts = {
            "text": _mean(written, kind == REPLY_TEXT),
            "speech": _mean(spoken, kind == REPLY_SPEECH),
            "heard": _mean(spoken, kind == USER_SPEECH),
        }
        total = parts["text"] + parts["speech"] + recipe.heard_weight * parts["heard"]
        return {"loss": total, **parts, "speech_right": _mean(is_right.float(), kind == REPLY_SPEECH)}

    return loss


def jittered(jitter: CodeJitter, rows: Tensor, kinds: Tensor, max_probability: float) -> Tensor:
    """Rows with jitter on user codes.  # [line, row, 2]"""
    if not max_probability:
        return rows
    audio, text = rows[..., AUDIO], rows[..., TEXT]
    near = jitter(audio.clamp(max=jitter.size - 1), max_probability * torch.rand(rows.shape[0], 1, device=rows.device))
    return torch.stack([text, torch.where((kinds == USER_SPEECH) & (audio < jitter.size), near, audio)], dim=-1)


def corrupted_codes(
    config: MossSpeechConfig, rows: Tensor, kinds: Tensor, user_share: float, reply_share: float
) -> Tensor:
    """Rows with some codes masked or replaced.  # [line, row, 2]"""
    if not user_share and not reply_share:
        return rows
    audio, text = rows[..., AUDIO], rows[..., TEXT]
    share = torch.rand(rows.shape[0], 1, device=rows.device)
    is_reply = (kinds == REPLY_SPEECH) | (kinds == REPLY_SPEECH_CONTEXT)
    rate = torch.where(kinds == USER_SPEECH, user_share, torch.where(is_reply, reply_share, 0.0)) * share
    rate = rate.masked_fill(audio == config.eosp_token_id, 0.0)
    drawn = torch.rand(audio.shape, device=rows.device)
    others = torch.randint(0, config.eosp_token_id, audio.shape, device=rows.device)
    replacement = torch.where(drawn < rate * 0.5, config.audio_pad_token_id, others)
    return torch.stack([text, torch.where(drawn < rate, replacement, audio)], dim=-1)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def _audio_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return _cross_entropy(logits, targets), logits.detach().argmax(-1) == targets


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    return (values * chosen).sum() / chosen.sum().clamp(min=1)
