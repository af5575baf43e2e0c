"""What an exported folder consists of, for which version, and what is said where it cannot be."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from typer.testing import CliRunner

from tests.export.trtllm_models import MOSS, cosyvoice, moss_speech, whisper
from tests.golden import weights
from tests.models.named_checkpoint import GOLDEN
from vivavoce.cli import app
from vivavoce.errors import CheckpointError, InputError, MissingDependencyError, VivaError
from vivavoce.export.trtllm.decoder import Shard
from vivavoce.export.trtllm.export import calibrate, export_trtllm, read_rows
from vivavoce.export.trtllm.folder import MANIFEST, read_manifest
from vivavoce.export.trtllm.moss_speech import joint_id, moss_speech_folder
from vivavoce.export.trtllm.options import TrtLlmOptions, format_of, parse_version
from vivavoce.export.trtllm.runner import BiasRule, CosyVoiceEngine, ModeRule, MossSpeechEngine, usable_exports
from vivavoce.export.trtllm.whisper import cosyvoice_folder
from vivavoce.models.checkpoint import Checkpoint
from vivavoce.models.cosyvoice.lm import CosyVoiceLMConfig
from vivavoce.models.moss_speech.model import MossSpeechConfig

# The documented lists, by layer and around the layers.
QWEN3_LAYER = {
    *("input_layernorm.weight", "attention.qkv.weight", "attention.dense.weight", "attention.q_layernorm.weight"),
    *("attention.k_layernorm.weight", "post_layernorm.weight", "mlp.fc.weight", "mlp.gate.weight", "mlp.proj.weight"),
}
QWEN2_LAYER = (QWEN3_LAYER | {"attention.qkv.bias"}) - {
    *("attention.q_layernorm.weight", "attention.k_layernorm.weight"),
}
AROUND = {"transformer.vocab_embedding.weight", "transformer.ln_f.weight", "lm_head.weight"}
ENCODER_LAYER = {
    f"{name}.{kind}"
    for name in ("attention_layernorm", "attention.qkv", "attention.dense", "mlp_layernorm", "mlp.fc", "mlp.proj")
    for kind in ("weight", "bias")
}
DECODER_LAYER = {
    f"{name}.{kind}"
    for name in (
        *("self_attention_layernorm", "self_attention.qkv", "self_attention.dense", "cross_attention_layernorm"),
        *("cross_attention.qkv", "cross_attention.dense", "mlp_layernorm", "mlp.fc", "mlp.proj"),
    )
    for kind in ("weight", "bias")
}
GENERAL_KEYS = {
    *("architecture", "dtype", "logits_dtype", "vocab_size", "max_position_embeddings", "hidden_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_act", "intermediate_size"),
    *("norm_epsilon", "position_embedding_type", "rotary_embedding_dim", "head_size", "qk_layernorm"),
    *("use_parallel_embedding", "embedding_sharding_dim", "mapping", "quantization"),
}
QWEN_KEYS = {
    *("qwen_type", "rotary_base", "rotary_scaling", "attn_bias", "mlp_bias", "seq_length"),
    *("disable_weight_only_quant_plugin", "moe", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("num_labels", "tie_word_embeddings"),
}
WHISPER_ENCODER_KEYS = {
    *("architecture", "dtype", "num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings"),
    *("has_position_embedding", "n_mels", "vocab_size", "hidden_act", "num_languages", "quantization", "mapping"),
}
WHISPER_DECODER_KEYS = {
    *("architecture", "model_type", "dtype", "logits_dtype", "num_hidden_layers", "num_attention_heads"),
    *("hidden_size", "norm_epsilon", "vocab_size", "hidden_act", "use_parallel_embedding", "embedding_sharding_dim"),
    *("max_position_embeddings", "use_prompt_tuning", "head_size", "has_position_embedding", "layernorm_type"),
    *("has_attention_qkvo_bias", "has_mlp_bias", "has_model_final_layernorm", "has_embedding_layernorm"),
    *("has_embedding_scale", "ffn_hidden_size", "q_scaling", "layernorm_position", "relative_attention"),
    *("max_distance", "num_buckets", "rescale_before_lm_head", "encoder_hidden_size", "encoder_num_heads"),
    *("encoder_head_size", "skip_cross_kv", "quantization", "mapping"),
}


@pytest.fixture(scope="module")
def moss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moss")
    moss_speech(folder)
    return folder


def layers(names: set[str], count: int) -> set[str]:
    return {f"transformer.layers.{index}.{name}" for index in range(count) for name in names}


def tensor_names(folder: Path, rank: int = 0) -> set[str]:
    with safe_open(folder / f"rank{rank}.safetensors", "pt") as opened:
        return set(opened.keys())


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


class Shapes(Checkpoint):
    """A published checkpoint of which only names and shapes are known."""

    def __init__(self, keys: str) -> None:
        self.source = GOLDEN / "keys" / keys
        self.shapes = weights.shapes(self.source)
        self._tensors = dict.fromkeys(self.shapes, lambda: torch.empty(0))


def test_names_and_keys_are_the_documented_ones(moss: Path, tmp_path: Path) -> None:
    export_trtllm(moss, tmp_path / "trunk", TrtLlmOptions(), "trunk")
    assert tensor_names(tmp_path / "trunk") == layers(QWEN3_LAYER, 2) | AROUND
    assert set(config_of(tmp_path / "trunk")) == GENERAL_KEYS | QWEN_KEYS | {"use_logn_attn", "runtime_defaults"}
    cosyvoice(tmp_path / "cosyvoice", 2)
    export_trtllm(tmp_path / "cosyvoice" / "llm.pt", tmp_path / "lm", TrtLlmOptions(version="0.13.0"))
    assert tensor_names(tmp_path / "lm") == layers(QWEN2_LAYER, 2) | AROUND
    assert set(config_of(tmp_path / "lm")) == GENERAL_KEYS | QWEN_KEYS | {"share_embedding_table"}
    assert config_of(tmp_path / "lm")["attn_bias"] and config_of(tmp_path / "lm")["qwen_type"] == "qwen2"
    whisper(tmp_path / "whisper")
    export_trtllm(tmp_path / "whisper", tmp_path / "asr", TrtLlmOptions(version="0.17.0", dtype="float16"))
    around = {f"transformer.{name}.{kind}" for name in ("conv1", "conv2", "ln_f") for kind in ("weight", "bias")}
    positions = {"transformer.position_embedding.weight"}
    assert tensor_names(tmp_path / "asr" / "encoder") == layers(ENCODER_LAYER, 2) | around | positions
    ends = {f"transformer.ln_f.{kind}" for kind in ("weight", "bias")}
    assert tensor_names(tmp_path / "asr" / "decoder") == layers(DECODER_LAYER, 2) | AROUND | positions | ends
    assert set(config_of(tmp_path / "asr" / "encoder")) == WHISPER_ENCODER_KEYS
    assert set(config_of(tmp_path / "asr" / "decoder")) == WHISPER_DECODER_KEYS
    assert config_of(tmp_path / "asr" / "encoder")["num_languages"] == 101


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_published_models_can_be_cut(tp: int, tmp_path: Path) -> None:
    MossSpeechConfig().write(tmp_path)
    checkpoint = Shapes("moss_speech_lm.tsv")
    folder = moss_speech_folder(tmp_path, checkpoint, TrtLlmOptions(tp=tp, quantise="int4", sm=80), "whole")
    stored = {s.name: s for made in folder.plan(Shard(tp - 1, tp)).parts for s in made.stored}
    assert stored["transformer.layers.39.attention.qkv.weight"].shape == (4096, (32 + 16) * 128 // tp // 2)
    assert stored["transformer.layers.0.mlp.proj.weight"].shape == (12288 // tp, 2048)
    assert stored["audio_lm_head.weight"].shape == (16512 // tp, 4096)
    assert stored["transformer.vocab_embedding.weight"].shape == (151680 + 16512, 4096)
    second = Shapes("cosyvoice2_llm.tsv")
    if tp <= 2:
        plan = cosyvoice_folder(second, TrtLlmOptions(tp=tp), "whole").plan(Shard(0, tp))
        shapes = {s.name: s.shape for made in plan.parts for s in made.stored}
        assert shapes["transformer.layers.23.attention.qkv.bias"] == ((14 + 4) * 64 // tp,)
        assert shapes["lm_head.weight"] == (6564 // tp, 896)
    else:
        with pytest.raises(InputError, match=r"14 attention heads cannot be divided among . ranks; --tp can be 1, 2$"):
            cosyvoice_folder(second, TrtLlmOptions(tp=tp), "whole")


def test_versions_differ_where_they_do() -> None:
    assert str(parse_version("v1.3.0rc20")) == "1.3.0rc20" and parse_version("1.3.0rc20") < parse_version("1.3.0")
    old, new = format_of("0.13"), format_of("1.2.1")
    assert not old.has_qwen3 and new.has_qwen3 and new.has_engines
    assert "use_meta_recipe" not in old.quantization_keys and "use_meta_recipe" in new.quantization_keys
    assert format_of("1.3.0rc20").has_engines and not format_of("1.3.0rc21").has_engines


def test_the_build_script_is_right_and_runs(moss: Path, tmp_path: Path) -> None:
    export_trtllm(moss, tmp_path / "out", TrtLlmOptions(quantise="int8", sm=89, kv_cache="fp8", tp=2))
    script = tmp_path / "out" / "build_engine.sh"
    text = script.read_text()
    for flag in (
        *("--max_batch_size", "--max_input_len 2048", "--max_seq_len 6144", "--kv_cache_type paged"),
        *("--context_fmha enable", "--remove_input_padding enable", "--model_cls_file moss_speech_network.py"),
        *("--workers 1", "--gpt_attention_plugin bfloat16", "80|86|89|120) ;;"),
    ):
        assert flag in text
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, body in {"trtllm-build": 'echo "$@" >> ../calls', "nvidia-smi": "echo 9.0"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    path = {"PATH": f"{tools}:/usr/bin:/bin"}
    refused = subprocess.run([script], env=path, capture_output=True, text=True, check=False)
    assert (
        refused.returncode == 1 and "laid out for sm 89, this GPU is sm 90: export again with --sm 90" in refused.stderr
    )
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 8.6\n")
    subprocess.run([script], env=path | {"MAX_BATCH_SIZE": "7"}, check=True)
    calls = (tmp_path / "calls").read_text()
    assert "--checkpoint_dir . --output_dir engines" in calls and "--max_batch_size 7" in calls
    (tools / "trtllm-build").unlink()
    missing = subprocess.run([script], env=path, capture_output=True, text=True, check=False)
    assert missing.returncode == 1 and "pip install tensorrt-llm==1.2.1" in missing.stderr


def test_whispers_script_builds_both_sides(tmp_path: Path) -> None:
    whisper(tmp_path / "model")
    export_trtllm(tmp_path / "model", tmp_path / "out", TrtLlmOptions(dtype="float16"))
    text = (tmp_path / "out" / "build_engine.sh").read_text()
    assert text.count("trtllm-build \\") == 2
    assert "--max_encoder_input_len 3000" in text and "--bert_attention_plugin float16" in text


def test_what_was_read_is_written_before_more_is_read(
    moss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []  # bytes read so far, bytes written so far
    read = Checkpoint.tensor

    def watched(checkpoint: Checkpoint, name: str) -> Tensor:
        tensor = read(checkpoint, name)
        written = sum(file.stat().st_size for file in (tmp_path / "out.partial").glob("rank*"))
        before = seen[-1][0] if seen else 0
        seen.append((before + tensor.numel() * 2, written))
        return tensor

    monkeypatch.setattr(Checkpoint, "tensor", watched)
    export_trtllm(moss, tmp_path / "out", TrtLlmOptions())
    largest = 2 * 256 * (320 + 72)  # both tables, which become one tensor
    assert max(read - written for read, written in seen) <= largest + 65536  # and what the file object holds back


def test_a_half_written_export_is_known_as_such(moss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as broken:
        broken.setattr(Checkpoint, "tensor", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match="full"):
            export_trtllm(moss, out, TrtLlmOptions())
    assert not out.exists()
    with pytest.raises(CheckpointError, match=r"out.partial is an incomplete export; remove it and export again"):
        read_manifest(tmp_path / "out.partial")
    export_trtllm(moss, out, TrtLlmOptions())  # a new one begins anew
    assert not (tmp_path / "out.partial").exists()
    rank = out / "rank0.safetensors"
    whole = rank.read_bytes()
    rank.write_bytes(whole[:1000])
    with pytest.raises(CheckpointError, match=rf"is incomplete: rank0.safetensors has 1000 of {len(whole)} bytes"):
        read_manifest(out)
    rank.unlink()
    with pytest.raises(CheckpointError, match=r"rank0.safetensors is missing; export again"):
        MossSpeechEngine(out, moss)
    (out / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"not a finished export"):
        read_manifest(out)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp": 3}, "--tp is 3; it can be 1, 2, 4, 8"),
        ({"dtype": "float32"}, "--dtype is float32; it can be bfloat16, float16"),
        ({"quantise": "int2"}, "--quantise is int2"),
        ({"sm": 70}, "--sm is 70"),
        ({"quantise": "fp8"}, "fp8 needs calibrated activation ranges"),
        ({"kv_cache": "fp8", "sm": 80}, "an sm 80 GPU .Ampere. has no fp8"),
        ({"quantise": "int4", "kv_cache": "int8"}, "int4 weights do not go with an int8 cache"),
        ({"version": "twelve"}, "'twelve' is not a version of TensorRT-LLM"),
        ({"version": "0.9.0"}, "0.9.0 is older than 0.13.0"),
    ],
)
def test_choices_that_cannot_be(options: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        TrtLlmOptions(**options)


def test_models_that_cannot_be(moss: Path, tmp_path: Path) -> None:
    def says(line: str, source: Path, part: str = "whole", **options: object) -> None:
        with pytest.raises(VivaError, match=line):
            export_trtllm(source, tmp_path / "never", TrtLlmOptions(**options), part)
        assert not (tmp_path / "never").exists() and not (tmp_path / "never.partial").exists()

    asr, lm = tmp_path / "asr", tmp_path / "lm"
    whisper(asr)
    cosyvoice(lm, 3)
    says("does not exist", tmp_path / "nowhere")
    says("holds no known model type", lm)
    says("0.20.0 has no decoder with norms on queries and keys", moss, version="0.20.0")
    says("MOSS-Speech has no part head; it has whole, trunk", moss, "head")
    says("versions of TensorRT-LLM differ in how they lay out", moss, quantise="int8", sm=100)
    says("256 inputs and 64 outputs has no|a matrix of 32 inputs", moss, quantise="int4", sm=80, tp=8)
    says("an int8 cache needs calibrated ranges", moss, kv_cache="int8")
    says("leave --quantise and --kv-cache out", moss, version="1.4.0rc1", kv_cache="fp8")
    says("Whisper engines take --quantise int8, int4 or none", asr, kv_cache="fp8")
    says("Whisper has no part ear; it has encoder, decoder", asr, "ear")
    says("reads Whisper's own folder", asr, version="1.3.0")
    says("builds no engines after 1.3.0rc20", lm / "llm.pt", version="1.3.0")
    says("has no part ear; leave --part out", lm / "llm.pt", "ear")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    with pytest.raises(InputError, match="full is not an empty folder"):
        export_trtllm(moss, tmp_path / "full", TrtLlmOptions())


def test_calibration_reads_rows(moss: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    for text, said in {
        "{": "holds no sequences of rows",
        "[[]]": "empty sequence",
        "[[[5, 0], [320, 0]]]": r"has the row \[320, 0\]; rows have ids below \[320, 72\]",
        "[[[5]]]": r"has the row \[5\]",
    }.items():
        rows.write_text(text)
        with pytest.raises(InputError, match=said):
            read_rows(rows, (320, 72))
    with pytest.raises(InputError, match="cannot read"):
        read_rows(tmp_path / "none.json", (320, 72))
    rows.write_text("[[[5, 0], [305, 7]]]")
    assert calibrate(moss, rows)["transformer.layers.3.mlp.proj"] > 0


def test_engines_ask_for_what_they_lack(moss: Path, tmp_path: Path) -> None:
    export_trtllm(moss, tmp_path / "out", TrtLlmOptions())
    with pytest.raises(CheckpointError, match=r"has no engine yet; run .*build_engine.sh"):
        MossSpeechEngine(tmp_path / "out", moss)
    (tmp_path / "out" / "engines").mkdir()
    (tmp_path / "out" / "engines" / "config.json").write_text("{}")
    with pytest.raises(MissingDependencyError, match=r"engines need TensorRT-LLM up to 1\.3\.0rc20: pip install"):
        MossSpeechEngine(tmp_path / "out", moss)
    with pytest.raises(InputError, match=r"is the whole of moss-speech, not a whole cosyvoice-lm"):
        CosyVoiceEngine(tmp_path / "out", CosyVoiceLMConfig.cosyvoice2())
    assert "not installed" in usable_exports()[0]


def test_a_reply_stays_in_its_mode() -> None:
    rule, text = ModeRule(MOSS), MOSS.vocab_size
    speech = [joint_id(MOSS, (MOSS.modality_pad_token_id, code)) for code in (3, 40, MOSS.eosp_token_id)]
    cases = {
        (9, 11): False,
        (9, MOSS.sosp_token_id): True,
        (MOSS.sosp_token_id, *speech[:2]): True,
        (MOSS.sosp_token_id, *speech): False,
        (9, text + MOSS.audio_pad_token_id): False,
    }
    for ids, in_speech in cases.items():
        logits = torch.zeros(1, 1, text + MOSS.audio_vocab_size)
        rule(1, logits, [list(ids)], None, None)
        allowed = logits[0, 0].isfinite().nonzero().flatten()
        first, last = (text, text + MOSS.eosp_token_id) if in_speech else (0, text - 1)
        assert (allowed[0], allowed[-1], len(allowed)) == (first, last, last - first + 1)
    logits = torch.zeros(1, 1, 8)  # padded by two
    BiasRule(torch.arange(6.0))(1, logits, [[4]], None, None)
    assert logits.flatten().tolist() == [0, 1, 2, 3, 4, 5, 0, 0]


def test_the_command(moss: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", "trtllm", str(moss), str(tmp_path / "out"), "--tp", "2", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["files"]["rank1.safetensors"] == (tmp_path / "out/rank1.safetensors").stat().st_size
    refused = CliRunner().invoke(app, ["export", "trtllm", str(moss), str(tmp_path / "two"), "--tp", "5"])
    assert isinstance(refused.exception, InputError)
