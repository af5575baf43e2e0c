"""Which heads of a recogniser's decoder look where a word is said while it is written: they tell when it was said."""

import torch
from torch import Tensor

from vivavoce.audio.mel import WhisperMel
from vivavoce.models.whisper import Whisper
from vivavoce.train.recogniser.judgement import windows_of
from vivavoce.train.recogniser.vocabulary import LANGUAGE, Vocabulary
from vivavoce.train.recogniser.windows import RATE, Recordings

COUNT = 4
POSITIONS_PER_SECOND = 50


@torch.inference_mode()
def timing_heads(
    model: Whisper, vocabulary: Vocabulary, recordings: Recordings, count: int = COUNT
) -> list[tuple[int, int]]:
    """Layer and head of those that move on most steadily through recordings while the text of each is written."""
    config, tokens = model.config, vocabulary.tokens
    pairs = [(layer, head) for layer in range(config.decoder_layers) for head in range(config.decoder_attention_heads)]
    prompt = tokens.prompt(LANGUAGE)
    mel = WhisperMel(config.num_mel_bins).to(recordings.samples.device)
    found = torch.zeros(len(pairs))
    for index, text in enumerate(recordings.texts):
        windows = windows_of(model, recordings, [index], "full")
        memory = model.decoder.remember(model.encoder(mel(windows)))
        room = config.max_target_positions - len(prompt) - 1
        written = torch.tensor([[*prompt, *vocabulary.encode(text)[:room]]], device=windows.device)
        sound = min(int(recordings.lengths[index]), windows.shape[1]) * POSITIONS_PER_SECOND // RATE + 1
        looks = model.decoder.attention(written, memory, pairs, sound)[0, :, len(prompt) - 1 :]
        found += steadiness(looks).cpu()
    best = found.topk(min(count, len(pairs))).indices.sort().values
    return [pairs[index] for index in best.tolist()]


def steadiness(looks: Tensor) -> Tensor:
    """How evenly the middle of what is looked at moves with the tokens: 1 where it keeps pace, -1 where it goes back.

    # [head, token, position] → [head]
    """
    places = torch.arange(looks.shape[-1], device=looks.device, dtype=torch.float32)
    middle = (looks.float() * places).sum(-1) / looks.float().sum(-1)
    steps = torch.arange(looks.shape[1], device=looks.device, dtype=torch.float32)
    steps, middle = steps - steps.mean(), middle - middle.mean(-1, keepdim=True)
    return (middle * steps).sum(-1) / (middle.norm(dim=-1) * steps.norm()).clamp_min(1e-6)
