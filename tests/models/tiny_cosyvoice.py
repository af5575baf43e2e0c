"""Folders laid out as CosyVoice 2 and 3 are published, with networks of a few channels and random weights."""

import json
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.golden import weights
from tests.models.hift_cases import WAYS_TO_SPELL, quietened, spelled
from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.cosyvoice.dit import CosyVoice3Flow, CosyVoice3FlowConfig, DiTConfig, LookaheadConfig
from vivavoce.models.cosyvoice.folder import ADDED, VERSION_FILES, CosyVoiceSizes
from vivavoce.models.cosyvoice.lm import CosyVoiceLM, CosyVoiceLMConfig
from vivavoce.models.flow.estimator import FlowEstimatorConfig
from vivavoce.models.flow.model import FlowConfig, FlowDecoder, FlowEncoderConfig
from vivavoce.models.hift.causal import CausalHiFT, CausalHiFTConfig
from vivavoce.models.hift.model import HiFT, HiFTConfig

OWN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or")
CODES = 6561
VOCODER = {"channels": 16, "f0_channels": 8, "overtones": 1}
SHARED = {"vocabulary": CODES, "chunk": 25, "euler_steps": 2}
TEXT_IDS = 256 + len(MERGES) + len(OWN_TOKENS)  # before the added ones


def sizes(version):
    """A few channels; ids, rates, bands and chunks are the published ones."""
    lm = CosyVoiceLMConfig(
        version=version,
        speech_rows=6564 if version == 2 else 6761,
        vocab_size=TEXT_IDS + len(ADDED[version]) + 5,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        end_of_prompt=TEXT_IDS,
    )
    if version == 2:
        encoder = FlowEncoderConfig(ratio=2, dim=16, heads=2, feed_forward=24, code_layers=1, frame_layers=1)
        estimator = FlowEstimatorConfig(channels=12, middle_blocks=1, transformers=1, heads=2, head_dim=8)
        return CosyVoiceSizes(lm, FlowConfig(**SHARED, encoder=encoder, estimator=estimator), HiFTConfig(**VOCODER))
    estimator = DiTConfig(dim=32, blocks=1, heads=4, head_dim=8, time_waves=8, position_kernel=5, position_groups=4)
    flow = CosyVoice3FlowConfig(**SHARED, encoder=LookaheadConfig(dim=16), estimator=estimator)
    return CosyVoiceSizes(lm, flow, CausalHiFTConfig(**VOCODER))


@torch.no_grad()
def write_folder(folder: Path, version: int, reinforced: bool = True) -> Path:
    """Everything that is published, and our `sizes.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    small = sizes(version)
    (folder / VERSION_FILES[version]).write_text("# not read\n")
    small.write(folder)
    torch.save(lm_tensors(CosyVoiceLM.random(small.lm, seed=1)), folder / "llm.pt")
    if reinforced and version == 3:
        torch.save(lm_tensors(CosyVoiceLM.random(small.lm, seed=2)), folder / "llm.rl.pt")
    flow = (FlowDecoder if version == 2 else CosyVoice3Flow)(small.flow)
    for name, tensor in published_tensors(flow).items():
        if not weights.is_constant(name):
            tensor.copy_(torch.from_numpy(weights.tensor(name, tuple(tensor.shape), seed=3)))
    torch.save(dict(published_tensors(flow)), folder / "flow.pt")
    vocoder = quietened((HiFT if version == 2 else CausalHiFT)(small.vocoder))
    keys = f"cosyvoice{version}_hift.tsv"
    torch.save(spelled(vocoder, keys, *WAYS_TO_SPELL["new"]), folder / "hift.pt")
    write_tokenizer(folder / "CosyVoice-BlankEN")
    write_networks(folder, version)
    return folder


def lm_tensors(model):
    """As published: with the text head that nobody uses."""
    tensors = dict(published_tensors(model))
    return tensors | {"llm.model.lm_head.weight": tensors["llm.model.model.embed_tokens.weight"]}


def write_tokenizer(folder: Path, filled_to: int = 0) -> None:
    """Bytes and a few merges; `filled_to` as many ids as the published vocabulary has."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*byte_letters(), *merged]
    tokens += [f"unused{number}" for number in range(filled_to - len(tokens))]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n")
    own = {str(len(tokens) + place): {"content": token} for place, token in enumerate(OWN_TOKENS)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": own}))


def byte_letters():
    """The letters that stand for the 256 bytes in a byte-level vocabulary, in the order of the bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def write_networks(folder: Path, version: int) -> None:
    """A tokenizer that hears the mean of four frames, and a speaker that is the mean of all."""
    weight = np.random.default_rng(0).normal(size=(80, 192)).astype(np.float32)
    nodes = [
        helper.make_node("ReduceMean", ["input"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["mean", "weight"], ["vector"]),
    ]
    inputs = [helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, "time", 80])]
    outputs = [helper.make_tensor_value_info("vector", TensorProto.FLOAT, [1, 192])]
    _save(folder / "campplus.onnx", nodes, inputs, outputs, {"weight": weight})
    nodes = [
        helper.make_node("AveragePool", ["feats"], ["pooled"], kernel_shape=[4], strides=[4]),
        helper.make_node("ReduceMean", ["pooled"], ["level"], axes=[1], keepdims=0),
        helper.make_node("Mul", ["level", "scale"], ["scaled"]),
        helper.make_node("Abs", ["scaled"], ["positive"]),
        helper.make_node("Cast", ["positive"], ["whole"], to=TensorProto.INT32),
        helper.make_node("Cast", ["feats_length"], ["unused"], to=TensorProto.INT32),
        helper.make_node("Mod", ["whole", "codes"], ["tokens"]),
    ]
    inputs = [
        helper.make_tensor_value_info("feats", TensorProto.FLOAT, [1, 128, "time"]),
        helper.make_tensor_value_info("feats_length", TensorProto.INT32, [1]),
    ]
    outputs = [helper.make_tensor_value_info("tokens", TensorProto.INT32, [1, "code"])]
    constants = {"scale": np.float32(97_003.0), "codes": np.array(CODES, dtype=np.int32)}
    _save(folder / f"speech_tokenizer_v{version}.onnx", nodes, inputs, outputs, constants)


def _save(file, nodes, inputs, outputs, constants):
    initialisers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, initialisers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, str(file))
