"""Very small models with random weights in the published layouts: recogniser, chat, TTS and speech to speech."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vivavoce.audio.level import buzz
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.minis.untrained import untrained_codec, write_untrained
from vivavoce.models.checkpoint import save_weights
from vivavoce.models.flow.state import FlowVoice
from vivavoce.models.llama import Llama
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_speech.codec import MossSpeechCodec
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.moss_speech.prompt import MossSpeechPrompt
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import NanoSampling
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.models.whisper.model import Whisper
from vivavoce.nn.decoder import TrunkSizes
from vivavoce.nn.modules import fill_randomly
from vivavoce.s2s.moss_speech import MossSpeechBackend
from vivavoce.s2s.options import MossSpeechOptions
from vivavoce.train.asr import Vocabulary, save_whisper
from vivavoce.train.asr.train import TINY
from vivavoce.train.tts import initialise as initialise_codec
from vivavoce.train.tts import initialise_lm
from vivavoce.train.tts.batches import write_tokenizer
from vivavoce.train.tts.codec import TINY_CODEC
from vivavoce.train.tts.train import TINY_LM
from vivavoce.tts.interface import SpeechSettings

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]


def small_asr(folder: Path, seed: int = 7) -> Path:
    """A Whisper of 3 s windows that writes nonsense, as `mini-asr` is laid out."""
    vocabulary = Vocabulary.learn(["when is breakfast", "a table for three please"] * 2, 30, window_seconds=3.0)
    model = Whisper.random(replace(TINY.config, vocab_size=vocabulary.size), seed=seed)
    model.decoder.embed_positions.weight.normal_(generator=torch.Generator().manual_seed(0))
    save_whisper(model, vocabulary, folder)
    return folder


BUZZING = SpeechSettings(NanoSampling(max_new_frames=9), 60, own_voice="buzz")


def small_tts(folder: Path, settings: SpeechSettings = BUZZING) -> Path:
    """A voice that buzzes for a few frames, as `mini-tts` is laid out."""
    model, codec = MossTTSNano(TINY_LM), MossAudioTokenizerNano(TINY_CODEC)
    torch.manual_seed(0)
    initialise_lm(model)
    initialise_codec(codec)
    (folder / "codec").mkdir()
    save_weights(model, folder)
    save_weights(codec, folder / "codec")
    TINY_LM.write(folder)
    TINY_CODEC.write(folder / "codec")
    write_tokenizer(folder, TINY_LM.vocab_size)
    settings.write(folder)
    return folder


def small_chat(folder: Path) -> Path:
    """A Llama that writes letters at random, in Hugging Face's layout."""
    sizes = TrunkSizes(
        vocab_size=len(LETTERS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
    )
    model = Llama(sizes, [0, 2])
    fill_randomly(model.requires_grad_(False), 0, deviation=0.3)
    save_weights(model, folder)
    config = {"model_type": "llama", "tie_word_embeddings": True, "eos_token_id": 2, **asdict(sizes)}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf8")
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@dataclass(frozen=True)
class SpeechParts:
    """The untrained MOSS-Speech, its codec and a voice; `pipeline` makes backends of them."""

    model: MossSpeech
    codec: MossSpeechCodec
    tokenizer: TextTokenizer
    voice: FlowVoice

    @property
    def prompt(self) -> MossSpeechPrompt:
        return MossSpeechPrompt(self.model.config, self.tokenizer)

    def pipeline(self, cache_rows=4096, context=None, **options) -> MossSpeechBackend:
        limits = EngineLimits(cache_rows=cache_rows, context=context)
        core = Engine(self.model, pick("cpu"), limits=limits)
        settings = MossSpeechOptions(seed=7, threads=1, **options)
        return MossSpeechBackend(core, self.codec, self.prompt, self.tokenizer, {"buzz": self.voice}, settings)


def small_speech(folder: Path) -> SpeechParts:
    """A MOSS-Speech that answers with a buzz."""
    write_untrained(folder)
    codec = untrained_codec()
    with torch.no_grad():
        voice = codec.voice(buzz(2.0, 24_000, seed=1), torch.linspace(-1, 1, 192))
    return SpeechParts(MossSpeech.load(folder), codec, TextTokenizer.load(folder), voice)
