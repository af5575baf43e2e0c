"""MOSS-Speech gives what transformers' Qwen3 layers give, in all modes, and writes what the published loop writes."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.golden import weights
from tests.models.moss_speech_reference import Reference
from tests.models.tiny import CONFIG, ByteTokenizer, tiny_model
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import Checkpoint, published_tensors, save_weights
from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig
from vivavoce.models.moss_speech.prompt import MossSpeechPrompt, Turn
from vivavoce.nn.paged_kv import CachePiece, PagedCache, RowBatch

KEYS = Path(__file__).parents[1] / "golden" / "keys" / "moss_speech_lm.tsv"
PROMPT = MossSpeechPrompt(CONFIG, ByteTokenizer())
CODES = [7, 63, 0, 5, 5, 12, 40]  # 5 is audio_pad too: a legal code

CONVERSATIONS = {
    "speech to speech": ([Turn("user", CODES)], "speech"),
    "speech to text": ([Turn("user", CODES)], "text"),
    "text to speech": ([Turn("system", "Be brief."), Turn("user", "Hello?")], "speech"),
    "text to text": ([Turn("system", "Be brief."), Turn("user", "Hello?")], "text"),
    "many turns": (
        [
            Turn("system", "Speak."),
            Turn("user", CODES),
            Turn("assistant", CODES[::-1]),
            Turn("user", "And now?"),
            Turn("assistant", "Yes."),
            Turn("user", CODES[2:]),
        ],
        "speech",
    ),
}


@pytest.fixture(scope="module", params=[0, 1, 2])
def pair(request):
    """Our model and the reference with the same weights, float32."""
    model = tiny_model(request.param, torch.float32)
    reference = Reference(CONFIG)
    missing = reference.load_state_dict(published_tensors(model), strict=True)
    assert not missing.missing_keys and not missing.unexpected_keys
    return model, reference.eval()


@torch.inference_mode()
def all_logits(model: MossSpeech, rows: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits at every row, all rows computed in one piece."""
    pages = -(-len(rows) // 16) + 1
    cache = PagedCache.allocate(model.kv_shape, pages, 16, torch.float32, torch.device("cpu"))
    table = torch.arange(1, pages, dtype=torch.int32)[None]
    positions = torch.arange(len(rows), dtype=torch.int32)
    piece = CachePiece(slice(0, len(rows)), slot=0, position=0)
    batch = RowBatch(cache, table, torch.zeros_like(positions), positions, 0, (piece,))
    return model.logits(model(torch.tensor(rows), batch))


def greedy_engine(model: MossSpeech) -> Engine:
    return Engine(model, pick("cpu"), torch.float32, EngineLimits(cache_rows=1024, rows_per_step=8, page_size=4))


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_logits_of_both_heads_equal_the_reference(pair, name):
    model, reference = pair
    rows = PROMPT.rows(*CONVERSATIONS[name])
    expected = reference(torch.tensor(rows))
    for ours, theirs in zip(all_logits(model, rows), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_generation_equals_the_published_loop(pair, name, penalty):
    model, reference = pair
    rows = PROMPT.rows(*CONVERSATIONS[name])
    engine = greedy_engine(model)
    sampling = Sampling(temperature=0.0, repetition_penalty=penalty)
    ours = engine.complete(engine.open(rows), Generation(sampling, max_new_rows=24, min_new_rows=10))
    assert ours == reference.generate_greedily(rows, 24, min_new=10, penalty=penalty)


def test_generation_goes_through_mode_switches():
    """Heads biased so that speech begins, ends and begins again: the rows follow the mode, as the reference's do."""
    model = tiny_model(3, torch.float32)
    with torch.no_grad():
        model.text_lm_head.weight[CONFIG.sosp_token_id] *= 3
        model.audio_lm_head.weight[CONFIG.eosp_token_id] *= 3
    reference = Reference(CONFIG)
    reference.load_state_dict(published_tensors(model))
    modes = set()
    for content in ("Hi", "What?", "Go on, please.", CODES):
        rows = PROMPT.rows([Turn("user", content)], "text")
        engine = greedy_engine(model)
        made = engine.complete(engine.open(rows), Generation(Sampling(temperature=0.0), max_new_rows=40))
        assert made == reference.generate_greedily(rows, 40)
        spoken = [row[0] == CONFIG.modality_pad_token_id for row in made]
        modes |= {(before, after) for before, after in itertools.pairwise(spoken)}
    assert {(False, True), (True, False)} <= modes, "no reply switched both ways; the test shows nothing"


def test_speech_is_read_up_to_its_end():
    model = tiny_model()
    pad, end = CONFIG.modality_pad_token_id, CONFIG.eosp_token_id
    assert model.spoken_codes([(pad, 3), (pad, 5), (pad, end), (CONFIG.eos_token_id, 9)]) == [3, 5]
    assert model.written_ids([(pad, 3), (pad, end), (CONFIG.eos_token_id, 9)]) == [CONFIG.eos_token_id]


def test_the_prompt_has_the_published_grid():
    pad, audio_pad = CONFIG.modality_pad_token_id, CONFIG.audio_pad_token_id
    rows = PROMPT.rows([Turn("user", [7, 9])], "speech")
    text = ByteTokenizer().encode

    def written(piece: str) -> list[tuple[int, int]]:
        return [(token, audio_pad) for token in text(piece)]

    speech = [(CONFIG.sosp_token_id, audio_pad), (pad, 7), (pad, 9), (pad, CONFIG.eosp_token_id)]
    default = "You are a helpful assistant. Respond with spoken outputs."
    assert rows == [
        *written("<|im_start|>user\n"),
        *speech,
        *written("<|im_end|>\n"),
        *written("<|im_start|>system\n"),
        *written(default),
        *written("<|im_end|>\n"),
        *written("<|im_start|>assistant\n<|object_ref_start|>"),
    ]


@pytest.mark.parametrize(
    ("turns", "reply", "says"),
    [
        ([], "speech", "at least one turn"),
        ([Turn("robot", "hi")], "speech", "robot"),
        ([Turn("user", [])], "speech", "no codes"),
        ([Turn("user", [64])], "speech", "64"),
        ([Turn("user", [-1])], "speech", "-1"),
        ([Turn("user", "hi")], "song", "song"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(turns, reply, says):
    with pytest.raises(InputError, match=says):
        PROMPT.rows(turns, reply)


def test_the_true_config_makes_the_446_published_tensors():
    with torch.device("meta"):
        shapes = {
            name: tuple(tensor.shape) for name, tensor in published_tensors(MossSpeech(MossSpeechConfig())).items()
        }
    assert shapes == weights.shapes(KEYS)
    assert len(shapes) == 446
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 9_095_694_336


def shrunk_keys(shared: int, tail: int) -> dict[str, tuple[int, ...]]:
    """The published key list, shrunk: fewer layers, and each size divided to that of a small config."""
    sizes = {151680: 320, 16512: 72, 4096: 32, 12288: 48, 1024: 32, 128: 16}
    kept = {}
    for name, shape in weights.shapes(KEYS).items():
        depth = shared if "shared_block" in name else tail
        if ".layers." in name and int(name.split(".layers.")[1].split(".")[0]) >= depth:
            continue
        size = [sizes[n] for n in shape]
        if ".q_proj." in name:
            size[0] = 64
        if ".o_proj." in name:
            size[1] = 64
        kept[name] = tuple(size)
    return kept


@pytest.fixture
def checkpoint_folder(tmp_path):
    """A checkpoint filled by name in the published layout, split in three shards."""
    tensors = {name: torch.from_numpy(weights.tensor(name, shape, 11)) for name, shape in shrunk_keys(2, 1).items()}
    names = list(tensors)
    weight_map = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        part = {name: tensors[name].to(torch.bfloat16) for name in names[number::3]}
        save_file(part, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    CONFIG.write(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sharded_checkpoint_round_trips(checkpoint_folder, tmp_path, dtype):
    model = MossSpeech.load(checkpoint_folder, dtype=dtype)
    loaded = published_tensors(model)
    for name, shape in shrunk_keys(2, 1).items():
        expected = torch.from_numpy(weights.tensor(name, shape, 11)).to(torch.bfloat16).to(dtype)
        torch.testing.assert_close(loaded[name].data, expected, rtol=0, atol=0)
    again = tmp_path / "again"
    save_weights(model, again, shard_bytes=20_000)
    model.config.write(again)
    assert len(list(again.glob("*.safetensors"))) > 3
    assert (again / "model.safetensors.index.json").is_file()
    for name, tensor in published_tensors(MossSpeech.load(again, dtype=dtype)).items():
        torch.testing.assert_close(tensor.data, loaded[name].data, rtol=0, atol=0)


def test_the_loaded_checkpoint_computes_what_the_reference_does(checkpoint_folder):
    model = MossSpeech.load(checkpoint_folder)
    state = {}
    for file in checkpoint_folder.glob("*.safetensors"):
        state |= {name: tensor.float() for name, tensor in load_file(file).items()}
    reference = Reference(CONFIG)
    reference.load_state_dict(state, strict=True)
    rows = PROMPT.rows(*CONVERSATIONS["many turns"])
    for ours, theirs in zip(all_logits(model, rows), reference(torch.tensor(rows)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def rewrite_config(folder: Path, **changes: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    content |= changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def break_nothing_there(folder: Path) -> None:
    for file in folder.glob("*.json"):
        file.unlink()


def break_truncate(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def break_missing_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def break_integer_weights(folder: Path) -> None:
    file = folder / "model-00001-of-00003.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}, file)


def break_extra(folder: Path) -> None:
    file = folder / "model-00001-of-00003.safetensors"
    save_file(load_file(file) | {"model.stranger.weight": torch.zeros(3)}, file)


BREAKAGES = {
    "not a model folder": (break_nothing_there, "has no config.json"),
    "truncated shard": (break_truncate, r"model-00002-of-00003.safetensors cannot be read .* fetch it again"),
    "missing shard": (break_missing_shard, "lacks model-00002-of-00003.safetensors"),
    "wrong dtype": (break_integer_weights, "torch.int8, which is not a float weight"),
    "extra tensor": (break_extra, "1 not of this model: model.stranger.weight"),
    "missing layer": (
        lambda f: rewrite_config(f, num_modality_layers=2, num_hidden_layers=4),
        "missing: model.text_block.layers.1",
    ),
    "wrong size": (lambda f: rewrite_config(f, vocab_size=321), r"misshapen: model.embed_tokens.weight is \[320, 32\]"),
    "depth does not add up": (lambda f: rewrite_config(f, num_hidden_layers=7), "num_hidden_layers 7"),
    "no rope_theta": (lambda f: rewrite_config(f, rope_theta=None), "lacks rope_theta"),
    "another model": (lambda f: rewrite_config(f, model_type="qwen3"), "'qwen3' model, not 'moss_speech'"),
    "tied embeddings": (lambda f: rewrite_config(f, tie_word_embeddings=True), "tied embeddings"),
    "scaled rope": (lambda f: rewrite_config(f, rope_scaling={"factor": 2}), "rope_scaling"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_bad_folder_gets_one_line_that_says_what_to_do(checkpoint_folder, name):
    breakage, says = BREAKAGES[name]
    breakage(checkpoint_folder)
    with pytest.raises(CheckpointError, match=says) as caught:
        MossSpeech.load(checkpoint_folder)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        MossSpeech.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="has no weights"):
        Checkpoint(tmp_path)


def test_rope_theta_is_read_in_both_spellings(checkpoint_folder):
    rewrite_config(checkpoint_folder, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 123.0})
    assert MossSpeechConfig.read(checkpoint_folder).rope_theta == 123.0
    assert dataclasses.replace(MossSpeechConfig.read(checkpoint_folder), rope_theta=10000.0) == CONFIG
