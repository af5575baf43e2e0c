"""The peer of `viva bench lm`: the same shape in eager `transformers` layers with their own cache."""

from typing import Any

import torch
from torch import Tensor, nn

from vivavoce.device import Device
from vivavoce.errors import MissingDependencyError
from vivavoce.evaluation.machine import median_seconds
from vivavoce.models.moss_speech.model import MossSpeechConfig
from vivavoce.nn.modules import allocating


class TransformersPeer(nn.Module):
    """40 Qwen3 layers in MOSS-Speech's arrangement, random weights, `DynamicCache`."""

    def __init__(self, config: MossSpeechConfig, device: Device, dtype: torch.dtype) -> None:
        super().__init__()
        try:
            from transformers import Qwen3Config
            from transformers.models.qwen3 import modeling_qwen3 as qwen3
        except ImportError as error:
            raise MissingDependencyError("the peer needs transformers: pip install 'vivavoce[peer]'") from error
        shared, tail = config.num_shared_layers, config.num_modality_layers
        self.shared, self.tail = shared, tail
        shape = Qwen3Config(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=shared + 2 * tail,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
        shape._attn_implementation = "sdpa"
        with allocating(device.torch_device, dtype):
            self.embed = nn.Embedding(config.audio_vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(qwen3.Qwen3DecoderLayer(shape, index) for index in range(shared + 2 * tail))
            self.norms = nn.ModuleList(qwen3.Qwen3RMSNorm(config.hidden_size) for _ in range(2))
            self.text_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.audio_head = nn.Linear(config.hidden_size, config.audio_vocab_size, bias=False)
        self.rotary = qwen3.Qwen3RotaryEmbedding(shape).to(device.torch_device)

    def forward(self, codes: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """The greedy next ids of both heads.  # [batch, row] → [batch] twice"""
        past = cache.get_seq_length()
        x = self.embed(codes)
        places = torch.arange(past, past + codes.shape[1], device=codes.device)[None]
        angles = self.rotary(x, places)

        def run(x: Tensor, first: int, count: int) -> Tensor:
            for layer in self.layers[first : first + count]:
                made = layer(x, position_embeddings=angles, past_key_values=cache, position_ids=places)
                x = made[0] if isinstance(made, tuple) else made
            return x

        x = run(x, 0, self.shared)
        text = self.norms[0](run(x, self.shared, self.tail)[:, -1])
        audio = self.norms[1](run(x, self.shared + self.tail, self.tail)[:, -1])
        return self.text_head(text).argmax(-1), self.audio_head(audio).argmax(-1)


@torch.inference_mode()
def measure(
    config: MossSpeechConfig, device: Device, dtype: torch.dtype, batches: list[int], context: int, prefill: int
) -> dict[str, Any]:
    """Seconds per decode step at each batch size with that much context, and seconds of one prefill."""
    from transformers import DynamicCache

    peer = TransformersPeer(config, device, dtype)

    def codes(batch: int, rows: int) -> Tensor:
        return torch.randint(config.eosp_token_id, (batch, rows), device=device.torch_device)

    steps = {}
    for batch in batches:
        cache = DynamicCache()
        peer(codes(batch, context), cache)
        one = codes(batch, 1)
        steps[batch] = median_seconds(lambda one=one, cache=cache: peer(one, cache), device, repeats=10)  # type: ignore[misc]
    whole = codes(1, prefill)
    return {"steps": steps, "prefill": median_seconds(lambda: peer(whole, DynamicCache()), device, repeats=5)}
