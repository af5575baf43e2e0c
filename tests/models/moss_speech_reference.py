"""MOSS-Speech assembled from transformers' Qwen3 layers, and its published generation loop: an independent reference.

Everything is recomputed from the whole grid at each step; no cache, no batch, nothing of ours but the weights.
"""

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from vivavoce.models.moss_speech.model import MossSpeechConfig


class ReferenceBlock(nn.Module):
    def __init__(self, config: Qwen3Config, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, index) for index in range(layers))


class ReferenceTrunk(nn.Module):
    def __init__(self, config: MossSpeechConfig, qwen: Qwen3Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.audio_embed = nn.Embedding(config.audio_vocab_size, config.hidden_size)
        self.shared_block = ReferenceBlock(qwen, config.num_shared_layers)
        self.text_block = ReferenceBlock(qwen, config.num_modality_layers)
        self.audio_block = ReferenceBlock(qwen, config.num_modality_layers)
        self.text_norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.audio_norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)


class Reference(nn.Module):
    def __init__(self, config: MossSpeechConfig) -> None:
        super().__init__()
        self.config = config
        qwen = Qwen3Config(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_shared_layers + config.num_modality_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
        qwen._attn_implementation = "eager"
        self.model = ReferenceTrunk(config, qwen)
        self.text_lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.audio_lm_head = nn.Linear(config.hidden_size, config.audio_vocab_size, bias=False)
        self.rotary = [Qwen3RotaryEmbedding(qwen)]  # in a list: no part of the state dict

    @torch.no_grad()
    def forward(self, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of both heads at every row.  # [row, 2] → [row, vocabulary] twice"""
        text, audio = grid[:, 0], grid[:, 1]
        is_speech = text == self.config.modality_pad_token_id
        x = self.model.embed_tokens(text)
        x[is_speech] = self.model.audio_embed(audio[is_speech])
        x = x[None]
        length = grid.shape[0]
        positions = self.rotary[0](x, torch.arange(length)[None])
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)[None, None]

        def run(block: ReferenceBlock, x: torch.Tensor) -> torch.Tensor:
            for layer in block.layers:
                out = layer(x, attention_mask=mask, position_embeddings=positions)
                x = out[0] if isinstance(out, tuple) else out
            return x

        shared = run(self.model.shared_block, x)
        text_states = self.model.text_norm(run(self.model.text_block, shared))
        audio_states = self.model.audio_norm(run(self.model.audio_block, shared))
        return self.text_lm_head(text_states)[0], self.audio_lm_head(audio_states)[0]

    def generate_greedily(
        self, prompt: list[tuple[int, int]], max_new: int, min_new: int = 0, penalty: float = 1.0
    ) -> list[tuple[int, int]]:
        """The published loop, one full forward a row."""
        config = self.config
        grid = list(prompt)
        speaking = grid[-1][0] == config.modality_pad_token_id
        if grid[-1][1] == config.audio_pad_token_id:
            speaking = False
        made: list[tuple[int, int]] = []
        for number in range(1, max_new + 1):
            if not speaking and grid[-1][0] == config.sosp_token_id:
                speaking = True
            if speaking and grid[-1][1] == config.eosp_token_id:
                speaking = False
            text, audio = (logits[-1].float().clone() for logits in self.forward(torch.tensor(grid)))
            audio[config.eosp_token_id + 1 :] = float("-inf")
            if number < min_new:
                audio[config.eosp_token_id] = float("-inf")
            for logits, channel in ((text, 0), (audio, 1)):
                for token in {row[channel] for row in grid}:
                    logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
            row = (config.modality_pad_token_id if speaking else int(text.argmax()), int(audio.argmax()))
            grid.append(row)
            made.append(row)
            if row[0] in (config.eos_token_id, config.pad_token_id):
                break
        return made
