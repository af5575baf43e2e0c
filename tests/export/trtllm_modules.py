"""Fakes of the parts of TensorRT-LLM that our two definitions of MOSS-Speech are written against.

TensorRT-LLM itself cannot be installed on a test machine. These have the documented names and arguments, and compute in
torch, so that a definition that misnames a weight, takes a layer twice or mixes up the tails fails a test.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.nn.attention import PagedAttention, RotaryTable, rotate
from vivavoce.nn.decoder import DecoderLayer
from vivavoce.nn.linear import Embedding, Linear, RMSNorm


def install(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Modules of these names with these contents, for the length of a test."""
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
        parts = name.split(".")
        for depth in range(1, len(parts)):
            parent = ".".join(parts[:depth])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))


# The engine path: layers with TensorRT-LLM's names.


class ColumnLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class TheirEmbedding(nn.Module):
    def __init__(self, entries: int, size: int, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(entries, size))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class RmsNorm(nn.Module):
    def __init__(self, normalized_shape: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(normalized_shape)), eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class TheirAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.size = config.head_size
        self.qkv = ColumnLinear(config.hidden_size, sum(self.heads) * self.size)
        self.dense = ColumnLinear(self.heads[0] * self.size, config.hidden_size)
        self.q_layernorm, self.k_layernorm = RmsNorm(self.size), RmsNorm(self.size)  # epsilon is not handed on
        self.rotary = RotaryTable(self.size, 64, config.rotary_base)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (-1, self.size)).split(self.heads, dim=1)
        positions = slice(0, len(x))
        query = rotate(self.q_layernorm(query), self.rotary.cos[positions], self.rotary.sin[positions])
        key = rotate(self.k_layernorm(key), self.rotary.cos[positions], self.rotary.sin[positions])
        sides = (side.transpose(0, 1)[None] for side in (query, key, value))
        mixed = functional.scaled_dot_product_attention(*sides, is_causal=True, enable_gqa=True)
        return self.dense(mixed[0].transpose(0, 1).flatten(1))


class QWenDecoderLayer(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.input_layernorm = RmsNorm(config.hidden_size, config.norm_epsilon)
        self.post_layernorm = RmsNorm(config.hidden_size, config.norm_epsilon)
        self.attention = TheirAttention(config)
        self.mlp = nn.ModuleDict(
            {name: ColumnLinear(config.hidden_size, config.intermediate_size) for name in ("fc", "gate")}
            | {"proj": ColumnLinear(config.intermediate_size, config.hidden_size)}
        )

    def forward(self, x: Tensor, use_cache: bool, kv_cache_params: Any, attention_params: Any) -> Any:
        assert attention_params == "filled"
        assert kv_cache_params.past_key_value == [f"place {self.layer_idx}"]  # every layer has its own cache entry
        x = x + self.attention(self.input_layernorm(x))
        normed = self.post_layernorm(x)
        x = x + self.mlp["proj"](functional.silu(self.mlp["fc"](normed)) * self.mlp["gate"](normed))
        return (x, f"present {self.layer_idx}") if use_cache else x


class DecoderLayerList(nn.ModuleList):
    def __init__(self, layer: type, config: Any) -> None:
        super().__init__([layer(config, index) for index in range(config.num_hidden_layers)])


class DecoderModelForCausalLM(nn.Module):
    def __init__(self, config: Any, transformer: nn.Module, lm_head: nn.Module | None) -> None:
        super().__init__()
        self.config, self.transformer, self.lm_head = config, transformer, lm_head

    def forward(self, input_ids: Tensor, **given: Any) -> Tensor:
        hidden, presents = self.transformer.forward(input_ids=input_ids, use_cache=True, hidden_states=None, **given)
        assert presents == tuple(f"present {index}" for index in range(self.config.num_hidden_layers))
        return self.lm_head(hidden)


class QWenModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vocab_embedding = TheirEmbedding(config.vocab_size, config.hidden_size)
        self.layers = DecoderLayerList(QWenDecoderLayer, config)
        self.ln_f = RmsNorm(config.hidden_size, config.norm_epsilon)

    def forward(self, input_ids: Tensor, use_cache: bool, kv_cache_params: Any, attention_params: Any, **_: Any) -> Any:
        x = self.vocab_embedding(input_ids)
        for index, layer in enumerate(self.layers):
            mine = SimpleNamespace(past_key_value=[kv_cache_params.past_key_value[index]])
            x, _ = layer(x, use_cache=True, kv_cache_params=mine, attention_params=attention_params)
        return self.ln_f(x), tuple(f"present {index}" for index in range(len(self.layers)))


class QWenForCausalLM(DecoderModelForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config, QWenModel(config), ColumnLinear(config.hidden_size, config.vocab_size))


class CacheParams:
    """`KeyValueCacheParams`: one entry a layer."""

    def __init__(self) -> None:
        self.past_key_value: list[str] | None = None

    def fill_none_tensor_list(self, count: int) -> None:
        self.past_key_value = [f"place {index}" for index in range(count)]


def engine_modules() -> dict[str, dict[str, Any]]:
    """What `moss_speech_network.py` imports."""
    return {
        "tensorrt_llm._utils": {"pad_vocab_size": lambda size, tp: -(-size // tp) * tp},
        "tensorrt_llm.functional": {
            "concat": lambda parts, dim: torch.cat(parts, dim=dim),
            "split": lambda x, size, dim: x.split(size, dim=dim),
        },
        "tensorrt_llm.layers": {"ColumnLinear": ColumnLinear, "Embedding": TheirEmbedding, "RmsNorm": RmsNorm},
        "tensorrt_llm.models": {"MODEL_MAP": {}, "QWenForCausalLM": QWenForCausalLM},
        "tensorrt_llm.models.modeling_utils": {
            "DecoderLayerList": DecoderLayerList,
            "DecoderModelForCausalLM": DecoderModelForCausalLM,
        },
        "tensorrt_llm.models.qwen.config": {"QWenConfig": SimpleNamespace},
        "tensorrt_llm.models.qwen.model": {"QWenDecoderLayer": QWenDecoderLayer},
        "tensorrt_llm.module": {"Module": nn.Module},
    }


# The PyTorch backend: layers with the published names, over our own cache in the place of its metadata.


class Qwen3DecoderLayer(DecoderLayer):
    def __init__(self, model_config: Any, layer_idx: int) -> None:
        config = model_config.pretrained_config
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        attention = PagedAttention(config.hidden_size, *heads, config.rms_norm_eps)
        super().__init__(attention, config.hidden_size, config.intermediate_size, config.rms_norm_eps)
        self.layer_idx = layer_idx
        self.rotary = RotaryTable(config.head_dim, 64, config.rope_theta)

    def forward(self, position_ids: Tensor, hidden_states: Tensor, attn_metadata: Any, residual: Any) -> Any:
        assert torch.equal(position_ids, attn_metadata.positions)
        return super().forward(hidden_states, residual, self.rotary, self.layer_idx, attn_metadata)


class Norm(RMSNorm):
    def __init__(self, hidden_size: int, eps: float, dtype: Any) -> None:
        super().__init__(hidden_size, eps)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.add(x, residual)


class DecoderModel(nn.Module):
    def __init__(self, model_config: Any) -> None:
        super().__init__()


class TorchCausalLM(nn.Module):
    def __init__(self, model: nn.Module, config: Any, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.model, self.lm_head = model, Linear(hidden_size, vocab_size)

    def forward(self, attn_metadata: Any, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.model(attn_metadata, input_ids=input_ids, position_ids=position_ids)
        return self.lm_head(hidden)


def torch_modules(registered: dict[str, type]) -> dict[str, dict[str, Any]]:
    """What `moss_speech_pytorch.py` imports."""

    def register(name: str) -> Any:
        return lambda model: registered.setdefault(name, model)

    return {
        "tensorrt_llm._torch.models.modeling_qwen3": {"Qwen3DecoderLayer": Qwen3DecoderLayer},
        "tensorrt_llm._torch.models.modeling_utils": {
            "DecoderModel": DecoderModel,
            "DecoderModelForCausalLM": TorchCausalLM,
            "register_auto_model": register,
        },
        "tensorrt_llm._torch.modules.embedding": {
            "Embedding": lambda entries, size, **_: Embedding(entries, size),
            "LMHead": lambda entries, size, **_: Linear(size, entries),
        },
        "tensorrt_llm._torch.modules.linear": {"TensorParallelMode": SimpleNamespace(COLUMN="column")},
        "tensorrt_llm._torch.modules.rms_norm": {"RMSNorm": Norm},
        "transformers": {
            "AutoConfig": SimpleNamespace(register=lambda *_, **__: None),
            "Qwen3Config": type("Qwen3Config", (), {}),
        },
    }


def namespace(content: dict[str, Any]) -> SimpleNamespace:
    """A config as their readers hand it on."""
    mapping = SimpleNamespace(tp_size=1, tp_group=None)
    return SimpleNamespace(**(content | {"mapping": mapping}))
