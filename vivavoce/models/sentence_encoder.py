"""Sentence embeddings by BERT with mean pooling, in the layout of sentence-transformers (all-MiniLM-L6-v2)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.errors import CheckpointError
from vivavoce.models.checkpoint import Checkpoint, load_weights
from vivavoce.models.registry import read_model_config
from vivavoce.models.tokenizers import TextTokenizer

MAX_TOKENS = 256  # of a text, as published; the rest is left out
BATCH = 32


@dataclass(frozen=True)
class BertConfig:
    """The sizes of a BERT."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The sizes in a folder's `config.json`; CheckpointError where it is no BERT."""
        config = read_model_config(folder)
        if config.get("model_type") != "bert":
            raise CheckpointError(f"{folder} has no BERT, which sentence embeddings need, such as all-minilm-l6-v2")
        if (
            config.get("hidden_act", "gelu") != "gelu"
            or config.get("position_embedding_type", "absolute") != "absolute"
        ):
            raise CheckpointError(f"{folder} has a BERT with another activation or position embedding")
        try:
            return cls(**{name: config[name] for name in cls.__dataclass_fields__})
        except KeyError as error:
            raise CheckpointError(f"{folder / 'config.json'} lacks {error}") from error


class _Embeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.position_embeddings.weight[: ids.shape[1]]
        summed = self.word_embeddings(ids) + positions + self.token_type_embeddings.weight[0]
        normed: Tensor = self.LayerNorm(summed)
        return normed


class _ResidualNorm(nn.Module):
    """A linear layer, the residual add and the norm."""

    def __init__(self, inputs: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(self.dense(x) + residual)
        return normed


class _SelfAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return mixed.transpose(1, 2).flatten(2)


class BertLayer(nn.Module):
    """Self-attention and feed-forward, each followed by its norm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        attended = _ResidualNorm(config.hidden_size, config)
        self.attention = nn.ModuleDict({"self": _SelfAttention(config), "output": attended})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, config.intermediate_size)})
        self.output = _ResidualNorm(config.intermediate_size, config)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """# [batch, token, hidden], [batch, 1, 1, token]"""
        x = self.attention["output"](self.attention["self"](x, visible), x)
        y: Tensor = self.output(functional.gelu(self.intermediate["dense"](x)), x)
        return y


class _Layers(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))


class Bert(nn.Module):
    """The encoder of BERT, without its pooler."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = _Embeddings(config)
        self.encoder = _Layers(config)

    def forward(self, ids: Tensor, visible: Tensor) -> Tensor:
        """Hidden states; `visible` is false where a text is padded.  # [batch, token] → [batch, token, hidden]"""
        x = self.embeddings(ids)
        for layer in self.encoder.layer:
            x = layer(x, visible[:, None, None])
        return x


class SentenceEncoder:
    """Texts to unit vectors, whose products are the similarity of what the texts say."""

    def __init__(self, model: Bert, tokenizer: TextTokenizer) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        ends = tokenizer.id_of("[CLS]"), tokenizer.id_of("[SEP]")
        if ends[0] is None or ends[1] is None:
            raise CheckpointError("the tokenizer of a sentence encoder needs [CLS] and [SEP]")
        self._first, self._last = ends[0], ends[1]
        self._max_tokens = min(MAX_TOKENS, model.config.max_position_embeddings) - 2

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The encoder in a folder."""
        model = Bert(BertConfig.read(folder))
        with Checkpoint(folder) as checkpoint:
            load_weights(model, checkpoint, allow_extra=True)  # the pooler is not used
        return cls(model, TextTokenizer.load(folder))

    @torch.inference_mode()
    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """A unit vector for each text.  # [text, hidden]"""
        rows = [[self._first, *self.tokenizer.encode(text)[: self._max_tokens], self._last] for text in texts]
        vectors = np.zeros((len(texts), self.model.config.hidden_size), np.float32)
        by_length = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        for begin in range(0, len(rows), BATCH):
            batch = by_length[begin : begin + BATCH]
            width = len(rows[batch[-1]])
            ids = torch.tensor([rows[index] + [0] * (width - len(rows[index])) for index in batch])
            lengths = torch.tensor([len(rows[index]) for index in batch])
            visible = torch.arange(width) < lengths[:, None]
            hidden = self.model(ids, visible) * visible[..., None]
            vectors[batch] = functional.normalize(hidden.sum(1) / lengths[:, None], dim=1).numpy()
        return vectors
