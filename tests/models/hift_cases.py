"""Narrow vocoders of both kinds, mels for them, their checkpoints in every spelling, and a stream of hops."""

import torch

from tests.golden import weights
from tests.models.named_checkpoint import GOLDEN
from vivavoce.models.checkpoint import published_tensors

MELS = 6
SMALL = {"mels": MELS, "channels": 32, "f0_channels": 8}  # the published geometry with few channels
WAYS_TO_SPELL = {
    "new": (".parametrizations.weight.original0", ".parametrizations.weight.original1", ""),
    "old": (".weight_g", ".weight_v", ""),
    "old, prefixed": (".weight_g", ".weight_v", "generator."),
}
BAD_MELS = {
    "NaN": (torch.full((1, MELS, 4), torch.nan), "NaN"),
    "infinite": (torch.full((1, MELS, 4), torch.inf), "infinite"),
    "empty": (torch.zeros(1, MELS, 0), "has no frames"),
    "bins": (torch.zeros(1, 100, 4), r"\[batch, 6, frame\], not \[1, 100, 4\]"),
    "axes": (torch.zeros(MELS, 4), r"\[batch, 6, frame\], not \[6, 4\]"),
}


def quietened(hift):
    """The vocoder with weights that make it voiced, around 150 Hz, and quiet enough not to be limited."""
    torch.manual_seed(0)
    for parameter in hift.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter[0].numel() ** -0.5)
    hift.f0_predictor.classifier.weight.mul_(10)
    hift.f0_predictor.classifier.bias.fill_(150)
    hift.conv_post.weight.mul_(0.2)
    hift.conv_post.bias.sub_(2)
    return hift


def mels(frames, batch=1, seed=0, dtype=torch.float64):
    """Bands that come and go over a tenth of a second or more, as those of speech do."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch, MELS, frames + 8, generator=generator, dtype=dtype)
    return 3 * torch.nn.functional.avg_pool1d(noise, 9, stride=1)


def streamed(stream, mel, hops, seed=0):
    """The sound of each hop, the last one final, and the state after."""
    state, sounds = stream.initial_state(seed, batch=mel.shape[0]), []
    for number, hop in enumerate(mel.split(hops, dim=-1)):
        sound, state = stream.step(state, hop, final=number == len(hops) - 1)
        sounds.append(sound)
    return sounds, state


def distance(ours, wanted):
    assert ours.shape == wanted.shape
    return ((ours - wanted).norm() / wanted.norm()).item()


def spelled(hift, keys, magnitude, direction, prefix):
    """A vocoder's tensors as a checkpoint spells them, weight norm and all."""
    published = weights.shapes(GOLDEN / "keys" / keys)
    normed = {name.removesuffix(WAYS_TO_SPELL["new"][1]) for name in published if name.endswith("original1")}
    tensors = {}
    for name, held in published_tensors(hift).items():
        layer, tensor = name.removesuffix(".weight"), held.float()
        if layer in normed and layer != name:
            tensors[prefix + layer + magnitude] = tensor.norm(dim=tuple(range(1, tensor.ndim)), keepdim=True)
            tensors[prefix + layer + direction] = 3 * tensor
        else:
            tensors[prefix + name] = tensor
    return tensors


def assert_streams_hop_together(stream, ages, hops, final):
    """Streams that have heard so much are stepped in one batch and each alone, and once more."""
    states = []
    for seed, age in enumerate(ages):
        state = stream.initial_state(None if seed == 1 else seed)
        states.append(stream.step(state, mels(age, seed=seed))[1] if age else state)
    news = [mels(hop, seed=9 + row) for row, hop in enumerate(hops)]
    sounds, after = stream.step_batch(states, news, final)
    for row, state in enumerate(states):
        sound, alone = stream.step(state, news[row], final[row])
        torch.testing.assert_close(sounds[row], sound, rtol=0, atol=1e-11)
        following = [stream.step(state, mels(12, seed=row))[0] for state in (after[row], alone)]
        torch.testing.assert_close(*following, rtol=0, atol=1e-11)


def assert_begins_anew_after_the_end(stream, held):
    """A stream that has ended gives what a new one gives; `held` samples come out when it is flushed."""
    sounds, state = streamed(stream, mels(30), [20, 10], seed=5)
    first, state = stream.step(state, mels(30)[..., :20])
    assert torch.equal(first, sounds[0])
    rest, _ = stream.step(state, mels(30)[..., 20:], final=True)
    assert torch.equal(rest, sounds[1])
    flushed, state = stream.step(stream.step(stream.initial_state(5), mels(30))[1], mels(1)[..., :0], final=True)
    assert flushed.shape[1] == held
    return state
