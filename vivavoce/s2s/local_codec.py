"""MOSS-Speech's codec, shared by all conversations: dynamic batchers for the speech encoder and the vocoder.

On a GPU each batcher has its CUDA stream, so that none waits for the language model or another batcher, and the
vocoder has two: urgent chunks, above all first ones, do not wait for the long passes of replies with a lead. Those
passes wait, between their parts, while replies begin.
"""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from vivavoce.errors import InputError
from vivavoce.models.flow.state import FlowVoice
from vivavoce.models.moss_speech.codec import GraphedCodec, MossSpeechCodec, SpokenState
from vivavoce.models.speech_encoder.cuda import GraphedSpeechStream
from vivavoce.models.speech_encoder.model import SpeechStreamState
from vivavoce.nn.cuda_graphs import CudaStream, compiling_ahead
from vivavoce.nn.process_settings import serving_threads
from vivavoce.runtime.batcher import DynamicBatcher
from vivavoce.runtime.executor import DeadlineExecutor, executor_for
from vivavoce.runtime.urgent_work import UrgentWork

EncoderJob = tuple[SpeechStreamState, Tensor, bool]  # state, samples, whether the turn ends with them
EncoderResult = tuple[list[int], SpeechStreamState]
VocoderJob = tuple[SpokenState | FlowVoice, Tensor, bool]  # state or the voice of a new reply, codes, is last
VocoderResult = tuple[Tensor, SpokenState]
SPEECH_ENCODER = "viva-speech-encoder"
MAX_ENCODER_BATCH = 32
SHORT_CODES = 12  # jobs of at most this many codes do not wait for longer ones, such as old turns of a history
MAX_VOCODER_BATCH = {"cpu": 4, "cuda": 32}
QUICK_CHUNKS = 2  # the longest hop of the quick batcher, for replies that soon run dry
SOON_SECONDS = 1.0  # jobs needed within this go to the quick batcher
BATCHING_SECONDS = 2.0  # other jobs start this long before their deadline, or when a batch is full
MAX_PAUSE_SECONDS = 0.4  # from the start of such a pass, for which it waits for replies that begin
PASS_SECONDS = 0.4  # that a long pass takes beside other work: it waits no longer than until this before its deadline


def max_quick_codes(codec: MossSpeechCodec) -> int:
    """Codes of the longest hop that the quick batcher takes."""
    return QUICK_CHUNKS * codec.flow.config.chunk


class VocoderBatcher:
    """Codes to sound by one or two batchers, with the interface of a `DynamicBatcher`."""

    def __init__(
        self,
        usual: DynamicBatcher[VocoderJob, VocoderResult],
        quick: DynamicBatcher[VocoderJob, VocoderResult] | None,
        urgent: UrgentWork,
        max_quick_codes: int = 0,
    ) -> None:
        self.usual, self._quick, self._urgent, self._max_quick_codes = usual, quick, urgent, max_quick_codes
        self.ways = [usual] if quick is None else [usual, quick]

    def start(self) -> None:
        """Start the batchers."""
        for way in self.ways:
            way.start()

    async def close(self) -> None:
        """Stop the batchers; waiting jobs fail."""
        for way in self.ways:
            await way.close()

    @property
    def waiting(self) -> int:
        """Jobs not yet started."""
        return sum(way.waiting for way in self.ways)

    @property
    def jobs(self) -> int:
        """Jobs started so far."""
        return sum(way.jobs for way in self.ways)

    @property
    def batches(self) -> int:
        """Batches started so far."""
        return sum(way.batches for way in self.ways)

    @property
    def busy(self) -> float:
        """Total seconds of all batches, also of those that were run at the same time."""
        return sum(way.busy for way in self.ways)

    @property
    def max_batch(self) -> int:
        """The largest batch."""
        return self.usual.max_batch

    @property
    def workers(self) -> int:
        """Batches that are run at a time."""
        return sum(way.workers for way in self.ways)

    async def do(self, job: VocoderJob, urgency: float = 0.0) -> VocoderResult:
        """The sound of some codes, needed in `urgency` seconds."""
        is_first = not isinstance(job[0], SpokenState)
        # The quick batcher would cut a long hop into short ones, and all urgent jobs would wait for them.
        is_long = not is_first and len(job[1]) > self._max_quick_codes
        if self._quick is None or urgency >= SOON_SECONDS or is_long:
            return await self.usual.do(job, urgency)
        if not is_first:
            return await self._quick.do(job, urgency)
        first_sound = object()
        self._urgent.add(first_sound)
        try:
            return await self._quick.do(job, urgency)
        finally:
            self._urgent.discard(first_sound)


class LocalCodec:
    """Turns to codes and codes to sound, batched, earliest deadline first."""

    def __init__(
        self,
        codec: MossSpeechCodec,
        left_chunks: int | None,
        max_vocoder_batch: int | None = None,
        executor: DeadlineExecutor | None = None,
    ) -> None:
        self.codec, self.left_chunks = codec, left_chunks
        device = codec.speech_encoder.device
        self._encoder_stream, self._vocoder_streams = (
            CudaStream(device, urgent=True),
            [CudaStream(device), CudaStream(device, urgent=True)],
        )
        max_batch = max_vocoder_batch or MAX_VOCODER_BATCH.get(device.type, 16)
        executor = executor or executor_for(device)
        self.urgent = UrgentWork(self._wake_vocoder)
        """First chunks that are being decoded, and replies that will soon have one."""
        self._pauses_until = 0.0  # on the clock of `time.monotonic`: while the present pass waits for urgent work
        self.speech_encoder: DynamicBatcher[EncoderJob, EncoderResult] = DynamicBatcher(
            SPEECH_ENCODER, self._encode, executor, MAX_ENCODER_BATCH, self._is_long, leaves_jobs=True
        )
        self._codecs = [codec]
        if isinstance(codec, GraphedCodec):
            codec.vocoder.checks_mels = False  # the sound is checked when it is read back
            self._codecs.append(codec.with_own_graphs())
            codec.pause_before_parts(self._wait_for_urgent_work)
            quick = DynamicBatcher("viva-quick-vocoder", self._vocoder(1), executor, max_batch, _pass, leaves_jobs=True)
            usual = DynamicBatcher(
                "viva-vocoder",
                self._vocoder(0),
                executor,
                max_batch,
                _pass,
                BATCHING_SECONDS,
                # It yields to first chunks only: yielding to all urgent jobs would make late replies later.
                lambda: len(self.urgent) > 0,
                leaves_jobs=True,
            )
            self.vocoder = VocoderBatcher(usual, quick, self.urgent, max_quick_codes(codec))
        else:
            # On two cores a pass runs on one thread, and two passes at a time make 1.7 times as much sound.
            workers = 2 if device.type == "cpu" and serving_threads() == 1 else 1
            usual = DynamicBatcher(
                "viva-vocoder", self._vocoder(0), executor, max_batch, _pass, leaves_jobs=True, workers=workers
            )
            self.vocoder = VocoderBatcher(usual, None, self.urgent)

    def warm_up(self, voices: Sequence[FlowVoice], batches: Sequence[int], sizes: Sequence[int]) -> None:
        """Capture the CUDA graphs of hops with these batch sizes and code counts before the first conversation."""
        voice = max(voices, key=lambda voice: voice.sink)
        if not isinstance(self.codec, GraphedCodec):
            if self.codec.speech_encoder.device.type == "cpu":
                self._speak_once(voice, max(sizes))
            return
        with compiling_ahead() as is_ahead:
            if is_ahead:
                self._warm_up(voice, batches, sizes, self._codecs[:1])
        self._warm_up(voice, batches, sizes, self._codecs)
        torch.cuda.empty_cache()  # memory that only capturing needed

    @torch.inference_mode()
    def _speak_once(self, voice: FlowVoice, max_codes: int) -> None:
        """Run every kind of pass once: CPU libraries prepare a shape when they first see it."""
        codec, flow = self.codec, self.codec.flow
        codes = torch.zeros(max_codes + flow.config.lookahead, dtype=torch.long)
        first = codes[: flow.config.chunk + flow.config.lookahead]
        _, state = codec.step(codec.start(voice, self.left_chunks), first)
        codec.step(state, codes[:max_codes])
        for replies in range(2, self.vocoder.max_batch + 1):
            flows = [flow.start(voice, self.left_chunks) for _ in range(replies)]
            _, flows = flow.step_batch(flows, [first] * replies)
            flow.step_batch(flows, [codes[:max_codes]] * replies)

    def _warm_up(
        self, voice: FlowVoice, batches: Sequence[int], sizes: Sequence[int], codecs: Sequence[MossSpeechCodec]
    ) -> None:
        with self._encoder_stream():
            cast(GraphedSpeechStream, self.codec.speech_encoder).warm_up(min(MAX_ENCODER_BATCH, max(batches)))
        for index, (codec, stream) in enumerate(zip(codecs, self._vocoder_streams, strict=False)):
            with torch.inference_mode(), stream():
                graphed, short = cast(GraphedCodec, codec), [size for size in sizes if size <= max_quick_codes(codec)]
                if index == 0:
                    graphed.warm_up(voice, batches, sizes, self.left_chunks)
                else:
                    graphed.warm_up(voice, batches, short, self.left_chunks, first_units=range(1, QUICK_CHUNKS + 1))

    @property
    def pooled_bytes(self) -> float:
        """Memory freed by replies and reserved for the next ones."""
        return self.codec.pooled_bytes if isinstance(self.codec, GraphedCodec) else 0.0

    def reply_bytes(self, voice: FlowVoice) -> float:
        """Memory of a reply in this voice while it is generated, as far as a left window bounds it."""
        window = (self.left_chunks or 0) * self.codec.flow.config.chunk
        return voice.cache.nbytes / voice.sink * window if voice.sink else 0.0

    def _is_long(self, job: EncoderJob) -> bool:
        return len(job[1]) > SHORT_CODES * self.codec.speech_encoder.samples_per_code

    @torch.inference_mode()
    def _encode(self, jobs: Sequence[EncoderJob]) -> list[EncoderResult]:
        with self._encoder_stream():
            codes, states = self.codec.speech_encoder.step_batch(*(list(each) for each in zip(*jobs, strict=True)))
            self._encoder_stream.wait()
            counts, all_codes = list(map(len, codes)), iter(torch.cat(codes).tolist())  # one copy from the device
            return [(list(islice(all_codes, count)), state) for count, state in zip(counts, states, strict=True)]

    def _wake_vocoder(self) -> None:
        """Its usual batcher starts later beside urgent work, of which there is none now."""
        self.vocoder.usual.wake()

    def _wait_for_urgent_work(self) -> None:
        """Between two parts of a pass of the usual batcher: wait for what was launched, then for urgent work."""
        self._vocoder_streams[0].wait()
        self.urgent.wait(self._pauses_until - time.monotonic())

    def _vocoder(self, index: int) -> Callable[[Sequence[VocoderJob]], list[VocoderResult]]:
        codec, stream = self._codecs[index], self._vocoder_streams[index]

        @torch.inference_mode()
        def speak(jobs: Sequence[VocoderJob]) -> list[VocoderResult]:
            if index == 0:
                start, deadline = time.monotonic(), self.vocoder.usual.batch_deadline
                self._pauses_until = min(start + MAX_PAUSE_SECONDS, deadline - PASS_SECONDS)
            with stream():
                # States of new replies are made here: they are megabytes, too slow for the event loop.
                started = [
                    each if isinstance(each, SpokenState) else codec.start(each, self.left_chunks)
                    for each, _, _ in jobs
                ]
                sounds, states = codec.step_batch(
                    started, [codes for _, codes, _ in jobs], [last for _, _, last in jobs]
                )
                sound = torch.cat(sounds).float()
                stream.wait()
                samples = _read_back(sound, list(map(len, sounds)))
            if isinstance(codec, GraphedCodec):
                codec.release_windows(started, states)
            return list(zip(samples, states, strict=True))

        return speak


def _read_back(sound: Tensor, lengths: list[int]) -> list[Tensor]:
    """Sounds of these lengths on the host, in one copy; InputError where samples are not finite."""
    samples = sound.cpu()
    if not samples.sum().isfinite():
        raise InputError("the vocoder's sound holds NaN or infinite values; check the model")
    return list(samples.split(lengths))


def _pass(job: VocoderJob) -> tuple[bool, int, bool]:
    """The kind of a job: jobs that agree in it can share a pass."""
    state, codes, is_last = job
    return isinstance(state, SpokenState), len(codes), is_last
