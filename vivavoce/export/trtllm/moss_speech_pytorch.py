# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202, ANN204
"""MOSS-Speech for the PyTorch backend of TensorRT-LLM, registered from outside it (versions after 1.3.0rc20).

Import this file before `LLM(model=FOLDER)` is made. Ids are joint: text ids, then audio codes; logits are the text
head's, then the audio head's. Modules have the published names, so the published weights load unchanged.
"""

import torch
from torch import nn

try:
    from tensorrt_llm._torch.models.modeling_qwen3 import Qwen3DecoderLayer
    from tensorrt_llm._torch.models.modeling_utils import DecoderModel, DecoderModelForCausalLM, register_auto_model
    from tensorrt_llm._torch.modules.embedding import Embedding, LMHead
    from tensorrt_llm._torch.modules.linear import TensorParallelMode
    from tensorrt_llm._torch.modules.rms_norm import RMSNorm
    from transformers import AutoConfig, Qwen3Config
except ImportError as error:
    raise ImportError("this file is for TensorRT-LLM after 1.3.0rc20, before LLM(…) is made") from error


class MossSpeechConfig(Qwen3Config):
    """Qwen3's settings and those of the tails. `num_hidden_layers` counts every layer that has a cache."""

    model_type = "moss_speech"


AutoConfig.register("moss_speech", MossSpeechConfig, exist_ok=True)


class Block(nn.Module):
    """Decoder layers with consecutive indices in the KV cache."""

    def __init__(self, model_config, first, count):
        super().__init__()
        self.layers = nn.ModuleList(Qwen3DecoderLayer(model_config, first + index) for index in range(count))

    def forward(self, hidden, residual, **given):
        for layer in self.layers:
            hidden, residual = layer(hidden_states=hidden, residual=residual, **given)
        return hidden, residual


class MossSpeechModel(DecoderModel):
    """Joint ids to both tails' states, side by side."""

    def __init__(self, model_config):
        super().__init__(model_config)
        config = model_config.pretrained_config
        shared, tail = config.num_shared_layers, config.num_modality_layers
        self.text_ids = config.text_vocab_size
        self.embed_tokens = _split(Embedding, model_config, config.text_vocab_size)
        self.audio_embed = _split(Embedding, model_config, config.audio_vocab_size)
        self.shared_block = Block(model_config, 0, shared)
        self.text_block = Block(model_config, shared, tail)
        self.audio_block = Block(model_config, shared + tail, tail)
        norm = {"hidden_size": config.hidden_size, "eps": config.rms_norm_eps, "dtype": config.torch_dtype}
        self.text_norm, self.audio_norm = RMSNorm(**norm), RMSNorm(**norm)

    def forward(self, attn_metadata, input_ids=None, position_ids=None, inputs_embeds=None, **_):
        if inputs_embeds is None:
            is_audio = input_ids >= self.text_ids
            text = self.embed_tokens(torch.where(is_audio, 0, input_ids))
            audio = self.audio_embed(torch.where(is_audio, input_ids - self.text_ids, 0))
            inputs_embeds = torch.where(is_audio[:, None], audio, text)
        given = {"position_ids": position_ids, "attn_metadata": attn_metadata}
        hidden, residual = self.shared_block(inputs_embeds, None, **given)
        # A layer adds into its residual in place where the norm is fused, so each tail gets its own copy.
        text, text_residual = self.text_block(hidden.clone(), residual.clone(), **given)
        audio, audio_residual = self.audio_block(hidden, residual, **given)
        text, _ = self.text_norm(text, text_residual)
        audio, _ = self.audio_norm(audio, audio_residual)
        return torch.cat([text, audio], dim=-1)


def _split(layer, model_config, entries):
    """An embedding or a head, its entries split between the ranks."""
    config = model_config.pretrained_config
    return layer(
        entries,
        config.hidden_size,
        dtype=config.torch_dtype,
        mapping=model_config.mapping,
        tensor_parallel_mode=TensorParallelMode.COLUMN,
        gather_output=True,
    )


@register_auto_model("MossSpeechForCausalLM")
class MossSpeechForCausalLM(DecoderModelForCausalLM):
    """The whole model."""

    def __init__(self, model_config):
        config = model_config.pretrained_config
        super().__init__(
            MossSpeechModel(model_config),
            config=model_config,
            hidden_size=config.hidden_size,
            vocab_size=config.text_vocab_size + config.audio_vocab_size,
        )
        self.text_lm_head = _split(LMHead, model_config, config.text_vocab_size)
        self.audio_lm_head = _split(LMHead, model_config, config.audio_vocab_size)
        del self.lm_head  # the published names are those of the two heads
        object.__setattr__(self, "lm_head", self._joint_logits)

    def _joint_logits(self, both, *_, **__):
        text, audio = both.chunk(2, dim=-1)
        return torch.cat([self.text_lm_head(text), self.audio_lm_head(audio)], dim=-1)
