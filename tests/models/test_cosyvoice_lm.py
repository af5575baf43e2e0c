"""CosyVoice's language model gives what transformers' Qwen2 layers give, and draws codes by the published rule."""

from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import nn
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from tests.golden import weights
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, NO_ROW, Generation, Sampling, SamplingTables, SlotDraw
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.cosyvoice.lm import SPEECH, CosyVoiceLM, CosyVoiceLMConfig, shorten_silence
from vivavoce.nn.paged_kv import CachePiece, PagedCache, RowBatch

KEYS = Path(__file__).parents[1] / "golden" / "keys"
TEXT_HEAD = "llm.model.lm_head.weight"
SIZES = {
    "speech_codes": 40,
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "end_of_prompt": 77,
}
TINY = {
    2: CosyVoiceLMConfig(version=2, speech_rows=43, **SIZES),
    3: CosyVoiceLMConfig(version=3, speech_rows=50, **SIZES),
}
PUBLISHED = Sampling(temperature=1.0, top_k=25, top_p=0.8)
WRITTEN, BEFORE, CODES = [5, 80, 5, 11], [3, 77, 60], [7, 39, 0, 7, 12]


def tiny_model(version, seed=0):
    model = CosyVoiceLM.random(TINY[version], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5, generator=generator)
        model.llm_decoder.weight.mul_(4)  # logits of a row differ clearly
    return model


class Reference(nn.Module):
    """Transformers' Qwen2 layers between the published tables; everything is recomputed from the start."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        qwen = Qwen2Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
        qwen._attn_implementation = "eager"
        hidden = config.hidden_size
        trunk = nn.Module()
        trunk.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        trunk.layers = nn.ModuleList(Qwen2DecoderLayer(qwen, index) for index in range(config.num_hidden_layers))
        trunk.norm = Qwen2RMSNorm(hidden, config.rms_norm_eps)
        self.llm = nn.ModuleDict({"model": nn.ModuleDict({"model": trunk})})
        if config.version == 2:
            self.llm_embedding = nn.Embedding(2, hidden)
        self.llm_decoder = nn.Linear(hidden, config.speech_rows, bias=config.version == 2)
        self.speech_embedding = nn.Embedding(config.speech_rows, hidden)
        self.rotary = [Qwen2RotaryEmbedding(qwen)]  # in a list: no part of the state dict

    @torch.no_grad()
    def logits(self, text, codes):
        """Logits after the last of these codes."""
        trunk, special = self.llm["model"]["model"], self.config.speech_codes
        if self.config.version == 2:
            start, task = self.llm_embedding.weight[:, None]
        else:
            start, task = self.speech_embedding(torch.tensor([[special], [special + 2]]))
        speech = self.speech_embedding(torch.tensor(codes, dtype=torch.long))
        x = torch.cat([start, trunk.embed_tokens(torch.tensor(text)), task, speech])[None]
        length = x.shape[1]
        positions = self.rotary[0](x, torch.arange(length)[None])
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        for layer in trunk.layers:
            out = layer(x, attention_mask=mask, position_embeddings=positions)
            x = out[0] if isinstance(out, tuple) else out
        return self.llm_decoder(trunk.norm(x))[0, -1]

    def generate_greedily(self, text, codes, min_codes, max_codes):
        """The likeliest codes one by one; no special id before there are `min_codes` codes."""
        made = []
        while len(made) < max_codes:
            logits = self.logits(text, [*codes, *made])
            if len(made) < min_codes:
                logits[self.config.speech_codes :] = float("-inf")
            made.append(int(logits.argmax()))
            if made[-1] >= self.config.speech_codes:
                break
        return made


@pytest.fixture(scope="module", params=[(2, 0), (3, 0), (3, 1)], ids=str)
def pair(request):
    version, seed = request.param
    model = tiny_model(version, seed)
    reference = Reference(TINY[version])
    reference.load_state_dict(published_tensors(model), strict=True)
    return model, reference.eval()


@torch.inference_mode()
def last_logits(model, rows):
    pages = -(-len(rows) // 16) + 1
    cache = PagedCache.allocate(model.kv_shape, pages, 16, torch.float32, torch.device("cpu"))
    table = torch.arange(1, pages, dtype=torch.int32)[None]
    positions = torch.arange(len(rows), dtype=torch.int32)
    piece = CachePiece(slice(0, len(rows)), slot=0, position=0)
    batch = RowBatch(cache, table, torch.zeros_like(positions), positions, 0, (piece,))
    return model.logits(model(torch.tensor(rows), batch))[-1]


def engine_for(model, cache_rows=1024):
    limits = EngineLimits(cache_rows=cache_rows, rows_per_step=8, page_size=4)
    return Engine(model, pick("cpu"), torch.float32, limits)


def spoken(model, rows, generation, engine=None):
    engine = engine or engine_for(model)
    return [row[SPEECH] for row in engine.complete(engine.open(rows), generation)]


class TestPublished:
    @pytest.mark.parametrize(
        ("config", "keys", "count", "parameters"),
        [
            (CosyVoiceLMConfig.cosyvoice2(), "cosyvoice2_llm.tsv", 295, 505_803_812),
            (CosyVoiceLMConfig.cosyvoice3(), "cosyvoice3_llm.tsv", 293, 506_148_480),
        ],
    )
    def test_tensor_names_and_shapes_are_the_published_ones(self, config, keys, count, parameters):
        with torch.device("meta"):
            tensors = published_tensors(CosyVoiceLM(config))
        assert sum(tensor.numel() for tensor in tensors.values()) == parameters
        ours = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        tied = ours["llm.model.model.embed_tokens.weight"]
        published = weights.shapes(KEYS / keys)
        assert len(published) == count
        assert ours | {TEXT_HEAD: tied} == published

    @pytest.mark.parametrize("version", [2, 3])
    def test_a_checkpoint_loads_without_its_dead_text_head(self, version, tmp_path):
        model = tiny_model(version)
        tensors = dict(published_tensors(model))
        tensors[TEXT_HEAD] = tensors["llm.model.model.embed_tokens.weight"]
        torch.save({**tensors, "epoch": 3, "step": 17}, tmp_path / "llm.pt")
        loaded = CosyVoiceLM.load(tmp_path / "llm.pt", TINY[version])
        rows = model.prompt(WRITTEN, BEFORE, CODES)
        assert torch.equal(last_logits(loaded, rows), last_logits(model, rows))

    @pytest.mark.parametrize(("version", "asked"), [(2, r"\[6564, 896\]"), (3, r"\[6761, 896\]")])
    def test_the_file_says_which_version_it_is(self, version, asked, tmp_path):
        tables = {name: t for name, t in published_tensors(tiny_model(version)).items() if "model" not in name}
        torch.save(tables, tmp_path / "llm.pt")
        with pytest.raises(CheckpointError, match=rf"llm_decoder\.weight is \[\d+, 32\], not {asked}"):
            CosyVoiceLM.load(tmp_path / "llm.pt", device="meta")

    def test_a_checkpoint_of_the_other_version_is_refused(self, tmp_path):
        torch.save(dict(published_tensors(tiny_model(2))), tmp_path / "llm.pt")
        with pytest.raises(CheckpointError, match=r"llm_embedding\.weight"):
            CosyVoiceLM.load(tmp_path / "llm.pt", TINY[3])


class TestPrompt:
    def test_version_2_has_start_and_task_in_a_table_of_their_own(self):
        rows = tiny_model(2).prompt([5, 6], [3], [7])
        assert rows == [(91, 0), (3, 0), (5, 0), (6, 0), (92, 0), (90, 7)]

    def test_version_3_has_them_among_the_speech_ids(self):
        rows = tiny_model(3).prompt([5, 6], [3, 77], [7, 8])
        assert rows == [(90, 40), (3, 0), (77, 0), (5, 0), (6, 0), (90, 42), (90, 7), (90, 8)]

    def test_published_ids(self):
        second, third = CosyVoiceLMConfig.cosyvoice2(), CosyVoiceLMConfig.cosyvoice3()
        assert (second.end_code, third.end_code) == (6561, 6562)
        assert (third.start, third.task) == ((151936, 6561), (151936, 6563))

    def test_lengths_follow_the_text(self):
        assert CosyVoiceLM.length_limits(7) == (14, 140)
        with pytest.raises(InputError, match="0 tokens"):
            CosyVoiceLM.length_limits(0)

    def test_what_cannot_be_said_is_refused(self):
        model = tiny_model(3)
        with pytest.raises(InputError, match="no text"):
            model.prompt([], BEFORE)
        with pytest.raises(InputError, match="endofprompt"):
            model.prompt(WRITTEN)
        with pytest.raises(InputError, match=r"text ids go from 3 to 90; this model has 0…89"):
            model.prompt([90], BEFORE)
        with pytest.raises(InputError, match=r"speech codes go from 1 to 40; this model has 0…39"):
            model.prompt(WRITTEN, BEFORE, [1, 40])
        assert tiny_model(2).prompt(WRITTEN)

    def test_silences_are_shortened_to_five_codes(self):
        codes = [9, 1, 2, 1, 28, 29, 55, 55, 9, 2242, 1]
        assert shorten_silence(codes) == ([9, 1, 2, 1, 28, 29, 9, 2242, 1], 2)
        first, silent = shorten_silence(codes[:4])
        rest, _ = shorten_silence(codes[4:], silent)
        assert first + rest == shorten_silence(codes)[0]


class TestAgainstTransformers:
    @pytest.mark.parametrize("codes", [[], [7], CODES])
    def test_logits(self, pair, codes):
        model, reference = pair
        ours = last_logits(model, model.prompt(WRITTEN, BEFORE, codes))
        torch.testing.assert_close(ours, reference.logits(BEFORE + WRITTEN, codes), atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize(("min_codes", "max_codes"), [(0, 30), (8, 30), (8, 5)])
    def test_greedy_generation_is_the_plain_loop(self, pair, min_codes, max_codes):
        model, reference = pair
        rows = model.prompt(WRITTEN, BEFORE, CODES)
        generation = Generation(GREEDY, max_new_rows=max_codes, min_new_rows=min_codes)
        wanted = reference.generate_greedily(BEFORE + WRITTEN, CODES, min_codes, max_codes)
        assert spoken(model, rows, generation) == wanted

    def test_sequences_side_by_side_are_the_plain_loops(self, pair):
        model, reference = pair
        engine = engine_for(model)
        texts = [WRITTEN, [1, 2], [88] * 9]
        sequences = [engine.open(model.prompt(text, BEFORE, CODES[:index])) for index, text in enumerate(texts)]
        for sequence in sequences:
            engine.generate(sequence, Generation(GREEDY, max_new_rows=12, min_new_rows=12))
        while engine.has_work:
            engine.step()
        for index, (text, sequence) in enumerate(zip(texts, sequences, strict=True)):
            made = [row[SPEECH] for row in sequence.rows[-12:]]
            assert made == reference.generate_greedily(BEFORE + text, CODES[:index], 12, 12)


class TestLength:
    @pytest.mark.parametrize("version", [2, 3])
    def test_no_reply_ends_before_its_minimum_length(self, version):
        """In version 3 too, where the published code masks an id that is not the end."""
        model = tiny_model(version)
        with torch.no_grad():
            model.llm_decoder.weight[model.config.end_code] *= 50
            if version == 2:
                model.llm_decoder.bias[model.config.end_code] = 1000.0
        ended = []
        for seed in range(6):
            codes = spoken(model, model.prompt(WRITTEN, BEFORE), Generation(PUBLISHED, 40, 8, seed))
            if codes[-1] >= model.config.speech_codes:
                ended.append(len(codes) - 1)
        assert ended and min(ended) >= 8
        if version == 2:
            assert set(ended) == {8}

    def test_every_special_id_ends_a_reply_and_none_is_spoken(self):
        model = tiny_model(3)
        mark = model.config.speech_mark
        assert [model.ends((mark, speech)) for speech in (0, 39, 40, 41, 49)] == [False, False, True, True, True]
        assert model.spoken_codes([(mark, 3), (mark, 39), (mark, 41)]) == [3, 39]


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.3, -1.0, -2.0, 1.5])


def drawn(recent, sampling, share=0.1, count=40_000, narrow=True):
    """How often each id comes after these ids."""
    tables = SamplingTables.allocate(1, (len(LOGITS),), torch.device("cpu"))
    tables.settle(0, Generation(sampling, seed=5))
    zeros = torch.zeros(count, dtype=torch.long)
    window = torch.tensor(recent, dtype=torch.int32)[None, :, None].expand(count, -1, -1)
    draw = SlotDraw(tables, zeros, torch.arange(count), zeros, zeros, narrow, window)
    return draw.sample_unrepeated(0, LOGITS.expand(count, -1), share).bincount(minlength=len(LOGITS))


def chances(recent, top_k, top_p, share, temperature=1.0):
    """The published rule in closed form, loops and all."""
    whole = (LOGITS.double() / temperature).softmax(-1)
    nucleus, total = torch.zeros(len(LOGITS), dtype=torch.float64), 0.0
    for token in whole.argsort(descending=True).tolist()[: top_k or None]:
        if total >= top_p:
            break
        nucleus[token] = whole[token]
        total += whole[token].item()
    nucleus /= nucleus.sum()
    result = torch.zeros_like(nucleus)
    for token in range(len(LOGITS)):
        if recent.count(token) >= share * len(recent):
            others = whole.clone()
            others[token] = 0
            result += nucleus[token] * others / others.sum()
        else:
            result[token] += nucleus[token]
    return result


class TestRepetitionAware:
    @pytest.mark.parametrize("narrow", [True, False])
    @pytest.mark.parametrize(
        ("recent", "share"),
        [([NO_ROW] * 10, 0.1), ([NO_ROW] * 9 + [0], 0.1), ([0, 7, 3, 6, 6, 6, 6, 6, 6, 6], 0.1), ([0, 0, 7, 3], 0.5)],
    )
    @pytest.mark.parametrize("sampling", [Sampling(1.0, 25, 0.8), Sampling(1.0, 3, 0.9), Sampling(1.5, 0, 0.6)])
    def test_ids_come_as_often_as_the_rule_says(self, recent, share, sampling, narrow):
        counts = drawn(recent, sampling, share, narrow=narrow)
        wanted = chances(recent, sampling.top_k, sampling.top_p, share, sampling.temperature)
        possible = wanted > 0
        assert counts[~possible].sum() == 0
        assert stats.chisquare(counts[possible], wanted[possible] * counts.sum()).pvalue > 1e-3

    def test_greedy_takes_the_likeliest_repeated_or_not(self):
        assert drawn([0] * 10, GREEDY, count=50)[0] == 50

    def test_a_favourite_comes_once_in_eleven_codes_and_the_prompt_does_not_count(self):
        model = tiny_model(2)
        with torch.no_grad():
            model.llm_decoder.bias[13] = 1000.0
        rows = model.prompt(WRITTEN, BEFORE, [13] * 12)
        codes = spoken(model, rows, Generation(PUBLISHED, max_new_rows=34, min_new_rows=34))
        assert [place for place, code in enumerate(codes) if code == 13] == [0, 11, 22, 33]

    def test_eviction_and_company_change_nothing(self):
        model = tiny_model(3)
        prompts = [model.prompt([token] * 6, BEFORE, CODES) for token in (4, 9, 21)]
        generations = [Generation(PUBLISHED, 20, 20, seed) for seed in range(3)]
        alone = [spoken(model, *given) for given in zip(prompts, generations, strict=True)]
        engine = engine_for(model, cache_rows=64)
        sequences = [engine.open(rows) for rows in prompts]
        for sequence, generation in zip(sequences, generations, strict=True):
            engine.generate(sequence, generation)
        while engine.has_work:
            engine.step()
        assert engine.scheduler.evictions > 0
        assert [[row[SPEECH] for row in sequence.rows[-20:]] for sequence in sequences] == alone


def test_text_ids_behind_the_vocabulary_are_not_text():
    """Start and task of version 2 have embeddings of their own, whatever stands in the speech channel."""
    model = tiny_model(2)
    rows = torch.tensor([[91, 0], [92, 5], [90, 5], [5, 5]])
    tables = [model.llm_embedding.weight[0], model.llm_embedding.weight[1], model.speech_embedding.weight[5]]
    wanted = torch.stack([*tables, model.trunk.embed_tokens.weight[5]])
    assert torch.equal(model.embed(rows), wanted)
