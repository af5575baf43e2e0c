"""Greedy replies to many prompts at once, by the training forward: for exams during a course."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vivavoce.models.interface import Row
from vivavoce.models.moss_speech import AUDIO, TEXT, MossSpeech
from vivavoce.train.language.forward import TrainingKVCache, hidden_states

ALIGNED = 16  # columns of a mask, as attention kernels like them
LOOK_EVERY = 16  # rows between two looks whether all replies are over: each look waits for the device


@torch.no_grad()
def greedy_replies(
    model: MossSpeech, prompts: Sequence[Sequence[Row]], most_rows: int, at_once: int = 256
) -> list[list[Row]]:
    """The reply to each prompt, as the engine makes it at temperature 0, end row included."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    replies: dict[int, list[Row]] = {}
    for begin in range(0, len(order), at_once):
        chosen = order[begin : begin + at_once]
        made = _batch(model, [prompts[index] for index in chosen], most_rows).tolist()
        for index, rows in zip(chosen, made, strict=True):
            replies[index] = _until_end(model, [tuple(row) for row in rows])
    return [replies[index] for index in range(len(prompts))]


def _until_end(model: MossSpeech, rows: list[Row]) -> list[Row]:
    end = next((number for number, row in enumerate(rows, start=1) if model.ends(row)), len(rows))
    return rows[:end]


def _batch(model: MossSpeech, prompts: list[Sequence[Row]], most_rows: int) -> Tensor:
    """So many rows after each prompt, those after its end without meaning.  # [prompt, row, 2]"""
    device = model.model.audio_embed.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = max(len(prompt) for prompt in prompts)
    filler = (model.config.pad_token_id, model.config.audio_pad_token_id)
    padded = [[*prompt, *[filler] * (longest - len(prompt))] for prompt in prompts]
    rows = torch.tensor(padded, device=device)
    modes = torch.tensor([model.start_mode(tuple(prompt[-1])) for prompt in prompts], device=device)
    room = -(-(longest + most_rows) // ALIGNED) * ALIGNED
    past = TrainingKVCache.allocate(model, len(prompts), room)
    columns = torch.arange(room, device=device)

    def look(rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states(model, rows, positions, columns <= positions[..., None], past=past)

    # What follows a shorter prompt is filler that no row sees, and new rows are written over it.
    text, audio = look(rows, columns[:longest].expand(len(prompts), -1))
    pick = (torch.arange(len(prompts), device=device), lengths - 1)
    text, audio = text[pick], audio[pick]
    made: list[Tensor] = []
    over = torch.zeros_like(lengths, dtype=torch.bool)
    for number in range(most_rows):
        row, modes = _next(model, text, audio, modes)
        made.append(row)
        over |= (row[:, TEXT] == model.config.eos_token_id) | (row[:, TEXT] == model.config.pad_token_id)
        if number % LOOK_EVERY == LOOK_EVERY - 1 and bool(over.all()):
            break
        text, audio = (state[:, 0] for state in look(row[:, None], (lengths + number)[:, None]))
    return torch.stack(made, dim=1)


def _next(model: MossSpeech, text: Tensor, audio: Tensor, modes: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest row of each sequence, and the mode after it."""
    config = model.config
    written = model.text_lm_head(text).argmax(-1)
    spoken = model.audio_lm_head(audio)[:, : config.eosp_token_id + 1].argmax(-1)
    row = torch.stack([torch.where(modes == AUDIO, config.modality_pad_token_id, written), spoken], dim=1)
    modes = torch.where(row[:, TEXT] == config.sosp_token_id, AUDIO, modes)
    return row, torch.where((modes == AUDIO) & (spoken == config.eosp_token_id), TEXT, modes)
