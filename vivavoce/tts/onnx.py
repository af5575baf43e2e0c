"""MOSS-TTS-Nano in ONNX Runtime, without torch: folders written by `viva export onnx`, and the published ones.

One graph call samples a whole frame with the published settings. Greedy frames, and those of `exact`, which equal
torch's, run the local transformer code by code.
"""

import json
from collections.abc import Callable, Generator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vivavoce import hub
from vivavoce.audio.io import Sound
from vivavoce.audio.player import PlaybackClock
from vivavoce.errors import CheckpointError, InputError, MissingDependencyError
from vivavoce.models.moss_audio_tokenizer.config import reference_samples
from vivavoce.models.moss_tts_nano.prompt import (
    MossTTSNanoConfig,
    MossTTSNanoPrompt,
    NanoSampling,
    NanoTokenizerProtocol,
)
from vivavoce.models.tokenizers import SentencePieceTokenizer
from vivavoce.tts.chunked_decoding import ChunkedPlayback, Frame, Samples, decoding_executor, spare_cores
from vivavoce.tts.frame_model import CallerFrames, Codes, Frames, FrameTTS, SpokenPrefix
from vivavoce.tts.frame_sampling import SequenceSampler
from vivavoce.tts.interface import SETTINGS_FILE, SpeechSettings, StoredVoice, VoiceStore

OFFICIAL_CODEC = "OpenMOSS-Team/MOSS-Audio-Tokenizer-Nano-ONNX"
MANIFEST, CODEC_META = "browser_poc_manifest.json", "codec_browser_onnx_meta.json"
HIDDEN, TEXT_STEP, AUDIO_STEP = 0, 1, 2  # `step_type` of the cached local step
MAX_THREADS = 4  # more were measured to be slower
LARGEST_UNIFORM = 0.99999994
MAX_CACHED_VOICES = 4
TYPES = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(int64)": np.int64}
Arrays = Mapping[str, Any]  # NumPy arrays or OrtValues


class Channel(NamedTuple):
    """The sampling settings of one channel."""

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float


class OnnxSession:
    """An ONNX Runtime session with named inputs and outputs; arrays are converted to the graph's types."""

    def __init__(self, file: Path, threads: int, device: str) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingDependencyError("ONNX speech needs onnxruntime: pip install 'vivavoce[onnx]'") from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
        on_gpu = device.startswith("cuda") and "CUDAExecutionProvider" in onnxruntime.get_available_providers()
        providers = [*(["CUDAExecutionProvider"] if on_gpu else []), "CPUExecutionProvider"]
        try:
            self._session: Any = onnxruntime.InferenceSession(str(file), options, providers=providers)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"{file} cannot be opened as an ONNX graph ({first}); fetch it again") from error
        self.inputs = {each.name: each for each in self._session.get_inputs()}
        self.outputs = [each.name for each in self._session.get_outputs()]
        self._value: Any = onnxruntime.OrtValue.ortvalue_from_numpy

    def __call__(self, inputs: Arrays) -> dict[str, Any]:
        """Run the graph; the outputs are OrtValues, of which `.numpy()` makes arrays."""
        values = {}
        for name, value in inputs.items():
            is_array = isinstance(value, np.ndarray)
            values[name] = self._value(np.ascontiguousarray(value, self.dtype(name))) if is_array else value
        return dict(zip(self.outputs, self._session.run_with_ort_values(self.outputs, values), strict=True))

    def dtype(self, name: str) -> Any:
        """The dtype of an input."""
        return TYPES[self.inputs[name].type]


class OnnxKVCache(NamedTuple):
    """Keys and values of a sequence by layer, and its number of rows."""

    layers: dict[str, Any]
    rows: int


class OnnxTTS(FrameTTS):
    """MOSS-TTS-Nano in ONNX Runtime; each thread generates one text at a time."""

    def __init__(
        self,
        folder: Path,
        codec_folder: Path,
        device: str = "cpu",
        threads: int | None = None,
        voices: str | Path | None = None,
        exact: bool = False,
        tokenizer: NanoTokenizerProtocol | None = None,
        settings: SpeechSettings | None = None,
    ) -> None:
        manifest = _read_json(folder / MANIFEST)
        meta = _read_json(codec_folder / CODEC_META)
        known = MossTTSNanoConfig.__dataclass_fields__
        sizes: dict[str, Any] = {k: v for k, v in manifest.get("tts_config", {}).items() if k in known}
        self.config, self.exact = MossTTSNanoConfig(**sizes), exact
        self.settings = settings or _settings(folder, manifest)
        self.voices = VoiceStore(self.settings.voices, voices)
        self.prompt = MossTTSNanoPrompt(self.config, tokenizer or SentencePieceTokenizer.load(folder))
        self._meta: dict[str, Any] = {"sample_rate": 48_000, "channels": 2, "frame_samples": 3840, "mark": ""} | meta
        self._open: Callable[[Path, str], OnnxSession] = lambda where, name: OnnxSession(
            where / f"{name}.onnx", threads or max(1, min(MAX_THREADS, spare_cores())), device
        )
        self._folder, self._codec_folder = folder, codec_folder
        self._executor = decoding_executor()
        self._voices: dict[Codes, OnnxKVCache] = {}
        self.prefill, self.step = self._open(folder, "moss_tts_prefill"), self._open(folder, "moss_tts_decode_step")
        self.codec_step = self._open(codec_folder, "moss_audio_tokenizer_decode_step")

    @classmethod
    def load(
        cls,
        name: str,
        device: str = "auto",
        dtype: str = "auto",
        codec: str | None = None,
        threads: int | None = None,
        voices: str | Path | None = None,
        exact: bool = False,
    ) -> "OnnxTTS":
        """Load a folder of graphs or a hub id; the codec's graphs are in it, in its `codec` folder, or downloaded."""
        if dtype not in ("auto", "float32"):
            raise InputError(f"ONNX graphs run in the dtype they were exported in; leave out {dtype!r}")
        folder = hub.resolve(name)
        candidates = (folder, folder / "codec")
        found = [each for each in candidates if (each / "moss_audio_tokenizer_decode_step.onnx").is_file()]
        codec_folder = found[0] if found and codec is None else hub.resolve(codec or OFFICIAL_CODEC)
        return cls(folder, codec_folder, device, threads, voices, exact)

    @property
    def rate(self) -> int:
        """Sample rate of the output in Hz."""
        return int(self._meta["sample_rate"])

    @property
    def channels(self) -> int:
        """Channels of the output."""
        return int(self._meta["channels"])

    @property
    def frame_rate(self) -> float:
        """Frames of codes a second."""
        return float(self._meta["sample_rate"] / self._meta["frame_samples"])

    @property
    def codec_id(self) -> str:
        """Identifies the codec; stored with the codes of a voice."""
        return str(self._meta["mark"]) or f"{self.rate} Hz, ONNX"

    @property
    def _parallel_parts(self) -> int:
        return 1

    @cached_property
    def encode(self) -> OnnxSession:
        """The codec's encoder, opened on first use."""
        return self._open(self._codec_folder, "moss_audio_tokenizer_encode")

    @cached_property
    def frame_graph(self) -> OnnxSession:
        """The graph that samples a whole frame."""
        return self._open(self._folder, "moss_tts_local_fixed_sampled_frame")

    @cached_property
    def local_graph(self) -> OnnxSession:
        """The graph of one step of the local transformer."""
        return self._open(self._folder, "moss_tts_local_cached_step")

    def _start_playback(
        self, player: PlaybackClock, clock: Callable[[], float], is_live: bool
    ) -> ChunkedPlayback[dict[str, Any]]:
        seconds = int(self._meta["frame_samples"]) / self.rate
        state = self._initial_codec_state()
        return ChunkedPlayback(self._decode, state, seconds, player, clock, self._executor, is_live)

    def _frames(self, text: str, prefix: SpokenPrefix, seed: int, greedy: bool) -> Frames:
        return CallerFrames(self._generate(text, prefix, seed, greedy))

    def _encode_reference(self, sound: Sound) -> list[list[int]]:
        frame = int(self._meta["frame_samples"])
        samples = reference_samples(sound, self.rate, self.channels)
        whole = samples[:, : samples.shape[1] // frame * frame]
        outputs = self.encode({"waveform": whole[None], "input_lengths": np.array([whole.shape[1]])})
        codes: list[list[int]] = outputs["audio_codes"].numpy()[0, :, : self.config.n_vq].tolist()
        return codes

    def _generate(self, text: str, prefix: SpokenPrefix, seed: int, greedy: bool) -> Generator[Frame, None, None]:
        rows = self.prompt.speech(prefix.transcript + text) + self.prompt.spoken(prefix.speech)
        hidden, past = self._prompt_state(prefix.reference, np.array(rows))
        stepwise = greedy or self.exact
        sampler = SequenceSampler(
            _channels(self.settings.sampling, self.config.n_vq, greedy), seed, self.config.audio_vocab_size
        )
        uniform = np.random.default_rng(seed)
        seen = np.zeros((1, self.config.n_vq, self.config.audio_vocab_size), np.int32)
        tokens = self.prompt.count_tokens(text)
        for number in range(self.settings.max_frames(tokens) + 1):
            sampler.start_row(past.rows)
            may_stop = number >= self.settings.min_frames(tokens)
            if stepwise:
                codes = self._sample_stepwise(hidden, sampler, may_stop)
            else:
                codes = self._sample_frame(hidden, seen, uniform, may_stop)
            if codes is None:
                return
            yield codes
            seen[0, np.arange(len(codes)), codes] = 1
            row = np.array([[self.config.audio_assistant_slot_token_id, *codes]])
            hidden, past = self._extend(past, row)

    def _prompt_state(self, reference: Codes, text: NDArray[np.int64]) -> tuple[NDArray[np.float32], OnnxKVCache]:
        """The state after the prompt; if the step graph takes several rows, the voice's part of it is cached."""
        voice = np.array(self.prompt.before_text(reference))
        if not isinstance(self.step.inputs["input_ids"].shape[1], str):
            return self._prefill(np.concatenate([voice, text]))
        if reference not in self._voices:
            while len(self._voices) >= MAX_CACHED_VOICES:
                self._voices.pop(next(iter(self._voices)))
            self._voices[reference] = self._prefill(voice)[1]
        return self._extend(self._voices[reference], text)

    def _prefill(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], OnnxKVCache]:
        outputs = self.prefill({"input_ids": rows[None], "attention_mask": np.ones((1, len(rows)))})
        return outputs["global_hidden"].numpy()[:, -1], _kv_cache(outputs, len(rows))

    def _extend(self, past: OnnxKVCache, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], OnnxKVCache]:
        outputs = self.step({"input_ids": rows[None], "past_valid_lengths": np.array([past.rows]), **past.layers})
        return outputs["global_hidden"].numpy()[:, -1], _kv_cache(outputs, past.rows + len(rows))

    def _sample_frame(
        self, hidden: NDArray[np.float32], seen: NDArray[np.int32], uniform: np.random.Generator, may_stop: bool
    ) -> Frame | None:
        numbers = np.minimum(uniform.random((1, 1 + self.config.n_vq)), LARGEST_UNIFORM)
        outputs = self.frame_graph(
            {
                "global_hidden": hidden,
                "repetition_seen_mask": seen,
                "assistant_random_u": numbers[:, 0],
                "audio_random_u": numbers[:, 1:],
            }
        )
        if may_stop and not outputs["should_continue"].numpy().item():
            return None
        return tuple(outputs["frame_token_ids"].numpy()[0].tolist())

    def _sample_stepwise(self, hidden: NDArray[np.float32], sampler: SequenceSampler, may_stop: bool) -> Frame | None:
        config = self.config
        names = [name for name in self.local_graph.inputs if name.startswith("local_past")]
        past: dict[str, Any] = {name: np.zeros((1, 0, config.num_heads, config.head_dim)) for name in names}

        def step(kind: int, text: int = 0, code: int = 0, book: int = 0, length: int = 0) -> dict[str, Any]:
            numbers = {"text_token_id": text, "audio_token_id": code, "channel_index": book, "step_type": kind}
            scalars = {name: np.array([value]) for name, value in numbers.items()}
            lengths = {"past_valid_lengths": np.array([length])}
            outputs = self.local_graph({"global_hidden": hidden, **scalars, **lengths, **past})
            past.update({name: outputs[name.replace("past", "present", 1)] for name in names})
            return outputs

        choices = [config.audio_assistant_slot_token_id, config.audio_end_token_id]
        stop_logits = step(HIDDEN)["text_logits"].numpy().reshape(-1)[choices]
        if not may_stop:
            stop_logits[1] = -np.inf
        if sampler.choose(0, stop_logits) == 1:
            return None
        outputs, codes = step(TEXT_STEP, text=choices[0], length=1), list[int]()
        for book in range(config.n_vq):
            logits = outputs["audio_logits"].numpy().reshape(config.n_vq, -1)[book]
            codes.append(sampler.sample(1 + book, logits))
            if book + 1 < config.n_vq:
                outputs = step(AUDIO_STEP, code=codes[-1], book=book, length=book + 2)
        return tuple(codes)

    def _initial_codec_state(self) -> dict[str, Any]:
        """The codec's state before the first frame: zeros, and positions of −1."""
        states = {name: each for name, each in self.codec_step.inputs.items() if not _is_code_input(name)}
        return {
            name: np.full(each.shape, -1 if "positions" in name else 0, self.codec_step.dtype(name))
            for name, each in states.items()
        }

    def _decode(self, state: dict[str, Any], codes: list[Frame], lead: float = 0.0) -> tuple[Samples, dict[str, Any]]:
        names = sorted((name for name in self.codec_step.inputs if _is_code_input(name)), key=lambda n: "length" in n)
        outputs = self.codec_step({names[0]: np.array([codes]), names[1]: np.array([len(codes)]), **state})
        return outputs["audio"].numpy()[0], {name: outputs[f"{name}_out"] for name in state}


def _is_code_input(name: str) -> bool:
    return "codes" in name or "lengths" in name


def _kv_cache(outputs: dict[str, Any], rows: int) -> OnnxKVCache:
    layers = {
        name.replace("present", "past", 1): value for name, value in outputs.items() if name.startswith("present")
    }
    return OnnxKVCache(layers, rows)


def _channels(sampling: NanoSampling, codebooks: int, greedy: bool) -> list[Channel]:
    drawn = [Channel(*each) for each in sampling.per_channel(codebooks)]
    return [each._replace(temperature=0.0) for each in drawn] if greedy else drawn


def _settings(folder: Path, manifest: dict[str, Any]) -> SpeechSettings:
    if (folder / SETTINGS_FILE).is_file():
        return SpeechSettings.read(folder)
    try:
        listed = manifest.get("builtin_voices", [])
        voices = {each["voice"]: StoredVoice(each["voice"], each["prompt_audio_codes"]) for each in listed}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} lists voices without {error}; fetch it again") from error
    return SpeechSettings(voices=voices)


def _read_json(file: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is none."""
    if not file.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); fetch it again") from error
    return content
