"""Qwen models from GGUF files written by their own library: transformers' tokens, packed or not; and tokenizers."""

import io

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.errors import CheckpointError
from vivavoce.kernels import cpu
from vivavoce.models.gguf import GGUF
from vivavoce.models.gguf_tokenizer import _pre_tokenizer, read_tokenizer
from vivavoce.models.llama import Llama
from vivavoce.models.registry import family_of
from vivavoce.nn.block_linear import BlockEmbedding, BlockLinear

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [*SPECIAL, "<tool_call>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
KINDS = [3] * len(SPECIAL) + [4] + [1] * (len(LETTERS) - len(SPECIAL) - 1)
SIZES = {
    "vocab_size": len(LETTERS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
PROMPT = [{"role": "user", "content": "hello there, 12"}]


def tiny_peer(architecture):
    torch.manual_seed(1)
    if architecture == "qwen2":
        peer = Qwen2ForCausalLM(Qwen2Config(**SIZES))
        for name, parameter in peer.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        return peer.eval()
    peer = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32))
    for name, parameter in peer.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return peer.eval()


def write_gguf(peer, architecture, file, kind=None):
    config, writer = peer.config, gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
    add_vocabulary(writer, "gpt2", LETTERS, KINDS)
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    for name, parameter in peer.named_parameters():
        weight, stored = parameter.detach().numpy(), names.get_name(name, (".weight", ".bias"))
        if weight.ndim > 1 and kind is not None:
            writer.add_tensor(stored, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, weight)
    close(writer)


def add_vocabulary(writer, model, tokens, kinds):
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)


def close(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def greedy(model, rows, count=24):
    engine = Engine(model, pick("cpu"), limits=EngineLimits(cache_rows=256))
    made = engine.complete(engine.open(rows), Generation(Sampling(temperature=0.0), max_new_rows=count))
    return [row[0] for row in made]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_tokens_are_those_of_transformers(architecture, tmp_path):
    peer = tiny_peer(architecture)
    write_gguf(peer, architecture, tmp_path / "m.gguf")
    model, tokenizer = Llama.load(tmp_path)
    rows = tokenizer.rows(PROMPT)
    ids = torch.tensor([[row[0] for row in rows]])
    with torch.no_grad():
        out = peer.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=0)
    assert greedy(model, rows) == out[0, ids.shape[1] :].tolist()
    assert family_of(tmp_path, "lm").name == "llama"


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_a_packed_model_is_close_to_the_widened_one(architecture, tmp_path, monkeypatch):
    write_gguf(tiny_peer(architecture), architecture, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    widened, tokenizer = Llama.load(tmp_path / "m.gguf")
    packed, _ = Llama.load(tmp_path / "m.gguf", is_packed=True)
    assert isinstance(packed.model.embed_tokens, BlockEmbedding) and isinstance(packed.lm_head, BlockLinear)
    ours, exact = packed.model.layers[0], widened.model.layers[0]
    x = torch.randn(3, 64)
    for path in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        layer, expected = ours.get_submodule(path), exact.get_submodule(path)
        inputs = torch.randn(3, layer.inputs)
        assert torch.equal(layer.weight, expected.weight)
        wanted = expected(inputs)
        assert (layer(inputs) - wanted).norm() <= 0.02 * wanted.norm(), path
    wanted = widened.logits(x)
    assert (packed.logits(x) - wanted).norm() <= 0.02 * wanted.norm()
    monkeypatch.setattr(cpu, "is_available", lambda: False)  # without rounded inputs it is the same model
    assert greedy(packed, tokenizer.rows(PROMPT)) == greedy(widened, tokenizer.rows(PROMPT))


def test_models_that_cannot_be_read_say_what_they_are(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    close(writer)
    with pytest.raises(CheckpointError, match="'mamba' model; llama, qwen2, qwen3"):
        Llama.load(tmp_path / "other.gguf")
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "qwen2")
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    close(writer)
    with pytest.raises(CheckpointError, match=r"lacks the setting 'qwen2\.attention\.head_count'"):
        Llama.load(tmp_path / "bare.gguf")


def test_byte_level_text_is_split_as_the_file_names_it(tmp_path):
    for name, expected in (("qwen2", ["It", "'LL", "Ġbe", "Ġ", "1", "2", "3", "4"]), ("llama-bpe", ["Ġ", "123", "4"])):
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "qwen2")
        add_vocabulary(writer, "gpt2", [*LETTERS, *expected], [*KINDS, *[1] * len(expected)])
        writer.add_tokenizer_pre(name)
        close(writer)
        split = _pre_tokenizer(GGUF(tmp_path / f"{name}.gguf"), name).pre_tokenize_str("It'LL be 1234")
        assert [part for part, _ in split][-len(expected) :] == expected
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "qwen2")
    add_vocabulary(writer, "gpt2", LETTERS, KINDS)
    writer.add_tokenizer_pre("klingon")
    close(writer)
    with pytest.raises(CheckpointError, match="pre-tokenizer 'klingon'"):
        read_tokenizer(GGUF(tmp_path / "odd.gguf"))


def test_user_defined_tokens_are_one_id_and_written_and_control_tokens_are_not(tmp_path):
    write_gguf(tiny_peer("qwen2"), "qwen2", tmp_path / "m.gguf")
    tokenizer = read_tokenizer(GGUF(tmp_path / "m.gguf"))
    ids = tokenizer.encode("<|im_start|><tool_call>hé 12<|im_end|>")
    assert ids[:2] == [1, 3] and ids[-1] == 2
    assert tokenizer.decode(ids) == "<tool_call>hé 12"


def test_sentencepiece_vocabularies_are_read_as_their_library_does(tmp_path):
    trained = io.BytesIO()
    sentences = [
        "the lighthouse keeper waits for the storm",
        "a storm at night",
        "the night was long and the keeper slept",
    ]
    options = {"vocab_size": 300, "byte_fallback": True, "normalization_rule_name": "identity", "model_type": "bpe"}
    options |= {"remove_extra_whitespaces": False, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=trained, **options)
    peer = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    ids = range(peer.vocab_size())
    kinds = [2 if peer.is_unknown(id) else 3 if peer.is_control(id) else 6 if peer.is_byte(id) else 1 for id in ids]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    add_vocabulary(writer, "llama", [peer.id_to_piece(id) for id in ids], kinds)
    writer.add_token_scores([peer.get_score(id) for id in ids])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ bos_token }}{% for message in messages %}[{{ message.content }}]{% endfor %}")
    close(writer)
    tokenizer = read_tokenizer(GGUF(tmp_path / "m.gguf"))
    for text in ("the storm", "a  lighthouse at night", "Zoë 12", "长城"):
        assert tokenizer.encode(text) == peer.encode(text)
        assert tokenizer.decode(peer.encode(text)) == text
    rows = tokenizer.rows([{"role": "user", "content": "the storm"}])
    assert [row[0] for row in rows] == [1, *peer.encode("[the storm]")]
