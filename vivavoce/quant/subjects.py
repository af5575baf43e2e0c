"""Adapters that run each kind of model on the items of a set of speech, for calibration, training and evaluation.

An example (`CalibrationBatch`) is a prompt and the float model's reply to it; `logits` gives the teacher-forced logits
of any version of the model along that reply.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import Checkpoint
from vivavoce.models.cosyvoice.folder import SIZES, CosyVoiceSizes, language_model, version_of
from vivavoce.models.cosyvoice.lm import CosyVoiceLM, CosyVoiceLMConfig
from vivavoce.models.interface import GenerativeModel, Row
from vivavoce.models.moss_speech.model import AUDIO, TEXT, MossSpeech
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, MossSpeechPrompt, Turn
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoPrompt, NanoTokenizerProtocol
from vivavoce.models.tokenizers import SentencePieceTokenizer, TextTokenizer
from vivavoce.models.whisper.model import Whisper
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.nn.paged_kv import CachePiece, PagedCache, RowBatch
from vivavoce.quant.speech_sets import SpokenSample
from vivavoce.s2s.captions import WRITE_DOWN
from vivavoce.s2s.moss_speech import load_moss_speech
from vivavoce.train.lm import hidden_states, within_segments
from vivavoce.train.tts import frame_logits, global_states
from vivavoce.tts.interface import SpeechSettings
from vivavoce.tts.nano_cpu import NanoCpuDecoder

PAGE = 16
MAX_REPLY_ROWS = 150  # rows
HEAD_DIM = 64  # CosyVoice's language models
SPECIAL_ROWS = {2: 3, 3: 200}  # ids beside the codes, by version


@dataclass(frozen=True)
class CalibrationBatch:
    """Rows of a prompt and its reply; `head` selects the logits of a model with two heads."""

    rows: Tensor  # [row, channel]; tokens [1, token] for a Whisper
    start: int  # the reply's first row
    head: int = 0
    mel: Tensor | None = None  # [1, mel, frame]

    def to(self, device: torch.device | str) -> "CalibrationBatch":
        return replace(self, rows=self.rows.to(device), mel=None if self.mel is None else self.mel.to(device))


class QuantSubject(Protocol):
    """Interface of calibration, comparison and fine-tuning to a kind of model."""

    def load(self, folder: Path) -> nn.Module:
        """The language model on the CPU, float or quantised."""
        ...

    def examples(self, folder: Path, items: Sequence[SpokenSample]) -> list[CalibrationBatch]:
        """The replies of the model in a folder to these items."""
        ...

    def logits(self, model: nn.Module, example: CalibrationBatch) -> Tensor:
        """Teacher-forced logits at every position of the reply.  # [position, id]"""
        ...


class MossSpeechSubject:
    """MOSS-Speech: spoken replies and captions."""

    def load(self, folder: Path) -> MossSpeech:
        return MossSpeech.load(folder)

    def examples(self, folder: Path, items: Sequence[SpokenSample]) -> list[CalibrationBatch]:
        """A speech and a text reply to every item; without a codec, a text reply to its text."""
        if not (folder / "codec").is_dir():
            model, tokenizer = self.load(folder), TextTokenizer.load(folder)
            prompt, engine = MossSpeechPrompt(model.config, tokenizer), _engine(model)
            return [_complete(engine, prompt.rows([Turn("user", item.text)], "text"), TEXT) for item in items]
        pipeline = load_moss_speech(folder, device="cpu")
        examples = []
        for item in items:
            if item.sound is None:
                raise InputError("a speech-to-speech model is calibrated with recordings; this set has texts alone")
            codes = pipeline.codec.encode(item.sound).tolist()
            turns = [Turn("system", DEFAULT_SYSTEM["speech"]), Turn("user", codes)]
            examples.append(_complete(pipeline.core, pipeline.prompt.rows(turns, "speech"), AUDIO))
            turns = [Turn("system", WRITE_DOWN), Turn("user", codes)]
            examples.append(_complete(pipeline.core, pipeline.prompt.rows(turns, "text"), TEXT))
        return examples

    def logits(self, model: nn.Module, example: CalibrationBatch) -> Tensor:
        """# [position, id] of the text or the audio head"""
        assert isinstance(model, MossSpeech)
        rows = example.rows[None, :-1]
        positions = torch.arange(rows.shape[1], device=rows.device)[None]
        hidden = hidden_states(model, rows, positions, within_segments(torch.zeros_like(positions)))[example.head]
        head = model.audio_lm_head if example.head == AUDIO else model.text_lm_head
        logits: Tensor = head(hidden[0, example.start - 1 :])
        return logits


class NanoSubject:
    """MOSS-TTS-Nano: text read in the model's own voice."""

    def load(self, folder: Path) -> MossTTSNano:
        return MossTTSNano.load(folder)

    def examples(self, folder: Path, items: Sequence[SpokenSample]) -> list[CalibrationBatch]:
        model = self.load(folder)
        prompt, settings = MossTTSNanoPrompt(model.config, _nano_tokenizer(folder, model)), SpeechSettings.read(folder)
        decoder = NanoCpuDecoder(model)
        before = prompt.before_text(())
        past = decoder.prefill(before)
        examples = []
        for number, item in enumerate(items):
            text = prompt.speech(item.text)
            rows: list[Row] = [*before, *text]
            start = len(rows)
            room = min(MAX_REPLY_ROWS, model.context_limit - start)
            drawn = settings.generation(model.config.n_vq, len(text), seed=number)
            generation = replace(drawn, max_new_rows=max(1, min(room, drawn.max_new_rows)))
            slot = model.config.audio_assistant_slot_token_id
            for frame in decoder.generate(past, text, generation):
                unused = [model.config.audio_pad_token_id] * (model.config.n_vq - len(frame))
                rows.append((slot, *frame, *unused))
            if len(rows) > start:
                examples.append(CalibrationBatch(torch.tensor(rows), start))
        return examples

    def logits(self, model: nn.Module, example: CalibrationBatch) -> Tensor:
        """# [frame · codebook, code]"""
        assert isinstance(model, MossTTSNano)
        hidden = global_states(model, example.rows[None, :-1])[0, example.start - 1 :]
        codes = example.rows[example.start :, 1 : 1 + model.config.n_vq]
        _, logits = frame_logits(model, hidden, codes.clamp(max=model.config.audio_vocab_size - 1))
        return logits.flatten(0, 1)


class WhisperQuantSubject:
    """Whisper: transcription."""

    def load(self, folder: Path) -> Whisper:
        return Whisper.load(folder)

    def examples(self, folder: Path, items: Sequence[SpokenSample]) -> list[CalibrationBatch]:
        model = self.load(folder)
        start = json.loads((folder / "config.json").read_text(encoding="utf8")).get("decoder_start_token_id", 0)
        return [self._written(model, mel, start) for mel in self._mels(folder, model, items)]

    def _mels(self, folder: Path, model: Whisper, items: Sequence[SpokenSample]) -> list[Tensor]:
        bins, frames = model.config.num_mel_bins, model.config.window_frames
        try:
            transcriber = WhisperTranscriber.load(folder)
        except CheckpointError:  # a bare checkpoint without a tokenizer gets noise
            return [torch.randn(1, bins, frames, generator=torch.Generator().manual_seed(n)) for n in range(len(items))]
        sounds = [item.sound for item in items if item.sound is not None]
        if not sounds:
            raise InputError("a recogniser is calibrated with recordings; this set has texts alone")
        return [transcriber.log_mel(torch.from_numpy(s.samples[0].copy()))[None, :, :frames] for s in sounds]

    @torch.inference_mode()
    def _written(self, model: Whisper, mel: Tensor, start: int) -> CalibrationBatch:
        memory = model.decoder.cross_kv(model.encoder(mel))
        state, tokens = model.decoder.initial_state(memory), [start]
        max_tokens = min(64, model.config.max_target_positions - 1)
        for _ in range(max_tokens):
            hidden, state = model.decoder.step(state, torch.tensor([tokens[-1:]]))
            tokens.append(int(model.decoder.logits(hidden[:, -1]).argmax()))
        return CalibrationBatch(torch.tensor([tokens]), 1, mel=mel.clone())

    def logits(self, model: nn.Module, example: CalibrationBatch) -> Tensor:
        """# [token, id]"""
        assert isinstance(model, Whisper)
        assert example.mel is not None
        logits: Tensor = model(example.mel, example.rows[:, :-1])[0, example.start - 1 :]
        return logits


class CosyVoiceSubject:
    """CosyVoice: text to speech codes."""

    def load(self, folder: Path) -> CosyVoiceLM:
        """The language model, its size taken from the folder or from tensor shapes."""
        file, version = language_model(folder), version_of(folder)
        if version is not None and (folder / SIZES).is_file():
            return CosyVoiceLM.load(file, CosyVoiceSizes.of_folder(folder, version).lm)
        with Checkpoint(file) as checkpoint:
            config = cosyvoice_config(checkpoint.shapes)
        return CosyVoiceLM.load(file, config)

    def examples(self, folder: Path, items: Sequence[SpokenSample]) -> list[CalibrationBatch]:
        model = self.load(folder)
        engine, examples = _engine(model), []
        for item in items:
            ids = [byte % model.config.vocab_size for byte in item.text.encode()]
            rows = model.prompt(ids, prefix=[model.config.end_of_prompt])
            examples.append(_complete(engine, rows, 0))
        return examples

    @torch.no_grad()
    def logits(self, model: nn.Module, example: CalibrationBatch) -> Tensor:
        """# [code, id]"""
        assert isinstance(model, CosyVoiceLM)
        hidden = row_states(model, example.rows[:-1])
        return model.logits(hidden[example.start - 1 :])


SUBJECTS: dict[str, QuantSubject] = {
    "moss_speech": MossSpeechSubject(),
    "moss_tts_nano": NanoSubject(),
    "whisper": WhisperQuantSubject(),
    "cosyvoice": CosyVoiceSubject(),
}


def cosyvoice_config(shapes: dict[str, tuple[int, ...]]) -> CosyVoiceLMConfig:
    """The config of a language model, from its tensor shapes."""
    layers = "llm.model.model.layers"
    try:
        vocabulary, hidden = shapes["llm.model.model.embed_tokens.weight"]
        speech_rows = shapes["llm_decoder.weight"][0]
        version = 2 if "llm_embedding.weight" in shapes else 3
        return CosyVoiceLMConfig(
            version=version,
            speech_rows=speech_rows,
            speech_codes=speech_rows - SPECIAL_ROWS[version],
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=shapes[f"{layers}.0.mlp.gate_proj.weight"][0],
            num_hidden_layers=sum(name.endswith("self_attn.q_proj.weight") for name in shapes),
            num_attention_heads=shapes[f"{layers}.0.self_attn.q_proj.weight"][0] // HEAD_DIM,
            num_key_value_heads=shapes[f"{layers}.0.self_attn.k_proj.weight"][0] // HEAD_DIM,
            head_dim=HEAD_DIM,
            end_of_prompt=min(CosyVoiceLMConfig.end_of_prompt, vocabulary - 1),
        )
    except KeyError as error:
        raise CheckpointError(f"this is not a language model of CosyVoice: it lacks {error}") from error


def row_states(model: GenerativeModel, rows: Tensor) -> Tensor:
    """Hidden states of one whole sequence, as the engine's prefill computes them.  # [row, channel] → [row, …]"""
    count = len(rows)
    pages = -(-count // PAGE)
    cache = PagedCache.allocate(model.kv_shape, pages, PAGE, torch.float32, torch.device("cpu"))
    table = torch.arange(pages, dtype=torch.int32)[None]
    slots, positions = torch.zeros(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32)
    return model.forward(rows, RowBatch(cache, table, slots, positions, 0, (CachePiece(slice(0, count), 0, 0),)))


def _engine(model: GenerativeModel) -> Engine:
    return Engine(model, pick("cpu"), torch.float32, EngineLimits(cache_rows=2048))


def _complete(engine: Engine, prompt: list[Row], head: int) -> CalibrationBatch:
    sequence = engine.open(prompt)
    sampling: Sampling = GREEDY
    rows = engine.complete(sequence, Generation(sampling, max_new_rows=MAX_REPLY_ROWS))
    engine.close(sequence)
    return CalibrationBatch(torch.tensor([*prompt, *rows]), len(prompt), head)


class _ByteTokenizer:
    """One id per byte, for checkpoints without a tokenizer."""

    def __init__(self, first: int, ids: int) -> None:
        self.first, self.ids = first, ids

    def encode(self, text: str, symbols: bool = True) -> list[int]:
        return [self.first + byte % (self.ids - self.first) for byte in text.encode()]


def _nano_tokenizer(folder: Path, model: MossTTSNano) -> NanoTokenizerProtocol:
    try:
        return SentencePieceTokenizer.load(folder)
    except CheckpointError:
        return _ByteTokenizer(16, model.config.vocab_size)
