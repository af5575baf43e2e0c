"""Folders with the files, names, types and shapes of the published ONNX folders; what the graphs compute is simple."""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from vivavoce.train.tts.batches import write_tokenizer

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT32
LAYERS, HEADS, HEAD_DIM, HIDDEN, TEXT_IDS, BOOKS, CODES = 12, 12, 64, 768, 16_384, 16, 1024
FRAME = 3840
CONTEXTS = [500] * 4 + [800] * 2 + [1200] * 2 + [1600] * 4
VOICE = [[(7 * frame + book) % CODES for book in range(BOOKS)] for frame in range(5)]
PAST = ["batch", "past", HEADS, HEAD_DIM]


class Layout:
    """Collects the nodes of one graph."""

    def __init__(self) -> None:
        self.inputs, self.outputs, self.nodes, self.weights = [], [], [], []

    def takes(self, name: str, kind: int, shape: list[str | int]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def gives(self, name: str, kind: int, shape: list[str | int], op: str, *given: str, **how: object) -> str:
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))
        return self.node(op, *given, out=name, **how)

    def node(self, op: str, *given: str, out: str = "", **how: object) -> str:
        out = out or f"value_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, given, [out], **how))
        return out

    def weight(self, values: np.ndarray) -> str:
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def write(self, file: Path, data: str = "") -> None:
        """Weights lie in `data`, a file of their own that graphs share, where one is named."""
        graph = helper.make_graph(self.nodes, file.stem, self.inputs, self.outputs, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        outside = {"save_as_external_data": True, "location": data, "size_threshold": 1000} if data else {}
        onnx.checker.check_model(model)
        onnx.save(model, file, **outside)


def write_language_model(folder: Path) -> None:
    """The folder of the language model: five graphs, a manifest, a tokenizer."""
    scale = np.random.default_rng(0).standard_normal(HIDDEN).astype(np.float32)
    for name, rows in (("prefill", "row"), ("decode_step", 1)):
        graph = Layout()
        ids = graph.takes("input_ids", INT, ["batch", rows, 1 + BOOKS])
        if name == "prefill":
            graph.takes("attention_mask", INT, ["batch", rows])
        else:
            graph.takes("past_valid_lengths", INT, ["batch"])
        summed = graph.node("ReduceSum", graph.node("Cast", ids, to=FLOAT), graph.weight(np.array([2])), keepdims=1)
        graph.gives("global_hidden", FLOAT, ["batch", rows, HIDDEN], "Mul", summed, graph.weight(scale))
        heads = graph.node("Reshape", "global_hidden", graph.weight(np.array([0, 0, HEADS, HEAD_DIM])))
        for kind in (f"{what}_{layer}" for layer in range(LAYERS) for what in ("key", "value")):
            present = ("present_" + kind, FLOAT, ["batch", "present", HEADS, HEAD_DIM])
            if name == "prefill":
                graph.gives(*present, "Identity", heads)
            else:
                past = graph.takes(f"past_{kind}", FLOAT, PAST)
                graph.gives(*present, "Concat", past, heads, axis=1)
        graph.write(folder / f"moss_tts_{name}.onnx", "moss_tts_global_shared.data")
    _write_local(folder)
    write_tokenizer(folder, TEXT_IDS)
    manifest = {
        "format_version": 1,
        "model_files": {"tts_meta": "tts_browser_onnx_meta.json", "codec_meta": "codec_browser_onnx_meta.json"},
        "tts_config": {"n_vq": BOOKS, "audio_pad_token_id": CODES, "row_width": 1 + BOOKS},
        "prompt_templates": {"user_prompt_prefix_token_ids": [600, 289]},
        "generation_defaults": {"max_new_frames": 375, "do_sample": True, "sample_mode": "fixed"},
        "builtin_voices": [
            {"voice": "Ava", "display_name": "Ava", "group": "", "audio_file": "en_2.wav", "prompt_audio_codes": VOICE}
        ],
        "text_samples": [{"text_token_ids": [7026, 1177, 10380]}],
    }  # fmt: skip
    (folder / "browser_poc_manifest.json").write_text(json.dumps(manifest))
    (folder / "tts_browser_onnx_meta.json").write_text("{}")


def _write_local(folder: Path) -> None:
    """A frame whose codes are the uniform numbers it is drawn by; the logits of a step grow with its code."""
    graph = Layout()
    for name, shape in (("global_hidden", [1, HIDDEN]), ("assistant_random_u", [1]), ("audio_random_u", [1, BOOKS])):
        graph.takes(name, FLOAT, shape)
    graph.takes("repetition_seen_mask", INT, [1, BOOKS, CODES])
    column = graph.node("Unsqueeze", "assistant_random_u", graph.weight(np.array([1])))
    goes_on = graph.node("LessOrEqual", column, graph.weight(np.array(0.9, np.float32)))
    graph.gives("should_continue", INT, [1, 1], "Cast", goes_on, to=INT)
    codes = graph.node("Mul", "audio_random_u", graph.weight(np.array(CODES - 1, np.float32)))
    graph.gives("frame_token_ids", INT, [1, BOOKS], "Cast", codes, to=INT)
    graph.write(folder / "moss_tts_local_fixed_sampled_frame.onnx")
    for name in ("local_decoder", "local_cached_step"):
        graph = Layout()
        graph.takes("global_hidden", FLOAT, [1, HIDDEN])
        graph.takes("text_token_id", INT, [1])
        if name == "local_decoder":
            graph.takes("audio_prefix_token_ids", INT, [1, BOOKS - 1])
        else:
            for each in ("audio_token_id", "channel_index", "step_type", "past_valid_lengths"):
                graph.takes(each, INT, [1])
            heads = graph.node("Reshape", "global_hidden", graph.weight(np.array([1, 1, HEADS, HEAD_DIM])))
            for each in ("key_0", "value_0"):
                past = graph.takes(f"local_past_{each}", FLOAT, [1, "past", HEADS, HEAD_DIM])
                shape = [1, "present", HEADS, HEAD_DIM]
                graph.gives(f"local_present_{each}", FLOAT, shape, "Concat", past, heads, axis=1)
        rising = np.arange(BOOKS * CODES, dtype=np.float32).reshape(1, BOOKS, CODES) % 701
        going_on = np.zeros((1, TEXT_IDS), np.float32)
        going_on[0, 9] = 5
        one = graph.node("ReduceMean", graph.node("Cast", "text_token_id", to=FLOAT), keepdims=0)
        nothing = graph.node("Mul", one, graph.weight(np.array(0, np.float32)))
        graph.gives("text_logits", FLOAT, [1, TEXT_IDS], "Add", graph.weight(going_on), nothing)
        graph.gives("audio_logits", FLOAT, [1, BOOKS, CODES], "Add", graph.weight(rising), nothing)
        graph.write(folder / f"moss_tts_{name}.onnx", "moss_tts_local_shared.data")


def write_codec(folder: Path) -> None:
    """The folder of the codec: three graphs and what they are of. A frame sounds as loud as its first code is high."""
    graph = Layout()
    graph.takes("waveform", FLOAT, ["batch", 2, "sample"])
    lengths = graph.takes("input_lengths", INT, ["batch"])
    frames = graph.node("Reshape", "waveform", graph.weight(np.array([1, 2, -1, FRAME])))
    mean = graph.node("ReduceMean", graph.node("Abs", frames), axes=[1, 3], keepdims=0)
    column = graph.node("Unsqueeze", mean, graph.weight(np.array([2])))
    wide = graph.node("Mul", column, graph.weight(np.full((1, 1, BOOKS), 100, np.float32)))
    graph.gives("audio_codes", INT, ["batch", "frame", BOOKS], "Cast", wide, to=INT)
    samples = graph.weight(np.array([FRAME], np.int32))
    graph.gives("audio_code_lengths", INT, ["batch"], "Div", lengths, samples)
    graph.write(folder / "moss_audio_tokenizer_encode.onnx")
    for name in ("decode_full", "decode_step"):
        graph = Layout()
        codes = graph.takes("audio_codes", INT, [1, "frame", BOOKS])
        lengths = graph.takes("audio_code_lengths", INT, [1])
        first = graph.node("Gather", graph.node("Cast", codes, to=FLOAT), graph.weight(np.array([0, 0])), axis=2)
        loud = graph.node("Unsqueeze", graph.node("Transpose", first, perm=[0, 2, 1]), graph.weight(np.array([3])))
        sound = graph.node("Mul", loud, graph.weight(np.full((1, 1, 1, FRAME), 1 / CODES, np.float32)))
        flat = graph.weight(np.array([1, 2, -1]))
        graph.gives("audio", FLOAT, [1, 2, "sample"], "Reshape", sound, flat)
        graph.gives("audio_lengths", INT, [1], "Mul", lengths, graph.weight(np.array([FRAME], np.int32)))
        if name == "decode_step":
            _pass_state(graph, lengths)
        graph.write(folder / f"moss_audio_tokenizer_{name}.onnx", "moss_audio_tokenizer_decode_shared.data")
    (folder / "codec_browser_onnx_meta.json").write_text(json.dumps({"sample_rate": 48_000}))


def _pass_state(graph: Layout, lengths: str) -> None:
    """Offsets count frames; keys, values and positions come out as they went in."""
    for name in [f"transformer_offset_{stage}" for stage in range(4)]:
        graph.gives(f"{name}_out", INT, [1], "Add", graph.takes(name, INT, [1]), lengths)
    for layer, context in enumerate(CONTEXTS):
        name = f"attn_offset_{layer}"
        graph.gives(f"{name}_out", INT, [1], "Add", graph.takes(name, INT, [1]), lengths)
        for kind in ("keys", "values"):
            name, shape = f"attn_cached_{kind}_{layer}", [1, 4, context, HEAD_DIM]
            graph.gives(f"{name}_out", FLOAT, shape, "Identity", graph.takes(name, FLOAT, shape))
        name = f"attn_cached_positions_{layer}"
        graph.gives(f"{name}_out", INT, [1, context], "Identity", graph.takes(name, INT, [1, context]))
