"""What the language model begins with: initial weights and a new tokenizer, or those of an earlier model."""

import shutil
from pathlib import Path

import torch

from vivavoce.errors import InputError
from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.train.lm import MODALITY_PAD, PAD, SPARE, SPEECH_START, TURN_END, train_tokenizer
from vivavoce.train.lm.batches import READ, SYSTEMS, TRANSCRIBE
from vivavoce.train.lm.dialogue_data import SpokenDialogues
from vivavoce.train.lm.recipe import LMRecipe
from vivavoce.train.lm.tool_examples import Offers, has_tools

TOKENIZER_OFFERS = 12  # lists of tools that its vocabulary is learned from


def make_config(recipe: LMRecipe, tokenizer: TextTokenizer, entries: int, code_count: int) -> MossSpeechConfig:
    """Config from recipe and tokenizer. Unlike the published one, the audio padding id is not a code."""
    ids = {token: tokenizer.id_of(token) for token in (PAD, TURN_END, SPEECH_START, MODALITY_PAD)}
    return MossSpeechConfig(
        vocab_size=-(-(entries + SPARE) // 8) * 8,
        audio_vocab_size=code_count + 8,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.inner,
        num_shared_layers=recipe.shared_layers,
        num_modality_layers=recipe.modality_layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
        pad_token_id=ids[PAD] or 0,
        eos_token_id=ids[TURN_END] or 0,
        sosp_token_id=ids[SPEECH_START] or 0,
        modality_pad_token_id=ids[MODALITY_PAD] or 0,
        eosp_token_id=code_count,
        audio_pad_token_id=code_count + 1,
    )


@torch.no_grad()
def initialise(model: MossSpeech, seed: int) -> None:
    """Initial weights: normal, outputs to the residual stream scaled by depth, norms 1."""
    generator = torch.Generator(model.text_lm_head.weight.device).manual_seed(seed)
    layers = model.config.num_shared_layers + model.config.num_modality_layers
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
            continue
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        parameter.normal_(0.0, 0.02 / (2 * layers) ** 0.5 if into_residual else 0.02, generator=generator)


@torch.no_grad()
def copy_text_layers(model: MossSpeech) -> None:
    """Initialise the audio layers as copies of the text layers."""
    trunk = model.model
    pairs = ((trunk.audio_block, trunk.text_block), (trunk.audio_norm, trunk.text_norm))
    for audio, text in pairs:
        for target, source in zip(audio.parameters(), text.parameters(), strict=True):
            target.copy_(source)


def init_fresh(
    recipe: LMRecipe, data: SpokenDialogues, out: Path, device: torch.device, seed: int
) -> tuple[MossSpeech, TextTokenizer]:
    """Initial weights, and a tokenizer trained on the data's texts."""
    frames = [f"{role}\n" for role in ("system", "user", "assistant")]
    frames += [TRANSCRIBE, READ, *(text for texts in SYSTEMS.values() for text in texts)]
    if any(map(has_tools, data.dialogues)):
        frames += Offers(count=TOKENIZER_OFFERS).texts
    backend = train_tokenizer([*data.written, *frames * 200], recipe.text_entries)
    backend.save(str(out / "tokenizer.json"))
    tokenizer = TextTokenizer(backend)
    config = make_config(recipe, tokenizer, backend.get_vocab_size(), data.code_count)
    config.write(out)
    model = MossSpeech.random(config, device=device, seed=seed)
    initialise(model, seed)
    return model, tokenizer


@torch.no_grad()
def take_over(model: MossSpeech, tokenizer: TextTokenizer, folder: Path, has_same_codes: bool = True) -> None:
    """Take the weights of an earlier model with another tokenizer, and perhaps with codes of another encoder.

    A text entry gets the mean of those that the earlier tokenizer writes it with.
    """
    earlier, former = MossSpeech.load(folder, device="cpu", dtype=torch.float32), TextTokenizer.load(folder)
    tables = {"model.embed_tokens.weight", "text_lm_head.weight"}
    weights, mine = earlier.state_dict(), model.state_dict()
    of_codes = set() if has_same_codes else {"model.audio_embed.weight", "audio_lm_head.weight"}
    taken = weights.keys() - tables - of_codes
    if any(weights[name].shape != mine[name].shape for name in taken):
        raise InputError(f"the language model in {folder} has other sizes than this recipe")
    for name in taken:
        mine[name].copy_(weights[name])
    for entry in range(model.config.vocab_size):
        ids = former.encode(tokenizer.bytes_of(entry).decode(errors="ignore"))
        for name in tables if ids else ():
            mine[name][entry] = weights[name][ids].to(mine[name]).mean(0)


def init_from_earlier(folder: Path, out: Path, device: torch.device) -> tuple[MossSpeech, TextTokenizer]:
    """Load an earlier model, whose speech encoder has the same or a continued codebook."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy2(folder / name, out / name)
    return MossSpeech.load(folder, device=device, dtype=torch.float32), TextTokenizer.load(folder)
