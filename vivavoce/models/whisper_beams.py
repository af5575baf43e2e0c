"""Beam search over the texts of one window: several are followed side by side and share the window's memory.

At every step each text goes on in its likeliest ways; of all these, those that end are finished, and the likeliest of
the others are followed. It is over when as many are finished as are followed, or when there is no place left.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vivavoce.models.whisper import DecoderState, Whisper, WindowMemory
from vivavoce.models.whisper_decoding import Text, best_text, no_speech_chances
from vivavoce.models.whisper_rules import LogitRule, apply
from vivavoce.models.whisper_tokens import WhisperTokens


@torch.inference_mode()
def beam_search(
    model: Whisper,
    tokens: WhisperTokens,
    memory: WindowMemory,
    prompt: Sequence[int],
    rules: Sequence[LogitRule] = (),
    beams: int = 5,
    most: int | None = None,
) -> Text:
    """The text of one window with the highest rank among those that `beams` texts lead to."""
    decoder, room = model.decoder, model.config.max_target_positions - len(prompt)
    steps = min(room, model.config.max_target_positions // 2 if most is None else most)
    rows = torch.tensor([list(prompt)] * beams, device=memory.keys.device)
    hidden, state = decoder.step(decoder.initial_state(memory, beams), rows)
    (silence,) = no_speech_chances(decoder, tokens, hidden[:1], rows[:1])
    sampled = rows[:, :0]
    totals = torch.full((beams,), -torch.inf, device=rows.device)
    totals[0] = 0.0  # all rows are the same at first: only one of them may branch
    finished: list[Text] = []
    for step in range(steps):
        chances = apply(rules, decoder.logits(hidden[:, -1]), sampled).log_softmax(-1)
        followed = follow(totals, chances, sampled, beams, tokens.endoftext, silence, finished)
        if followed is None:
            totals = torch.full_like(totals, -torch.inf)  # every candidate has ended
        if followed is None or len(finished) >= beams:
            break
        parents, totals, sampled = followed
        if step + 1 == steps:
            break
        hidden, state = decoder.step(DecoderState(state.past.picked(parents), memory), sampled[:, -1:])
    if len(finished) < beams:
        finished += [
            Text(row, float(total), False, silence)
            for row, total in zip(sampled.tolist(), totals, strict=True)
            if torch.isfinite(total)
        ]
    return best_text(finished)


def follow(
    totals: Tensor, chances: Tensor, sampled: Tensor, beams: int, end: int, silence: float, finished: list[Text]
) -> tuple[list[int], Tensor, Tensor] | None:
    """The next texts to follow with their parents and totals; those that end join the finished."""
    scores = (totals[:, None] + chances).flatten()
    best, places = scores.topk(min(2 * beams, scores.shape[0]))
    kept: list[tuple[int, int, float]] = []
    for total, place in zip(best.tolist(), places.tolist(), strict=True):
        row, token = divmod(place, chances.shape[1])
        if total == float("-inf") or len(kept) == beams:
            break
        if token == end and len(finished) >= beams:
            continue
        if token == end:
            finished.append(Text(sampled[row].tolist(), total, True, silence))
        else:
            kept.append((row, token, total))
    if not kept:
        return None
    kept += [(kept[0][0], kept[0][1], float("-inf"))] * (beams - len(kept))
    parents = [row for row, _, _ in kept]
    added = torch.tensor([[token] for _, token, _ in kept], device=sampled.device)
    after = torch.cat([sampled[parents], added], dim=1)
    return parents, torch.tensor([total for _, _, total in kept], device=totals.device), after
