"""Each kind of model as something to calibrate, compare and fine-tune: how it is loaded, shown and asked.

A lesson is what a float model was asked and what it replied; `logits` tells what another version of it thinks of that
same reply, place by place.
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
from vivavoce.quant.speech_set import SpokenSample
from vivavoce.s2s.captions import WRITE_DOWN
from vivavoce.s2s.loading import load_moss_speech
from vivavoce.train.lm.model import hidden_states, within_segments
from vivavoce.train.tts.model import frame_logits, global_states
from vivavoce.tts.interface import SpeechSettings
from vivavoce.tts.nano_cpu import CpuDecoder

PAGE = 16
LONGEST_REPLY = 150  # rows
HEAD_DIM = 64  # of CosyVoice's language models
SPECIAL_ROWS = {2: 3, 3: 200}  # ids beside the codes, by version


@dataclass(frozen=True)
class CalibrationBatch:
    """Rows of a prompt and the reply after it; `head` says whose logits matter where a model has two."""

    rows: Tensor  # [row, channel]; tokens [1, token] for a Whisper
    start: int  # the reply's first row
    head: int = 0
    mel: Tensor | None = None  # [1, mel, frame]

    def to(self, device: torch.device | str) -> "CalibrationBatch":
        """The same on another device."""
        return replace(self, rows=self.rows.to(device), mel=None if self.mel is None else self.mel.to(device))


class QuantSubject(Protocol):
    """What calibration, comparison and fine-tuning need of a kind of model."""

    def load(self, folder: Path) -> nn.Module:
        """Its language model on the CPU, float or quantised."""
        ...

    def lessons(self, folder: Path, items: Sequence[SpokenSample]) -> list[CalibrationBatch]:
        """What the model in a folder replies to these items."""
        ...

    def logits(self, model: nn.Module, lesson: CalibrationBatch) -> Tensor:
        """What a version of it would say at every place of the reply.  # [place, id]"""
        ...


class MossSpeechSubject:
    """Speech answered in speech, and speech written down."""

    def load(self, folder: Path) -> MossSpeech:
        """The language model."""
        return MossSpeech.load(folder)

    def lessons(self, folder: Path, items: Sequence[SpokenSample]) -> list[CalibrationBatch]:
        """A spoken and a written reply to every item; without a codec, a written one to its text."""
        if not (folder / "codec").is_dir():
            model, tokenizer = self.load(folder), TextTokenizer.load(folder)
            prompt, engine = MossSpeechPrompt(model.config, tokenizer), _engine(model)
            return [_replied(engine, prompt.rows([Turn("user", item.text)], "text"), TEXT) for item in items]
        pipeline = load_moss_speech(folder, device="cpu")
        lessons = []
        for item in items:
            if item.sound is None:
                raise InputError("a speech-to-speech model is calibrated with recordings; this set has texts alone")
            codes = pipeline.codec.encode(item.sound).tolist()
            turns = [Turn("system", DEFAULT_SYSTEM["speech"]), Turn("user", codes)]
            lessons.append(_replied(pipeline.core, pipeline.prompt.rows(turns, "speech"), AUDIO))
            turns = [Turn("system", WRITE_DOWN), Turn("user", codes)]
            lessons.append(_replied(pipeline.core, pipeline.prompt.rows(turns, "text"), TEXT))
        return lessons

    def logits(self, model: nn.Module, lesson: CalibrationBatch) -> Tensor:
        """# [place, id] of the text or of the audio head"""
        assert isinstance(model, MossSpeech)
        rows = lesson.rows[None, :-1]
        positions = torch.arange(rows.shape[1], device=rows.device)[None]
        hidden = hidden_states(model, rows, positions, within_segments(torch.zeros_like(positions)))[lesson.head]
        head = model.audio_lm_head if lesson.head == AUDIO else model.text_lm_head
        logits: Tensor = head(hidden[0, lesson.start - 1 :])
        return logits


class NanoSubject:
    """Text said in the model's own voice."""

    def load(self, folder: Path) -> MossTTSNano:
        """The language model."""
        return MossTTSNano.load(folder)

    def lessons(self, folder: Path, items: Sequence[SpokenSample]) -> list[CalibrationBatch]:
        """The frames that are said for every text."""
        model = self.load(folder)
        prompt, settings = MossTTSNanoPrompt(model.config, _nano_tokenizer(folder, model)), SpeechSettings.read(folder)
        decoder = CpuDecoder(model)
        before = prompt.before_text(())
        past = decoder.read(before)
        lessons = []
        for number, item in enumerate(items):
            text = prompt.speech(item.text)
            rows: list[Row] = [*before, *text]
            start = len(rows)
            room = min(LONGEST_REPLY, model.context_limit - start)
            drawn = settings.generation(model.config.n_vq, len(text), seed=number)
            generation = replace(drawn, max_new_rows=max(1, min(room, drawn.max_new_rows)))
            slot = model.config.audio_assistant_slot_token_id
            for frame in decoder.speak(past, text, generation):
                unused = [model.config.audio_pad_token_id] * (model.config.n_vq - len(frame))
                rows.append((slot, *frame, *unused))
            if len(rows) > start:
                lessons.append(CalibrationBatch(torch.tensor(rows), start))
        return lessons

    def logits(self, model: nn.Module, lesson: CalibrationBatch) -> Tensor:
        """Every code given those before it.  # [frame · codebook, code]"""
        assert isinstance(model, MossTTSNano)
        hidden = global_states(model, lesson.rows[None, :-1])[0, lesson.start - 1 :]
        codes = lesson.rows[lesson.start :, 1 : 1 + model.config.n_vq]
        _, logits = frame_logits(model, hidden, codes.clamp(max=model.config.audio_vocab_size - 1))
        return logits.flatten(0, 1)


class WhisperQuantSubject:
    """Speech written down."""

    def load(self, folder: Path) -> Whisper:
        """Encoder and decoder."""
        return Whisper.load(folder)

    def lessons(self, folder: Path, items: Sequence[SpokenSample]) -> list[CalibrationBatch]:
        """The tokens that are written for every recording."""
        model = self.load(folder)
        start = json.loads((folder / "config.json").read_text(encoding="utf8")).get("decoder_start_token_id", 0)
        return [self._written(model, mel, start) for mel in self._mels(folder, model, items)]

    def _mels(self, folder: Path, model: Whisper, items: Sequence[SpokenSample]) -> list[Tensor]:
        bins, frames = model.config.num_mel_bins, model.config.window_frames
        try:
            transcriber = WhisperTranscriber.load(folder)
        except CheckpointError:  # a bare checkpoint without a tokenizer can still be fed noise
            return [torch.randn(1, bins, frames, generator=torch.Generator().manual_seed(n)) for n in range(len(items))]
        sounds = [item.sound for item in items if item.sound is not None]
        if not sounds:
            raise InputError("a recogniser is calibrated with recordings; this set has texts alone")
        return [transcriber.log_mel(torch.from_numpy(s.samples[0].copy()))[None, :, :frames] for s in sounds]

    @torch.inference_mode()
    def _written(self, model: Whisper, mel: Tensor, start: int) -> CalibrationBatch:
        memory = model.decoder.remember(model.encoder(mel))
        state, tokens = model.decoder.initial_state(memory), [start]
        most = min(64, model.config.max_target_positions - 1)
        for _ in range(most):
            hidden, state = model.decoder.step(state, torch.tensor([tokens[-1:]]))
            tokens.append(int(model.decoder.logits(hidden[:, -1]).argmax()))
        return CalibrationBatch(torch.tensor([tokens]), 1, mel=mel.clone())

    def logits(self, model: nn.Module, lesson: CalibrationBatch) -> Tensor:
        """# [token, id]"""
        assert isinstance(model, Whisper)
        assert lesson.mel is not None
        logits: Tensor = model(lesson.mel, lesson.rows[:, :-1])[0, lesson.start - 1 :]
        return logits


class CosyVoiceSubject:
    """Text read as codes."""

    def load(self, folder: Path) -> CosyVoiceLM:
        """The language model, of whatever size its folder says or its file has."""
        file, version = language_model(folder), version_of(folder)
        if version is not None and (folder / SIZES).is_file():
            return CosyVoiceLM.load(file, CosyVoiceSizes.of_folder(folder, version).lm)
        with Checkpoint(file) as checkpoint:
            config = cosyvoice_config(checkpoint.shapes)
        return CosyVoiceLM.load(file, config)

    def lessons(self, folder: Path, items: Sequence[SpokenSample]) -> list[CalibrationBatch]:
        """The codes that are written for every text."""
        model = self.load(folder)
        engine, lessons = _engine(model), []
        for item in items:
            ids = [byte % model.config.vocab_size for byte in item.text.encode()]
            rows = model.prompt(ids, before=[model.config.end_of_prompt])
            lessons.append(_replied(engine, rows, 0))
        return lessons

    @torch.no_grad()
    def logits(self, model: nn.Module, lesson: CalibrationBatch) -> Tensor:
        """# [code, id]"""
        assert isinstance(model, CosyVoiceLM)
        hidden = row_states(model, lesson.rows[:-1])
        return model.logits(hidden[lesson.start - 1 :])


SUBJECTS: dict[str, QuantSubject] = {
    "moss_speech": MossSpeechSubject(),
    "moss_tts_nano": NanoSubject(),
    "whisper": WhisperQuantSubject(),
    "cosyvoice": CosyVoiceSubject(),
}


def cosyvoice_config(shapes: dict[str, tuple[int, ...]]) -> CosyVoiceLMConfig:
    """The sizes of a language model by the shapes of its tensors."""
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
        raise CheckpointError(f"this is no language model of CosyVoice: it lacks {error}") from error


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


def _replied(engine: Engine, prompt: list[Row], head: int) -> CalibrationBatch:
    sequence = engine.open(prompt)
    sampling: Sampling = GREEDY
    rows = engine.complete(sequence, Generation(sampling, max_new_rows=LONGEST_REPLY))
    engine.close(sequence)
    return CalibrationBatch(torch.tensor([*prompt, *rows]), len(prompt), head)


class _Bytes:
    """Ids for a checkpoint that brings no tokenizer."""

    def __init__(self, first: int, ids: int) -> None:
        self.first, self.ids = first, ids

    def encode(self, text: str, symbols: bool = True) -> list[int]:
        """A byte, an id."""
        return [self.first + byte % (self.ids - self.first) for byte in text.encode()]


def _nano_tokenizer(folder: Path, model: MossTTSNano) -> NanoTokenizerProtocol:
    try:
        return SentencePieceTokenizer.load(folder)
    except CheckpointError:
        return _Bytes(16, model.config.vocab_size)
