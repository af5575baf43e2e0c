"""Llama-type chat models: equal to transformers, from a folder and from a GGUF file written by its own library."""

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.errors import CheckpointError
from vivavoce.models.gguf import GGUF
from vivavoce.models.llama import Llama

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
HEADS, KV_HEADS = 4, 2


@pytest.fixture(scope="module")
def peer():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(LETTERS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        eos_token_id=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(peer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    peer.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def said(*turns):
    return [{"role": role, "content": words} for role, words in turns]


def _pairs_together(weight, heads):
    """Rows of q and k as GGUF has them: rotated pairs side by side."""
    dim = weight.shape[0] // heads
    return weight.reshape(heads, 2, dim // 2, -1).transpose(0, 2, 1, 3).reshape(weight.shape)


def _write_gguf(peer, file, kind):
    """The peer's weights in a GGUF file, and rounded in place to what the file holds."""
    config = peer.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(LETTERS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(LETTERS) - len(SPECIAL)))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, parameter in peer.named_parameters():
        weight = parameter.detach().numpy()
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        stored = _pairs_together(weight, heads) if heads else weight
        if weight.ndim > 1 and kind is not None:
            packed = gguf.quants.quantize(np.ascontiguousarray(stored), kind)
            writer.add_tensor(names.get_name(name, (".weight",)), packed, raw_dtype=kind)
        else:
            writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _greedy(model, rows, count=24):
    engine = Engine(model, pick("cpu"), limits=EngineLimits(cache_rows=256))
    made = engine.complete(engine.open(rows), Generation(Sampling(temperature=0.0), max_new_rows=count))
    return [row[0] for row in made]


def _peer_greedy(peer, rows, count=24):
    ids = torch.tensor([[row[0] for row in rows]])
    with torch.no_grad():
        out = peer.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=2, pad_token_id=0)
    return out[0, ids.shape[1] :].tolist()


def test_a_folder_is_read_as_transformers_reads_it(peer, folder):
    model, tokenizer = Llama.load(folder)
    rows = tokenizer.rows(said(("system", "be brief"), ("user", "what is it?")))
    assert [row[0] for row in rows[:1]] == [1]
    assert _greedy(model, rows) == _peer_greedy(peer, rows)


@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_a_gguf_file_holds_what_its_own_library_says(peer, tmp_path, kind):
    _write_gguf(peer, tmp_path / "m.gguf", kind)
    model, tokenizer = Llama.load(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    ours = GGUF(tmp_path / "m.gguf")
    for tensor in reader.tensors:
        exact = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_allclose(ours.tensor(tensor.name).numpy(), exact, rtol=1e-6, atol=1e-6)
    if kind is None:
        rows = tokenizer.rows(said(("user", "hello there")))
        assert _greedy(model, rows) == _peer_greedy(peer, rows)


def test_damaged_and_foreign_files_are_refused(peer, tmp_path):
    _write_gguf(peer, tmp_path / "whole.gguf", None)
    content = (tmp_path / "whole.gguf").read_bytes()
    for length in (0, 3, 20, 300, len(content) // 2, len(content) - 5):
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="fetch it again"):
            Llama.load(tmp_path / "cut.gguf")
    (tmp_path / "other.gguf").write_bytes(b"PK\x03\x04" + content[4:])
    with pytest.raises(CheckpointError, match="does not start with GGUF"):
        Llama.load(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match="Llama-type"):
        Llama.load(tmp_path)
