# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202, ANN204
"""MOSS-Speech in TensorRT-LLM's own layers, for `trtllm-build --model_cls_file` (versions 1.0 to 1.3.0rc20).

This file is copied into an exported checkpoint and imports nothing else of this package.
`MossSpeechForCausalLM` is the whole model over the joint vocabulary (text ids, then audio codes): its logits are the
text head's, then the audio head's.
Which half is valid depends on the mode of the reply; the caller's logits processor decides it.
`MossSpeechTrunk` is the shared part alone; its output `trunk_states` is what the tails read.
"""

import copy

try:
    from tensorrt_llm._utils import pad_vocab_size
    from tensorrt_llm.functional import concat, split
    from tensorrt_llm.layers import ColumnLinear, Embedding, RmsNorm
    from tensorrt_llm.models import MODEL_MAP, QWenForCausalLM
    from tensorrt_llm.models.modeling_utils import DecoderLayerList, DecoderModelForCausalLM
    from tensorrt_llm.models.qwen.config import QWenConfig
    from tensorrt_llm.models.qwen.model import QWenDecoderLayer
    from tensorrt_llm.module import Module
except ImportError as error:
    raise ImportError("this file is for trtllm-build of TensorRT-LLM 1.0 to 1.3.0rc20") from error


class MossSpeechModel(Module):
    """Embedding, shared layers and both tails; its output has the tails' normed states side by side."""

    def __init__(self, config):
        super().__init__()
        self.shared, self.tail = config.num_shared_layers, config.num_modality_layers
        self.vocab_embedding = Embedding(config.vocab_size, config.hidden_size, dtype=config.dtype)
        self.layers = DecoderLayerList(QWenDecoderLayer, config)
        _same_eps(self.layers, config)
        self.text_ln_f = RmsNorm(config.hidden_size, eps=config.norm_epsilon, dtype=config.dtype)
        self.audio_ln_f = RmsNorm(config.hidden_size, eps=config.norm_epsilon, dtype=config.dtype)

    def forward(self, input_ids, use_cache=False, kv_cache_params=None, hidden_states=None, **shared):
        """KV cache entries are ordered shared, text tail, audio tail."""
        layers = list(self.layers)
        kv_cache_params.fill_none_tensor_list(len(layers))
        presents = []

        def run(first, count, x):
            for number in range(first, first + count):
                mine = copy.copy(kv_cache_params)
                mine.past_key_value = [kv_cache_params.past_key_value[number]]
                x = layers[number](x, use_cache=use_cache, kv_cache_params=mine, **_known(shared))
                if use_cache:
                    x, present = x
                    presents.append(present)
            return x

        trunk = run(0, self.shared, self.vocab_embedding(input_ids))
        text = self.text_ln_f(run(self.shared, self.tail, trunk))
        audio = self.audio_ln_f(run(self.shared + self.tail, self.tail, trunk))
        both = concat([text, audio], dim=-1)
        return (both, tuple(presents)) if use_cache else both


def _same_eps(layers, config):
    """Set the model's epsilon on the query and key norms, which the layer does not pass on."""
    for layer in layers:
        layer.attention.q_layernorm.eps = layer.attention.k_layernorm.eps = config.norm_epsilon


def _known(shared):
    """The arguments of the model that a decoder layer accepts."""
    names = ("attention_mask", "attention_params", "spec_decoding_params")
    return {name: shared[name] for name in names if shared.get(name) is not None}


class MossSpeechForCausalLM(DecoderModelForCausalLM):
    """The whole model: joint ids in, joint logits out."""

    config_class = QWenConfig

    def __init__(self, config):
        super().__init__(config, MossSpeechModel(config), None)
        self.text_lm_head = _head(config, config.text_vocab_size)
        self.audio_lm_head = _head(config, config.audio_vocab_size)
        # No module of this name, so that no pass takes it for a matrix that could be the embedding's.
        self.lm_head = self._joint_logits

    def _joint_logits(self, both, *_):
        text, audio = split(both, self.config.hidden_size, dim=-1)
        return concat([self.text_lm_head(text), self.audio_lm_head(audio)], dim=-1)


def _head(config, ids):
    return ColumnLinear(
        config.hidden_size,
        pad_vocab_size(ids, config.mapping.tp_size),
        bias=False,
        dtype=config.dtype,
        tp_group=config.mapping.tp_group,
        tp_size=config.mapping.tp_size,
        gather_output=True,
    )


class PassingNorm(Module):
    """Replaces the last norm: marks the states as an output and returns them unchanged."""

    def __init__(self, norm, dtype):
        super().__init__()
        self.weight, self.dtype = norm.weight, dtype

    def forward(self, x):
        x.mark_output("trunk_states", self.dtype)
        return x


class MossSpeechTrunk(QWenForCausalLM):
    """The shared layers as a Qwen3; its logits are not used."""

    def __init__(self, config):
        super().__init__(config)
        _same_eps(self.transformer.layers, config)
        self.transformer.ln_f = PassingNorm(self.transformer.ln_f, config.dtype)


MODEL_MAP["MossSpeechForCausalLM"] = MossSpeechForCausalLM
