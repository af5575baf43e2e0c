"""Whisper against transformers' on random weights of every layout it is published in."""

import json

import pytest
import torch
from transformers import WhisperConfig as TheirConfig
from transformers import WhisperForConditionalGeneration

from vivavoce.errors import CapacityError, CheckpointError, InputError
from vivavoce.models.whisper.config import SIZES, WhisperConfig, WhisperTokens
from vivavoce.models.whisper.cpu import is_bf16, optimise_encoder, to_bf16
from vivavoce.models.whisper.decoding import Suppress, SuppressAtStart, decode, language_probabilities
from vivavoce.models.whisper.model import Whisper
from vivavoce.nn.attention import sinusoids
from vivavoce.nn.linear import gelu

SMALL = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "max_source_positions": 100,
    "max_target_positions": 64,
}
VOCABULARIES = {"english": 51864, "large-v2 and Breeze-ASR-25": 51865, "large-v3": 51866}
SUPPRESSED = [1, 2, 7, 8, 9, 50254]


def theirs(vocabulary: int, mels: int = 80) -> WhisperForConditionalGeneration:
    """A random Whisper whose greedy texts vary: token embeddings large enough that the last token matters."""
    tokens = WhisperTokens.of_vocabulary(vocabulary)
    ids = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), tokens.endoftext)
    torch.manual_seed(vocabulary)
    config = TheirConfig(
        **SMALL, vocab_size=vocabulary, num_mel_bins=mels, decoder_start_token_id=tokens.startoftranscript, **ids
    )
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "decoder.embed_positions" in name:
                parameter.normal_()
            elif "embed_positions" not in name:
                parameter.mul_(4.0) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module", params=VOCABULARIES, ids=lambda name: name.replace(" ", "-"))
def pair(request, tmp_path_factory):
    """The same weights in transformers and here, by way of the published files."""
    vocabulary = VOCABULARIES[request.param]
    reference = theirs(vocabulary, mels=128 if vocabulary == 51866 else 80)
    folder = tmp_path_factory.mktemp("whisper")
    reference.save_pretrained(folder)
    return reference, Whisper.load(folder), WhisperTokens.of_vocabulary(vocabulary)


def mels_of(model: Whisper, windows: int, frames: int | None = None, seed: int = 0) -> torch.Tensor:
    shape = (windows, model.config.num_mel_bins, frames or model.config.window_frames)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_states_and_logits_are_those_of_transformers(pair):
    reference, model, _ = pair
    mel = mels_of(model, 2)
    tokens = torch.randint(0, model.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))
    states = reference.model.encoder(mel).last_hidden_state
    assert (model.encoder(mel) - states).abs().max() < 1e-4
    expected = reference(input_features=mel, decoder_input_ids=tokens).logits
    assert (model(mel, tokens) - expected).abs().max() < 1e-4


@torch.no_grad()
def test_tokens_in_any_pieces_give_the_logits_of_the_whole(pair):
    _, model, _ = pair
    tokens = torch.randint(0, 50000, (2, 13), generator=torch.Generator().manual_seed(2))
    memory = model.decoder.cross_kv(model.encoder(mels_of(model, 2)))
    whole = model.decoder(tokens, memory)
    state, pieces = model.decoder.initial_state(memory), []
    for piece in tokens.split([4, 1, 1, 5, 2], dim=1):
        hidden, state = model.decoder.step(state, piece)
        pieces.append(hidden)
    assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-4
    forked, _ = model.decoder.step(model.decoder.initial_state(memory), tokens)
    assert (forked - whole).abs().max() < 1e-4


def test_greedy_texts_are_those_of_transformers(pair):
    reference, model, tokens = pair
    mel = mels_of(model, 6, seed=3)
    prompt = tokens.prompt("zh" if tokens.is_multilingual else None)
    max_tokens = 40
    reference.generation_config.update(
        suppress_tokens=SUPPRESSED,
        begin_suppress_tokens=[220, tokens.endoftext],
        forced_decoder_ids=None,
        no_timestamps_token_id=tokens.notimestamps,
        is_multilingual=tokens.is_multilingual,
    )
    given = torch.tensor([prompt] * 6)
    expected = reference.generate(
        mel, decoder_input_ids=given, max_new_tokens=max_tokens, do_sample=False, num_beams=1, return_timestamps=False
    )
    memory = model.decoder.cross_kv(model.encoder(mel))
    rules = [SuppressAtStart([220, tokens.endoftext]), Suppress(SUPPRESSED)]
    texts = decode(model, tokens, memory, [prompt] * 6, rules, max_tokens=max_tokens)
    for row, text in zip(expected.tolist(), texts, strict=True):
        new = row[len(prompt) :] if row[: len(prompt)] == prompt else row
        assert text.tokens == (new[: new.index(tokens.endoftext)] if tokens.endoftext in new else new)
    assert len({token for text in texts for token in text.tokens}) > 20


@pytest.mark.parametrize("file", ["small.pt", "small"])
def test_openai_files_hold_the_same_model(pair, tmp_path, file):
    reference, model, _ = pair
    config = model.config
    dims = {
        "n_mels": config.num_mel_bins,
        "n_audio_ctx": config.max_source_positions,
        "n_audio_state": config.d_model,
        "n_audio_head": config.encoder_attention_heads,
        "n_audio_layer": config.encoder_layers,
        "n_vocab": config.vocab_size,
        "n_text_ctx": config.max_target_positions,
        "n_text_state": config.d_model,
        "n_text_head": config.decoder_attention_heads,
        "n_text_layer": config.decoder_layers,
    }
    weights = {openai_name(name): tensor for name, tensor in reference.model.state_dict().items()}
    torch.save({"dims": dims, "model_state_dict": weights}, tmp_path / file)
    loaded = Whisper.load(tmp_path / file)
    assert loaded.config == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def openai_name(name: str) -> str:
    """What OpenAI calls one of Hugging Face's tensors; a few of their names stand in the test below."""
    side, rest = name.split(".", maxsplit=1)
    for theirs_, openai in [
        ("layers.", "blocks."),
        ("encoder_attn_layer_norm", "cross_attn_ln"),
        ("self_attn_layer_norm", "attn_ln"),
        ("encoder_attn", "cross_attn"),
        ("self_attn", "attn"),
        ("q_proj", "query"),
        ("k_proj", "key"),
        ("v_proj", "value"),
        ("out_proj", "out"),
        ("fc1", "mlp.0"),
        ("fc2", "mlp.2"),
        ("final_layer_norm", "mlp_ln"),
        ("embed_positions.weight", "positional_embedding"),
        ("embed_tokens", "token_embedding"),
    ]:
        rest = rest.replace(theirs_, openai)
    if rest.startswith("layer_norm"):
        rest = rest.replace("layer_norm", "ln_post" if side == "encoder" else "ln")
    return f"{side}.{rest}"


@pytest.mark.parametrize(
    "name",
    [
        "encoder.conv1.weight",
        "encoder.positional_embedding",
        "encoder.blocks.0.attn.query.weight",
        "encoder.blocks.0.attn_ln.bias",
        "encoder.ln_post.weight",
        "decoder.token_embedding.weight",
        "decoder.blocks.1.cross_attn.out.bias",
        "decoder.blocks.1.cross_attn_ln.weight",
        "decoder.blocks.1.mlp.2.weight",
        "decoder.blocks.1.mlp_ln.weight",
        "decoder.ln.bias",
    ],
)
def test_published_openai_names_are_among_those_tested(name):
    names = {openai_name(ours) for ours in Whisper(WhisperConfig(**SMALL)).state_dict()}
    assert name in names


def test_what_is_saved_is_read_by_transformers(pair, tmp_path):
    reference, model, tokens = pair
    model.save(tmp_path, eos_token_id=tokens.endoftext, pad_token_id=tokens.endoftext, bos_token_id=tokens.endoftext)
    read = WhisperForConditionalGeneration.from_pretrained(tmp_path)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, read.state_dict()[name]), name


@torch.no_grad()
def test_rows_of_one_window_share_its_memory(pair):
    _, model, _ = pair
    memory = model.decoder.cross_kv(model.encoder(mels_of(model, 2)))
    tokens = torch.randint(0, 50000, (6, 5), generator=torch.Generator().manual_seed(4))
    shared, _ = model.decoder.step(model.decoder.initial_state(memory, rows_per_window=3), tokens)
    apart = memory.of([0, 0, 0, 1, 1, 1])
    alone, _ = model.decoder.step(model.decoder.initial_state(apart), tokens)
    assert (shared - alone).abs().max() < 1e-5


def test_a_batch_gives_each_window_the_text_it_has_alone(pair):
    _, model, tokens = pair
    memory = model.decoder.cross_kv(model.encoder(mels_of(model, 3, seed=5)))
    prompt = tokens.prompt("en" if tokens.is_multilingual else None)
    together = decode(model, tokens, memory, [prompt] * 3, max_tokens=20)
    for index, text in enumerate(together):
        (alone,) = decode(model, tokens, memory.of([index]), [prompt], max_tokens=20)
        assert alone.tokens == text.tokens
        assert alone.logprob == pytest.approx(text.logprob, abs=1e-3)


def test_a_drawn_text_follows_its_seed_and_is_the_best_of_several(pair):
    _, model, tokens = pair
    memory = model.decoder.cross_kv(model.encoder(mels_of(model, 1, seed=6)))
    prompt = tokens.prompt("en" if tokens.is_multilingual else None)

    def drawn(seed: int, best_of: int = 1):
        return decode(model, tokens, memory, [prompt], temperature=1.0, best_of=best_of, max_tokens=8, seed=seed)[0]

    assert drawn(1).tokens == drawn(1).tokens
    assert len({tuple(drawn(seed).tokens) for seed in range(4)}) > 1
    assert drawn(1, best_of=8).average_logprob >= drawn(1).average_logprob - 1e-3


@torch.no_grad()
def test_languages_are_detected_at_the_start_token(pair):
    reference, model, tokens = pair
    if not tokens.is_multilingual:
        pytest.skip("one language")
    mel = mels_of(model, 2, seed=7)
    start = torch.full((2, 1), tokens.startoftranscript)
    logits = reference(input_features=mel, decoder_input_ids=start).logits[:, 0]
    ids = list(tokens.languages.values())
    expected = logits[:, ids].softmax(-1)
    chances = language_probabilities(model, tokens, model.decoder.cross_kv(model.encoder(mel)))
    assert list(chances[0]) == list(tokens.languages) and len(ids) == model.config.vocab_size - 51766
    assert (torch.tensor([list(row.values()) for row in chances]) - expected).abs().max() < 1e-5


def test_short_windows_need_no_padding(pair):
    _, model, _ = pair
    assert model.encoder(mels_of(model, 1, frames=30)).shape == (1, 15, 64)
    assert model.encoder(mels_of(model, 1, frames=31)).shape == (1, 16, 64)


@pytest.mark.parametrize("shape", [(1, 80, 0), (1, 80, 201), (1, 79, 200), (80, 200)])
def test_mels_of_another_shape_are_refused(shape):
    model = Whisper(WhisperConfig(**SMALL, vocab_size=64))
    with pytest.raises(InputError, match="takes mels"):
        model.encoder(torch.zeros(shape))


def test_more_tokens_than_places_are_refused():
    model = Whisper.random(WhisperConfig(**SMALL, vocab_size=64))
    memory = model.decoder.cross_kv(model.encoder(torch.zeros(1, 80, 10)))
    with pytest.raises(CapacityError, match="65 tokens"):
        model.decoder.step(model.decoder.initial_state(memory), torch.zeros(1, 65, dtype=torch.long))


@pytest.mark.parametrize(
    ("values", "complaint"),
    [({"model_type": "qwen3"}, "qwen3"), ({"scale_embedding": True}, "scale_embedding"), ([1], "list")],
)
def test_configs_of_something_else_are_refused(tmp_path, values, complaint):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=complaint):
        WhisperConfig.read(tmp_path)


def test_a_torch_file_of_something_else_is_refused(tmp_path):
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="dims"):
        Whisper.load(tmp_path / "other.pt")


def test_published_sizes_have_the_published_number_of_parameters():
    millions = {
        "tiny": 37.8,
        "base": 72.6,
        "small": 241.7,
        "medium": 763.9,
        "large-v2": 1543.3,
        "large-v3-turbo": 808.9,
    }
    for name, expected in millions.items():
        with torch.device("meta"):
            model = Whisper(SIZES[name])
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(expected, abs=0.1), name


def test_the_encoder_positions_are_the_published_ones():
    reference = theirs(51865).model.encoder.embed_positions.weight
    assert (sinusoids(100, 64) - reference).abs().max() < 1e-5


def test_published_vocabularies_have_their_published_ids():
    v2, v3 = WhisperTokens.of_vocabulary(51865), WhisperTokens.of_vocabulary(51866)
    assert (v2.endoftext, v2.startoftranscript, v2.languages["zh"], v2.languages["su"]) == (50257, 50258, 50260, 50357)
    assert (v2.translate, v2.transcribe, v2.startoflm, v2.startofprev) == (50358, 50359, 50360, 50361)
    assert (v2.nospeech, v2.notimestamps, v2.timestamps, v2.timestamp(30.0)) == (50362, 50363, 50364, 51864)
    assert v3.languages["yue"] == 50358 and v3.notimestamps == v2.notimestamps + 1
    with pytest.raises(CheckpointError, match="51000"):
        WhisperTokens.of_vocabulary(51000)


def test_prompts_are_built_in_the_published_order():
    tokens = WhisperTokens.of_vocabulary(51865)
    assert tokens.prompt("zh") == [50258, 50260, 50359, 50363]
    assert tokens.prompt("en", "translate", timestamps=True, earlier=[5, 6]) == [50361, 5, 6, 50258, 50259, 50358]
    assert WhisperTokens.of_vocabulary(51864).prompt() == [50257, 50362]
    with pytest.raises(InputError, match="klingon"):
        tokens.prompt("klingon")


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no products in bfloat16"
)
def test_an_encoder_in_bfloat16_gives_nearly_the_same_states_as_wide_as_before():
    model = Whisper.random(WhisperConfig(**SMALL, vocab_size=100), seed=2)
    mel = torch.randn(2, 80, 120, generator=torch.Generator().manual_seed(0))
    wide = model.encoder(mel)
    keys = model.decoder.cross_kv(wide).keys
    to_bf16(model)
    states = model.encoder(mel)
    narrower = model.decoder.cross_kv(wide).keys
    assert narrower.shape == keys.shape and 0 < (narrower - keys).abs().max() < 0.02 * keys.abs().max()
    assert states.dtype == torch.float32 and model.encoder.layers[0].fc1.weight.dtype == torch.bfloat16
    assert 0 < (states - wide).abs().max() < 0.05 * wide.abs().max()


def test_the_optimised_encoder_gives_the_same_states_and_stores_no_weight_twice():
    model = Whisper.random(WhisperConfig(**SMALL, vocab_size=100), seed=2)
    mel = torch.randn(2, 80, 120, generator=torch.Generator().manual_seed(0))
    states = model.encoder(mel)
    memory = model.decoder.cross_kv(states)
    optimise_encoder(model)
    assert not is_bf16(model)
    assert torch.allclose(model.encoder(mel), states, atol=1e-4)
    again = model.decoder.cross_kv(states)
    assert torch.allclose(again.keys, memory.keys, atol=1e-4) and torch.allclose(again.values, memory.values, atol=1e-4)
    attention = model.encoder.layers[0].self_attn
    places = {part.weight.untyped_storage().data_ptr() for part in attention.projections}
    assert len(places) == 1, "one matrix, of which the three are parts"
    first, *_ = model.encoder.fast.layers.children()
    assert first.packed.weight.untyped_storage().data_ptr() in places, "and by which the twin multiplies"


def test_gelu_by_parts_is_gelu():
    x = torch.randn(7, 300, generator=torch.Generator().manual_seed(0)) * 3
    assert torch.allclose(gelu(x, True), torch.nn.functional.gelu(x), atol=1e-6)
