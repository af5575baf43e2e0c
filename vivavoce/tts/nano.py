"""MOSS-TTS-Nano in torch, on any device.

On a CPU in float32 or int8, `nano_cpu.CpuFrameGenerator` generates one text per thread. Elsewhere the engine batches
all texts, and chunks of several texts share a pass of the codec. The prompt of a voice is computed once and forked.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Jobs
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce import hub
from vivavoce.audio.io import Sound
from vivavoce.audio.player import PlaybackClock
from vivavoce.device import Device, pick
from vivavoce.engine.cuda_graphs import BUCKETS
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation
from vivavoce.engine.sequence import Sequence
from vivavoce.errors import CheckpointError
from vivavoce.implementations import choose_nano_generator, choose_nano_lm
from vivavoce.models.interface import Row
from vivavoce.models.moss_audio_tokenizer.cuda import HOPS, SlotDecoder, SlotState
from vivavoce.models.moss_audio_tokenizer.model import CodecState, MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoConfig, MossTTSNanoPrompt, NanoTokenizerProtocol
from vivavoce.models.tokenizers import SentencePieceTokenizer
from vivavoce.nn.cuda_graphs import CudaStream
from vivavoce.nn.process_settings import torch_threads
from vivavoce.nn.quantised import to_int8
from vivavoce.runtime.async_engine import AsyncEngine
from vivavoce.runtime.batcher import DynamicBatcher
from vivavoce.runtime.executor import EARLY_SECONDS, DeadlineExecutor, executor_for
from vivavoce.runtime.reply import BlockingReply
from vivavoce.tts.chunked_decoding import ChunkedPlayback, Frame, Samples, decoding_executor, spare_cores
from vivavoce.tts.frame_model import Codes, Frames, FrameTTS, SpokenPrefix
from vivavoce.tts.interface import SpeakingStyle, SpeechSettings, VoiceStore
from vivavoce.tts.nano_cpu import MAX_READY_VOICES, CpuFrameGenerator, fastest_threads

__all__ = ["NanoTTS", "SpeakingStyle"]
OFFICIAL_CODEC = "OpenMOSS-Team/MOSS-Audio-Tokenizer-Nano"
CODEC_FOLDER = "codec"
Result = TypeVar("Result")
ROWS_PER_TEXT = 640  # a voice of eight seconds, a text of 75 tokens, and half a minute of speech
CONTEXT_ROWS = 4096
MAX_TEXTS = 128
CPU_TEXTS = 10
MAX_PARALLEL_PARTS = 8  # of one text: further ones would be generated long before they are played


class FrameGenerator(Protocol):
    """Generates frames; may be called from several threads."""

    parallel_parts: int
    """How many parts of one text are generated in parallel."""

    def frames(self, reference: Codes, text: str, generation: Generation, spoken: Codes = ()) -> Frames:
        """Start generating the frames of a text in a voice; closing them stops it.

        `spoken` are given frames of the beginning of the text.
        """
        ...

    def warm_up(self) -> None:
        """Do the one-time work that would delay the first text."""
        ...


class EngineFrameGenerator:
    """Generates all texts in batched steps of an engine, on the device's shared executor."""

    def __init__(
        self,
        model: MossTTSNano,
        prompt: MossTTSNanoPrompt,
        device: Device,
        executor: DeadlineExecutor | None = None,
    ) -> None:
        self.model, self.prompt = model, prompt
        dtype = model.transformer.wte.weight.dtype
        text_bytes = ROWS_PER_TEXT * model.kv_shape.bytes_per_row(dtype)
        fits = device.samples_that_fit(text_bytes, MAX_TEXTS) if device.kind != "cpu" else CPU_TEXTS
        self.parallel_parts = 1 if device.kind == "cpu" else min(fits, MAX_PARALLEL_PARTS)
        limits = EngineLimits(
            cache_rows=fits * ROWS_PER_TEXT,
            context=CONTEXT_ROWS,
            rows_per_step=BUCKETS[-1],
            sequences_per_step=MAX_TEXTS,
        )
        self.engine = Engine(model, device, dtype, limits)
        self.driver = AsyncEngine(self.engine, executor, eager=True)
        self.driver.start()
        self._voices: OrderedDict[Codes, _EngineVoice] = OrderedDict()

    def frames(self, reference: Codes, text: str, generation: Generation, spoken: Codes = ()) -> Frames:
        """Start generating the frames of a text in a voice."""
        rows = self.prompt.speech(text) + self.prompt.spoken(spoken)
        started: Future[Frames] = Future()

        def start(prefill: "Future[Sequence]") -> None:
            try:
                started.set_result(self._start_text(prefill.result(), rows, generation))
            except BaseException as error:
                started.set_exception(error)

        # In the prefill's callback, so that the text starts before the voice can be evicted.
        self.driver.call(lambda: self._voice(reference).prefill.add_done_callback(start))
        return started.result()

    def warm_up(self) -> None:
        """Capture the steps, which would delay the first texts."""
        self.driver.call(lambda: self.driver.on_stream(self.engine.runner.warm_up))

    def close(self) -> None:
        """End all texts; no further ones can be started."""
        self.driver.shutdown()

    def _start_text(self, voice: Sequence, rows: list[Row], generation: Generation) -> Frames:
        sequence = self.engine.fork(voice)
        try:
            self.engine.append(sequence, rows)
            return EngineFrames(self.model, self.driver, self.driver.stream(sequence, generation))
        except Exception:
            self.engine.close(sequence)
            raise

    def _voice(self, reference: Codes) -> "_EngineVoice":
        """The prompt of a voice, prefilled in the batched steps; the least recently used voice is evicted."""
        voice = self._voices.get(reference)
        if voice is None:
            sequence = self.engine.open(self.prompt.before_text(reference))
            voice = self._voices[reference] = _EngineVoice(sequence, self.driver.prefill(sequence))
            voice.prefill.add_done_callback(lambda done: self._drop_failed(reference, sequence, done))
        self._voices.move_to_end(reference)
        computed = [each for each, voice in self._voices.items() if voice.prefill.done()]
        for oldest in computed[: max(0, len(self._voices) - MAX_READY_VOICES)]:
            self.engine.close(self._voices.pop(oldest).sequence)
        return voice

    def _drop_failed(self, reference: Codes, sequence: Sequence, prefill: "Future[Sequence]") -> None:
        if prefill.exception() is not None:
            self._voices.pop(reference, None)
            self.engine.close(sequence)


class _EngineVoice(NamedTuple):
    sequence: Sequence
    prefill: "Future[Sequence]"


class EngineFrames:
    """The frames of one text as the engine generates them. Closing it closes the sequence."""

    def __init__(self, model: MossTTSNano, driver: AsyncEngine, rows: BlockingReply) -> None:
        self._model, self._driver, self._rows, self._is_open = model, driver, rows, True

    def __iter__(self) -> "EngineFrames":
        return self

    def __next__(self) -> Frame:
        try:
            for row in self._rows if self._is_open else ():
                for frame in self._model.spoken_frames([row]):
                    return frame
        except Exception:
            self.close()
            raise
        self.close()
        raise StopIteration

    def needed_by(self, moment: float) -> None:
        """Set the deadline of the next frame, by `time.monotonic`."""
        self._rows.needed_by(moment)

    def close(self) -> None:
        """Stop generating. Does not block, so that a finalizer may call it."""
        if self._is_open:
            self._is_open = False
            self._driver.discard(self._rows.sequence)

    def __del__(self) -> None:
        self.close()


State = CodecState | SlotState
MAX_STREAMS = 128


class SingleDecoder:
    """Decodes each chunk on the calling thread."""

    def __init__(self, codec: MossAudioTokenizerNano) -> None:
        self.codec = codec

    def start(self) -> CodecState:
        """The state before the first frame."""
        return self.codec.decoder_state()

    def __call__(self, state: State, codes: list[Frame], lead: float = 0.0) -> tuple[Samples, State]:
        """# [channel, time]"""
        assert isinstance(state, CodecState)
        sound, after = self.codec.decode_step(state, torch.tensor(codes).T)
        return sound.float().cpu().numpy(), after

    def warm_up(self, codebooks: int) -> None:
        """Nothing to prepare."""


class CodecJob(NamedTuple):
    """The next frames of one stream."""

    state: State
    codes: NDArray[np.int64]  # [codebook, frame]

    @property
    def is_repeatable(self) -> bool:
        """Whether a failed pass leaves the state unchanged: a slot has room for one hop beyond the window."""
        return isinstance(self.state, CodecState) or self.codes.shape[1] <= HOPS[-1]


class BatchedDecoder:
    """Decodes chunks of several texts in one pass, with CUDA graphs if the device has them."""

    def __init__(self, codec: MossAudioTokenizerNano, device: Device, executor: DeadlineExecutor | None = None) -> None:
        self.codec = codec
        fits = device.samples_that_fit(SlotDecoder.slot_bytes(codec), MAX_STREAMS) if device.graphs else 0
        self.slots = SlotDecoder(codec, fits) if fits else None
        self._stream = CudaStream(codec.device)
        self.batcher: DynamicBatcher[CodecJob, tuple[Samples, State]] = DynamicBatcher(
            "viva-codec",
            self._decode,
            executor or executor_for(codec.device),
            MAX_STREAMS,
            kind=lambda job: isinstance(job.state, SlotState),
            leaves_jobs=lambda job: job.is_repeatable,
        )
        self.batcher.start()

    def start(self) -> State:
        """The state before the first frame: a slot of the graphs, or separate memory if none is free."""
        state = self.slots.start() if self.slots else None
        return self.codec.decoder_state() if state is None else state

    def __call__(self, state: State, codes: list[Frame], lead: float = 0.0) -> tuple[Samples, State]:
        """# [channel, time]"""
        job = CodecJob(state, np.array(codes, dtype=np.int64).T)
        self.codec.check_codes(torch.from_numpy(job.codes)[None])
        return self.batcher.submit(job, min(lead, EARLY_SECONDS)).result()

    def call(self, action: Callable[[], Result]) -> Result:
        """Run an action while nothing else uses the codec, and return its result."""

        def run() -> Result:
            with self._stream():
                return action()

        return self.batcher.call(run)

    def warm_up(self, codebooks: int) -> None:
        """Capture the steps, which would delay the first texts."""
        if self.slots is not None:
            slots = self.slots
            self.call(lambda: slots.warm_up(codebooks))

    def close(self) -> None:
        """Stop decoding."""
        self.batcher.shutdown()

    def _decode(self, jobs: Jobs[CodecJob]) -> list[tuple[Samples, State]]:
        with self._stream():
            return self._in_slots(jobs) if isinstance(jobs[0].state, SlotState) else self._stacked(jobs)

    def _in_slots(self, jobs: Jobs[CodecJob]) -> list[tuple[Samples, State]]:
        assert self.slots is not None
        states = [job.state for job in jobs if isinstance(job.state, SlotState)]
        sounds, after = self.slots.step_batch(states, [job.codes for job in jobs])
        return list(zip(sounds, after, strict=True))

    def _stacked(self, jobs: Jobs[CodecJob]) -> list[tuple[Samples, State]]:
        states = [job.state for job in jobs if isinstance(job.state, CodecState)]
        sounds, after = self.codec.decode_step_batch(states, [torch.from_numpy(job.codes) for job in jobs])
        return [(sound.float().cpu().numpy(), state) for sound, state in zip(sounds, after, strict=True)]


class NanoTTS(FrameTTS):
    """MOSS-TTS-Nano; several threads may speak concurrently."""

    def __init__(
        self,
        model: MossTTSNano,
        codec: MossAudioTokenizerNano,
        tokenizer: NanoTokenizerProtocol,
        device: Device,
        settings: SpeechSettings | None = None,
        voices: str | Path | None = None,
    ) -> None:
        if codec.config.quantizer.num_quantizers < model.codebooks:
            raise CheckpointError(
                f"the model writes {model.codebooks} codebooks, the codec has "
                f"{codec.config.quantizer.num_quantizers}; use the codec that was published with the model"
            )
        self.model, self.codec = model, codec
        self.prompt = MossTTSNanoPrompt(model.config, tokenizer)
        self.settings = settings or SpeechSettings()
        self.voices = VoiceStore(self.settings.voices, voices)
        self.generator: FrameGenerator
        self.decode: SingleDecoder | BatchedDecoder
        if choose_nano_generator(device, model.transformer.wte.weight.dtype).cls is CpuFrameGenerator:
            self.generator, self.decode, self._executor = (
                CpuFrameGenerator(model, self.prompt),
                SingleDecoder(codec),
                decoding_executor(),
            )
        else:
            self.decode, self._executor = BatchedDecoder(codec, device), None
            self.generator = EngineFrameGenerator(model, self.prompt, device)

    @classmethod
    def load(
        cls,
        name: str = "mini-tts",
        device: str = "auto",
        dtype: str = "auto",
        codec: str | None = None,
        codebooks: int | None = None,
        voices: str | Path | None = None,
    ) -> "NanoTTS":
        """Load a bundled name, folder or hub id; the codec is in its `codec` folder, or is downloaded.

        `dtype` is `auto`, `float32`, `bfloat16`, `float16`, or `int8` on CPUs; `auto` is int8 where that is faster.
        """
        folder, on = hub.resolve(name), pick(device)
        bundled_codec = folder / CODEC_FOLDER
        codec_folder = hub.resolve(codec or (str(bundled_codec) if bundled_codec.is_dir() else OFFICIAL_CODEC))
        choice = choose_nano_lm(on, dtype, MossTTSNanoConfig.read(folder).hidden_size)
        model = MossTTSNano.load(folder, on.torch_device, choice.dtype, codebooks)
        if choice.is_int8:
            to_int8(model.transformer)
            to_int8(model.local_transformer)
        tts = cls(
            model,
            MossAudioTokenizerNano.load(codec_folder, on.torch_device),
            SentencePieceTokenizer.load(folder),
            on,
            SpeechSettings.read(folder),
            voices,
        )
        tts.capture()
        return tts

    def capture(self) -> None:
        """Compile the steps, or capture them as CUDA graphs."""
        self.generator.warm_up()
        self.decode.warm_up(self.model.codebooks)

    def warm_up(self) -> None:
        """Do the one-time work that would delay the first text."""
        self.capture()

    @contextmanager
    def tuned_threads(self) -> Iterator[None]:
        """Set torch's thread count to the measured fastest for this model."""
        threads = torch.get_num_threads()
        if isinstance(self.generator, CpuFrameGenerator):
            threads = fastest_threads(self.generator)
        with torch_threads.held(threads):
            yield

    @property
    def rate(self) -> int:
        """Sample rate of the output in Hz."""
        return self.codec.config.sample_rate

    @property
    def channels(self) -> int:
        """Channels of the output."""
        return self.codec.config.channels

    @property
    def frame_rate(self) -> float:
        """Frames of codes a second."""
        return self.codec.config.frame_rate

    @property
    def codec_id(self) -> str:
        """Identifies the codec; stored with the codes of a voice."""
        return self.codec.mark

    def _start_playback(
        self, player: PlaybackClock, clock: Callable[[], float], is_live: bool
    ) -> ChunkedPlayback[State]:
        seconds = 1 / self.frame_rate
        executor = self._executor if torch.get_num_threads() <= spare_cores() else None  # else no core is left for it
        return ChunkedPlayback(self.decode, self.decode.start(), seconds, player, clock, executor, is_live)

    def _frames(self, text: str, prefix: SpokenPrefix, seed: int, greedy: bool) -> Frames:
        tokens = self.prompt.count_tokens(text)
        generation = self.settings.generation(self.model.config.n_vq, tokens, seed, greedy)
        return self.generator.frames(prefix.reference, prefix.transcript + text, generation, prefix.speech)

    @property
    def _parallel_parts(self) -> int:
        return self.generator.parallel_parts

    def _encode_reference(self, sound: Sound) -> list[list[int]]:
        def encoded() -> list[list[int]]:
            codes: list[list[int]] = self.codec.reference(sound)[: self.model.codebooks].T.tolist()
            return codes

        return encoded() if isinstance(self.decode, SingleDecoder) else self.decode.call(encoded)
