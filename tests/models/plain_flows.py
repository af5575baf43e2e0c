"""Flow decoders as whole tensors in one loop, without states: the published computations, their quirks spelled out."""

import itertools
import math

import torch
from torch.nn import functional

from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.flow.estimator import fixed_noise
from vivavoce.models.flow.model import FlowDecoder


def plain_flow(decoder):
    """The plain computation on a decoder's weights."""
    return (PlainUNetFlow if isinstance(decoder, FlowDecoder) else PlainDiTFlow)(decoder)


class PlainFlow:
    """Ten (here: a few) Euler steps from fixed noise, guided by the difference that the conditions make."""

    def __init__(self, decoder):
        self.config, self.w = decoder.config, published_tensors(decoder)

    def linear(self, name, x):
        return functional.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def norm(self, name, x, eps=1e-5):
        return functional.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], eps)

    def conv(self, name, x, left=0, right=0, groups=1):
        x = functional.pad(x.T[None], (left, right))
        return functional.conv1d(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"], groups=groups)[0].T

    def looked_ahead(self, name, x):
        ahead = functional.leaky_relu(self.conv(f"{name}.conv1", x, right=self.config.lookahead), 0.01)
        return self.conv(f"{name}.conv2", ahead, left=2) + x

    def seen(self, time, chunk, left_chunks, masked, sink):
        if not masked:
            return torch.ones(time, time, dtype=torch.bool)
        query, key = torch.arange(time)[:, None], torch.arange(time)[None]
        seen = key < (query // chunk + 1) * chunk
        if left_chunks is not None:
            seen &= (key // chunk >= query // chunk - left_chunks) | (key < sink)
        return seen

    def mel(self, codes, prompt, left_chunks=None, masked=True, sink=0):
        """`sink` codes of the prompt stay in sight.  # → [band, frame]"""
        config = self.config
        x = self.w["input_embedding.weight"][torch.cat([prompt.codes, codes])]
        of_codes = self.seen(len(x), config.chunk, left_chunks, masked, sink)
        time, chunk = len(x) * config.ratio, config.chunk * config.ratio
        of_frames = self.seen(time, chunk, left_chunks, masked, sink * config.ratio)
        features = self.features(x, of_codes, of_frames)
        speaker = self.linear("spk_embed_affine_layer", prompt.speaker / prompt.speaker.norm())
        prompt_mel = torch.zeros(time, config.mel_bands)
        prompt_mel[: len(prompt.mel)] = prompt.mel
        times = [1 - math.cos(0.5 * math.pi * step / config.euler_steps) for step in range(config.euler_steps + 1)]
        mel = fixed_noise(config.mel_bands, torch.device("cpu"))[:time]
        nothing = torch.zeros_like(features)
        for begin, end in itertools.pairwise(times):
            with_conditions = self.velocity(mel, prompt_mel, features, speaker.expand_as(features), begin, of_frames)
            without = self.velocity(mel, nothing, nothing, nothing, begin, of_frames)
            mel = mel + (end - begin) * (1.7 * with_conditions - 0.7 * without)
        return mel[len(prompt.mel) :].T

    def waves(self, time, count):
        """Sines, then cosines, of a thousand times the time."""
        half = count // 2
        angles = torch.tensor([1000 * time * 10_000 ** (-wave / (half - 1)) for wave in range(half)])
        return torch.cat([angles.sin(), angles.cos()])

    def attended(self, query, key, value, heads, seen):
        query, key, value = (part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in (query, key, value))
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(0, 1).flatten(1)


class PlainDiTFlow(PlainFlow):
    """CosyVoice 3: a look-ahead, each code repeated, and a transformer whose norms follow the time."""

    def features(self, x, of_codes, of_frames):
        return self.looked_ahead("pre_lookahead_layer", x).repeat_interleave(self.config.ratio, 0)

    def estimated(self, name, x):
        return self.linear(f"decoder.estimator.{name}", x)

    def velocity(self, noisy, prompt_mel, features, speaker, time, seen):
        size = self.config.estimator
        embedding = self.estimated("time_embed.time_mlp.0", self.waves(time, size.time_waves))
        embedding = functional.silu(self.estimated("time_embed.time_mlp.2", functional.silu(embedding)))
        x = self.estimated("input_embed.proj", torch.cat([noisy, prompt_mel, features, speaker], dim=-1))
        places = x
        for number in (1, 2):
            name = f"decoder.estimator.input_embed.conv_pos_embed.conv{number}.0"
            left, groups = size.position_kernel - 1, size.position_groups
            places = functional.mish(self.conv(name, places, left=left, groups=groups))
        x = x + places
        for number in range(size.blocks):
            block = f"transformer_blocks.{number}"
            shift, scale, gate, shift2, scale2, gate2 = self.estimated(f"{block}.attn_norm.linear", embedding).chunk(6)
            normed = functional.layer_norm(x, (size.dim,), eps=1e-6)
            x = x + gate * self.attention(f"{block}.attn", normed * (1 + scale) + shift, seen)
            normed = functional.layer_norm(x, (size.dim,), eps=1e-6)
            hidden = functional.gelu(
                self.estimated(f"{block}.ff.ff.0.0", normed * (1 + scale2) + shift2), approximate="tanh"
            )
            x = x + gate2 * self.estimated(f"{block}.ff.ff.2", hidden)
        scale, shift = self.estimated("norm_out.linear", embedding).chunk(2)
        return self.estimated("proj_out", functional.layer_norm(x, (size.dim,), eps=1e-6) * (1 + scale) + shift)

    def attention(self, name, x, seen):
        heads, dim = self.config.estimator.heads, self.config.estimator.head_dim
        query, key = (self.turned(self.estimated(f"{name}.{part}", x), dim) for part in ("to_q", "to_k"))
        value = self.estimated(f"{name}.to_v", x)
        return self.estimated(f"{name}.to_out.0", self.attended(query, key, value, heads, seen))

    def turned(self, x, dim):
        """Complex rotation of the first `dim` channels of all heads together: the first head."""
        rates = 10_000.0 ** -(torch.arange(0, dim, 2) / dim)
        turn = torch.polar(torch.ones(len(x), dim // 2), torch.arange(len(x))[:, None] * rates)
        pairs = torch.view_as_complex(x[:, :dim].unflatten(-1, (-1, 2)).contiguous())
        return torch.cat([torch.view_as_real(pairs * turn).flatten(1), x[:, dim:]], dim=-1)


class PlainUNetFlow(PlainFlow):
    """MOSS-Speech and CosyVoice 2: a conformer with relative positions, upsampled, and a UNet that keeps its rate."""

    def features(self, x, of_codes, of_frames):
        x = self.looked_ahead("encoder.pre_lookahead_layer", self.embedded("encoder.embed", x))
        for layer in range(self.config.encoder.code_layers):
            x = self.conformer(f"encoder.encoders.{layer}", x, of_codes)
        ratio = self.config.ratio
        x = self.conv("encoder.up_layer.conv", x.repeat_interleave(ratio, 0), left=2 * ratio)
        x = self.embedded("encoder.up_embed", x)
        for layer in range(self.config.encoder.frame_layers):
            x = self.conformer(f"encoder.up_encoders.{layer}", x, of_frames)
        return self.linear("encoder_proj", self.norm("encoder.after_norm", x))

    def embedded(self, name, x):
        return self.norm(f"{name}.out.1", self.linear(f"{name}.out.0", x)) * math.sqrt(self.config.encoder.dim)

    def conformer(self, name, x, seen):
        x = x + self.relative_attention(f"{name}.self_attn", self.norm(f"{name}.norm_mha", x, 1e-12), seen)
        hidden = functional.silu(self.linear(f"{name}.feed_forward.w_1", self.norm(f"{name}.norm_ff", x, 1e-12)))
        return x + self.linear(f"{name}.feed_forward.w_2", hidden)

    def relative_attention(self, name, x, seen):
        """Scores of what is there and of how far away it is, each with a bias of its own."""
        heads, time = self.config.encoder.heads, len(x)
        query, key, value = (
            self.linear(f"{name}.linear_{part}", x).unflatten(-1, (heads, -1)).transpose(0, 1) for part in "qkv"
        )
        distance = torch.arange(time)[:, None] - torch.arange(time)
        rates = 10_000.0 ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1])
        angles = distance[..., None] * rates
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)  # [query, key, dim]
        places = self.linear(f"{name}.linear_pos", waves).unflatten(-1, (heads, -1)).permute(2, 0, 1, 3)
        prefix, there = (self.w[f"{name}.pos_bias_{which}"][:, None] for which in "uv")
        scores = (query + prefix) @ key.transpose(1, 2)
        scores = scores + ((query + there)[:, :, None] * places).sum(-1)
        scores = (scores / math.sqrt(query.shape[-1])).masked_fill(~seen, float("-inf"))
        return self.linear(f"{name}.linear_out", (scores.softmax(-1) @ value).transpose(0, 1).flatten(1))

    def velocity(self, noisy, prompt_mel, features, speaker, time, seen):
        size, name = self.config.estimator, "decoder.estimator"
        embedding = self.linear(f"{name}.time_mlp.linear_1", self.waves(time, size.in_channels))
        embedding = self.linear(f"{name}.time_mlp.linear_2", functional.silu(embedding))
        x = torch.cat([noisy, features, speaker, prompt_mel], dim=-1)
        skipped = self.stage(f"{name}.down_blocks.0", x, embedding, seen)
        x = self.conv(f"{name}.down_blocks.0.2", skipped, left=2)
        for block in range(size.middle_blocks):
            x = self.stage(f"{name}.mid_blocks.{block}", x, embedding, seen)
        x = self.stage(f"{name}.up_blocks.0", torch.cat([x, skipped], dim=-1), embedding, seen)
        x = self.conv(f"{name}.up_blocks.0.2", x, left=2)
        return self.conv(f"{name}.final_proj", self.block(f"{name}.final_block", x))

    def block(self, name, x):
        return functional.mish(self.norm(f"{name}.block.2", self.conv(f"{name}.block.0", x, left=2)))

    def stage(self, name, x, embedding, seen):
        inner = self.block(f"{name}.0.block1", x) + self.linear(f"{name}.0.mlp.1", functional.mish(embedding))
        x = self.block(f"{name}.0.block2", inner) + self.conv(f"{name}.0.res_conv", x)
        for number in range(self.config.estimator.transformers):
            one = f"{name}.1.{number}"
            normed = self.norm(f"{one}.norm1", x)
            parts = (self.linear(f"{one}.attn1.to_{part}", normed) for part in "qkv")
            x = x + self.linear(f"{one}.attn1.to_out.0", self.attended(*parts, self.config.estimator.heads, seen))
            hidden = functional.gelu(self.linear(f"{one}.ff.net.0.proj", self.norm(f"{one}.norm3", x)))
            x = x + self.linear(f"{one}.ff.net.2", hidden)
        return x
