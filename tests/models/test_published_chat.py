"""Published Qwen files: greedy tokens of transformers on weights that the `gguf` package dequantised; tool calls."""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import gguf
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from vivavoce.cascade.interfaces import ChatCall, ChatText
from vivavoce.cascade.local_chat import LocalChat, LocalChatOptions
from vivavoce.device import pick
from vivavoce.dialogue.settings import ConversationSettings, Tool
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.kernels import cpu
from vivavoce.models.llama import Llama, chat_file

pytestmark = [pytest.mark.published, pytest.mark.full]
SMALL, LARGE = "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"
TOKENS = 64
ROUNDING = 0.6  # logits: how far int8 inputs move the difference of the two likeliest tokens
QUESTIONS = ("Tell me a short story about a lighthouse keeper and a storm.", "用一句话介绍一下长城。")


def said(*turns):
    return [{"role": role, "content": words} for role, words in turns]


def peer_of(file):
    reader = gguf.GGUFReader(file)
    value = {key.removeprefix("qwen2."): field.contents() for key, field in reader.fields.items() if "qwen2." in key}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = Qwen2Config(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=value["embedding_length"],
        intermediate_size=value["feed_forward_length"],
        num_hidden_layers=value["block_count"],
        num_attention_heads=value["attention.head_count"],
        num_key_value_heads=value["attention.head_count_kv"],
        max_position_embeddings=value["context_length"],
        rms_norm_eps=value["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": value["rope.freq_base"]},
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        peer = Qwen2ForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    state = {}
    for name in peer.state_dict():
        tensor = tensors[names.get_name(name, (".weight", ".bias"))]
        state[name] = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
    peer.load_state_dict(state, assign=True)
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config)
    return peer.eval()


def alone(function, *args):
    """What a function returns in a process of its own, which gives back the memory of its model."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def of_peer(file, prompts, ends):
    peer = peer_of(file)
    return [greedy(peer, [row[0] for row in rows], ends) for rows in prompts]


def of_ours(file, prompts, is_packed):
    model, _ = Llama.load(file, is_packed=is_packed)
    return [complete(model, rows) for rows in prompts], model.end_ids


@torch.no_grad()
def greedy(peer, ids, ends):
    """Tokens, and by how much each was likelier than the next."""
    past, new, made, margins = None, torch.tensor([ids]), [], []
    while len(made) < TOKENS and not (made and made[-1] in ends):
        out = peer(new, past_key_values=past, use_cache=True, logits_to_keep=1)
        best = out.logits[0, -1].topk(2)
        made.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        past, new = out.past_key_values, best.indices[None, :1]
    return made, margins


@pytest.mark.parametrize("name", [SMALL, LARGE])
def test_greedy_tokens_are_those_of_transformers(published_model, name):
    """Packed weights differ at most where the peer itself nearly hesitates, for inputs are rounded to int8."""
    file = chat_file(published_model(name))
    _, tokenizer = Llama.load(file, is_packed=True)
    prompts = [tokenizer.rows(said(("user", question))) for question in QUESTIONS]
    exact, ends = alone(of_ours, file, prompts, False)
    packed, _ = alone(of_ours, file, prompts, True)
    of_transformers = alone(of_peer, file, prompts, ends)
    for (expected, margins), ours, by_blocks in zip(of_transformers, exact, packed, strict=True):
        assert ours == expected
        if cpu.is_available():
            pairs = enumerate(zip(by_blocks, expected, strict=False))
            first = next((index for index, (own, other) in pairs if own != other), None)
            assert first is None or margins[first] < ROUNDING, (first, margins[first])


def complete(model, rows):
    engine = Engine(model, pick("cpu"), limits=EngineLimits(cache_rows=512))
    return [row[0] for row in engine.complete(engine.open(rows), Generation(Sampling(temperature=0.0), TOKENS))]


WEATHER = Tool(
    "get_weather",
    "The weather in a city.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)


async def pieces_of(chat, messages, settings):
    return [piece async for piece in chat.reply(messages, settings)]


async def test_a_tool_is_called_and_its_output_is_answered(published_model):
    settings = ConversationSettings(tools=(WEATHER,), tool_choice="get_weather")
    question = said(("system", "You are a helpful assistant."), ("user", "What is the weather in Paris?"))
    async with LocalChat.load(str(published_model(SMALL)), "cpu", LocalChatOptions(cache_rows=1024)) as chat:
        pieces = await pieces_of(chat, question, settings)
        call = next(piece for piece in pieces if isinstance(piece, ChatCall))
        assert call.name == "get_weather" and "Paris" in call.arguments
        free = await pieces_of(chat, question, replace(settings, tool_choice="auto"))
        assert [(each.name, each.arguments) for each in free if isinstance(each, ChatCall)] == [
            (call.name, call.arguments)
        ]
        assert not any(isinstance(piece, ChatText) for piece in [*pieces, *free])
        function = {"name": call.name, "arguments": call.arguments}
        history = [
            *question,
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "21 degrees, sunny"},
        ]
        answer = await pieces_of(chat, history, replace(settings, tool_choice="none"))
        assert "21" in "".join(piece.text for piece in answer if isinstance(piece, ChatText))


async def test_a_tool_is_called_where_it_is_asked_for_and_its_values_are_said(published_model):
    settings = ConversationSettings(tools=(WEATHER,), max_output_tokens=60)
    asked = {"Will it rain in Oslo?": ["Oslo"], "What is the weather like?": [], "Good morning, how are you?": []}
    async with LocalChat.load(str(published_model(LARGE)), "cpu", LocalChatOptions(cache_rows=2048)) as chat:
        for words, cities in asked.items():
            pieces = await pieces_of(chat, said(("system", "You are a helpful assistant."), ("user", words)), settings)
            calls = [json.loads(piece.arguments)["city"] for piece in pieces if isinstance(piece, ChatCall)]
            assert calls == cities and any(isinstance(piece, ChatText) for piece in pieces) == (not cities)


async def test_a_prefix_that_was_read_is_shared_and_changes_no_word(published_model):
    settings = ConversationSettings(max_output_tokens=24)
    messages = said(("system", "You are a helpful assistant. Be brief."), ("user", "What is the capital of France?"))
    folder = str(published_model(SMALL))
    async with LocalChat.load(folder, "cpu", LocalChatOptions(cache_rows=1024)) as chat:
        whole = await pieces_of(chat, messages, settings)
        assert "Paris" in "".join(piece.text for piece in whole if isinstance(piece, ChatText))
    async with LocalChat.load(folder, "cpu", LocalChatOptions(cache_rows=1024)) as chat:
        await chat.read(said(*((each["role"], each["content"][:-8]) for each in messages)))
        *words, end = await pieces_of(chat, messages, settings)
        assert words == whole[:-1] and end.cached_tokens > whole[-1].cached_tokens == 0
