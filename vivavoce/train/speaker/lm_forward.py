"""MOSS-TTS-Nano as it learns: whole sequences and whole frames at once, with gradients, on the engine's weights."""

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.models.moss_tts_nano import TEXT, MossTTSNano, NanoLayer, NanoTransformer
from vivavoce.nn.rope import RotaryTable, rotate_pairs


def run_transformer(transformer: NanoTransformer, rotary: RotaryTable, x: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal layers over whole sequences.  # [sequence, time, hidden]"""
    cos, sin = rotary.cos[: x.shape[1]], rotary.sin[: x.shape[1]]

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        queries, keys = (rotate_pairs(each, cos, sin).transpose(1, 2) for each in (queries, keys))
        mixed = functional.scaled_dot_product_attention(queries, keys, values.transpose(1, 2), is_causal=True)
        return mixed.transpose(1, 2)

    for layer in transformer.h:
        assert isinstance(layer, NanoLayer)
        x = x + functional.dropout(layer.attn(layer.ln_1(x), attend), dropout)
        x = x + functional.dropout(layer.mlp(layer.ln_2(x)), dropout)
    normed: Tensor = transformer.ln_f(x)
    return normed


def global_states(model: MossTTSNano, rows: Tensor, dropout: float = 0.0) -> Tensor:
    """States of every row.  # [sequence, row, channel] → [sequence, row, hidden]"""
    embedded = model.embed(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
    return run_transformer(model.transformer, model.rotary, functional.dropout(embedded, dropout), dropout)


def frame_logits(model: MossTTSNano, hidden: Tensor, codes: Tensor, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    """Whether speech stops, and every code given those before it in its frame; the last codebook's is not looked at.

    # hidden [frame, hidden], codes [frame, codebook] → [frame, 2], [frame, codebook, code]
    """
    tables = model.audio_embeddings.weight
    slot = model.transformer.wte.weight[model.config.audio_assistant_slot_token_id]
    books, entries, _ = tables.shape
    first = torch.arange(0, (books - 1) * entries, entries, device=codes.device)
    before = functional.embedding(codes[:, :-1] + first, tables.flatten(0, 1))
    given = torch.cat([hidden[:, None], slot.expand_as(hidden)[:, None], before], dim=1)
    states = run_transformer(model.local_transformer, model.rotary, given, dropout)
    logits = torch.einsum("fbh,bch->fbc", states[:, 1:], tables)
    return model.stop_logits(states[:, 0]), logits.float()


def corrupt(rows: Tensor, most: float, entries: int) -> Tensor:
    """Rows some of whose codes are others than were said, up to this share of a sequence's.

    What a model reads when it speaks is what it said itself, mistakes and all.  # [sequence, row, channel]
    """
    codes = rows[..., TEXT + 1 :]
    share = torch.rand(len(rows), 1, 1, device=rows.device) * most
    is_wrong = (torch.rand(codes.shape, device=rows.device) < share) & (codes < entries)
    wrong = torch.where(is_wrong, torch.randint_like(codes, entries), codes)
    return torch.cat([rows[..., : TEXT + 1], wrong], dim=-1)


@torch.no_grad()
def initialise(model: MossTTSNano, seed: int = 0, deviation: float = 0.02) -> None:
    """Weights to start learning from, as GPT-2 has them."""
    device = model.transformer.wte.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    depth = {"transformer": len(model.transformer.h), "local_transformer": len(model.local_transformer.h)}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            into_residual = name.endswith(("c_proj.weight", "fc_out.weight"))
            shrink = (2 * depth[name.partition(".")[0]]) ** -0.5 if into_residual else 1.0
            parameter.normal_(0.0, deviation * shrink, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        parameter.requires_grad_(True)
