"""Medusa heads for a Whisper: from the newest state, the tokens of several places ahead, in one pass.

What comes two tokens on is in the sound, not in the state the next token was drawn from. So a head sees the token that
was drawn and looks at the window once more, by the keys and values the last decoder layer has of it anyway; then
come a feed-forward and, for each place ahead, the residual block of Medusa. All of it is zero at first: the guess
before any training is that the state stays as it is. The trunk's own vocabulary makes tokens of the states. Before a
text has a state there is one that the heads learnt in its place, so that a text's first pass checks guesses already.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.errors import InputError
from vivavoce.models.whisper import WhisperDecoder
from vivavoce.models.whisper_config import WhisperConfig
from vivavoce.models.whisper_draft import TrainedBeside, write_draft

PLACES = 5
Look = Callable[[Tensor], Tensor]
"""Queries to what their windows answer.  # […, place, head, head_dim] → the same"""


class WhisperHeads(TrainedBeside):
    """One state for each place ahead."""

    kind = "heads"

    def __init__(self, d_model: int, heads: int, ffn: int, places: int = PLACES) -> None:
        super().__init__()
        if places < 1:
            raise InputError(f"heads look at least 1 token ahead, not {places}")
        self.heads, self.places = heads, places
        self.start = nn.Parameter(torch.zeros(d_model))
        self.ahead = nn.Embedding(places, d_model)
        self.newest_proj = nn.Linear(d_model, d_model, bias=False)
        self.look_norm = nn.LayerNorm(d_model)
        self.q_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.final_norm = nn.LayerNorm(d_model)
        self.fc1 = nn.Linear(d_model, ffn)
        self.fc2 = nn.Linear(ffn, d_model)
        self.weight = nn.Parameter(torch.zeros(places, d_model, d_model))
        self.bias = nn.Parameter(torch.zeros(places, d_model))
        for added in (self.ahead, self.newest_proj, self.out_proj, self.fc2):
            for parameter in added.parameters():
                nn.init.zeros_(parameter)

    @classmethod
    def beside(cls, decoder: WhisperDecoder, places: int = PLACES) -> "WhisperHeads":
        """Fresh heads for a decoder, which look at the window as its last layer does."""
        config, last = decoder.config, decoder.stack[-1].encoder_attn
        made = cls(config.d_model, config.decoder_attention_heads, 2 * config.d_model, places)
        made.q_proj.load_state_dict(last.q_proj.state_dict())
        return made.to(last.q_proj.weight.device)

    def forward(self, hidden: Tensor, newest: Tensor, look: Look) -> Tensor:
        """The states of the places ahead.  # [.., d_model], [.., d_model] → [.., place, d_model]

        `hidden` is the state the newest token was drawn from, or `start` where it was not drawn; `newest` is that
        token's embedding.
        """
        x = hidden[..., None, :] + self.ahead.weight + self.newest_proj(newest)[..., None, :]
        query = self.q_proj(self.look_norm(x)).unflatten(-1, (self.heads, -1))
        x = x + self.out_proj(look(query).flatten(-2))
        x = x + self.fc2(functional.gelu(self.fc1(self.final_norm(x))))
        changed = [functional.linear(x[..., p, :], self.weight[p], self.bias[p]) for p in range(self.places)]
        return x + functional.silu(torch.stack(changed, dim=-2))

    def save(self, folder: str | Path, config: WhisperConfig) -> None:
        """Write weights and sizes, and which model they belong to."""
        sizes = {"heads": self.heads, "ffn": self.fc1.out_features, "places": self.places}
        write_draft(self, folder, self.kind, config, sizes)
