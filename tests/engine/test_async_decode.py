"""Asynchronous decode: steps launched before they are planned give the rows of planned steps."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.models.test_whisper_engine import CONFIG, SETTINGS, TOKENS, model, windows_of  # noqa: F401 - a fixture
from vivavoce.device import pick
from vivavoce.engine.cuda_graphs import CapturedStep, advance_inputs
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.engine.sequence import PlaybackDeadline
from vivavoce.engine.step import StepKind
from vivavoce.minis.untrained import CONFIG as SPEECH
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.whisper.engine import BEGUN, WhisperWriter
from vivavoce.models.whisper.model import Whisper, WindowMemory
from vivavoce.nn.paged_kv import CachePiece


class EagerGraph:
    """Stands in for a CUDA graph: a replay runs the action."""

    def __init__(self, action) -> None:
        self.replay = action


class Device:
    """A CPU that replays steps as a GPU does, row by row."""

    def __init__(self, engine: Engine) -> None:
        self.runner, self.steps, self.prelaunched = engine.runner, {}, 0
        self.runner.use_graphs, engine.scheduler.spare_rows = True, 1
        self.can_prelaunch, self.runner._graphs = self.runner._graphs.can_prelaunch, self

    def of(self, bucket: int, kind: StepKind) -> CapturedStep:
        key = (bucket, kind)
        if key not in self.steps:
            packed = torch.from_numpy(self.runner._packing.pack([], [], kind.draft_depth, bucket)[0])
            outputs, hidden = torch.zeros(bucket, 2, dtype=torch.long), torch.zeros(bucket, CONFIG.d_model)

            def step() -> None:
                facts = packed[:, 2:4].tolist()
                pieces = tuple(CachePiece(slice(row, row + 1), slot, place) for row, (slot, place) in enumerate(facts))
                outputs.copy_(self.runner._step(packed, kind, singles=0, pieces=pieces, sampled=None)[0])

            def advance_once() -> None:
                self.prelaunched += 1
                advance_inputs(packed, outputs, 2, self.runner._packing.filler, self.runner._next_modes)

            advance = EagerGraph(advance_once) if self.can_prelaunch(bucket, kind) else None
            self.steps[key] = CapturedStep(EagerGraph(step), packed, outputs, hidden, advance, kind.mode)
        return self.steps[key]


def engine_of(model, page_size: int = 4, cache_rows: int = 512) -> tuple[Engine, WhisperWriter]:  # noqa: F811
    writer = WhisperWriter(model, TOKENS, SETTINGS, 6)
    limits = EngineLimits(page_size=page_size, cache_rows=cache_rows, sequences_per_step=8)
    return Engine(writer, pick("cpu"), torch.float64, limits), writer


def texts(engine: Engine, writer: WhisperWriter, memory, timestamps: bool, events) -> list[list[int]]:
    """The texts of five windows while sequences are added, stopped, forked and closed between steps."""
    prompt, written, sequences = TOKENS.prompt("en", timestamps=timestamps), [], []
    for index, window in enumerate(writer.store.hold(memory)):
        sequence = engine.open(writer.prompt(window, prompt, timestamps))
        engine.generate(sequence, Generation(GREEDY, max_new_rows=5 + 6 * index))
        sequences.append(sequence)
        for _ in range(events[index] % 5):
            engine.step()
        if events[index] >= 18:
            engine.stop(sequence)
            engine.generate(sequence, Generation(GREEDY, max_new_rows=9))
        elif events[index] >= 15:
            engine.rewind(sequence, min(len(sequence), len(prompt) + 2))
            engine.generate(sequence, Generation(GREEDY, max_new_rows=9))
        elif events[index] >= 10:
            forked = engine.fork(sequence)
            engine.generate(forked, Generation(GREEDY, max_new_rows=7))
            sequences.append(forked)
        elif events[index] >= 8:
            engine.close(sequence)
    while engine.has_work:
        engine.step()
    for sequence in sequences:
        written.append([token for token, _ in sequence.rows])
        engine.close(sequence)
    return written


@settings(max_examples=8, deadline=None, derandomize=True)
@example([3, 19, 19, 18, 1], True, (4, 512))
@given(
    st.lists(st.integers(0, 19), min_size=5, max_size=5), st.booleans(), st.sampled_from([(1, 512), (4, 96), (4, 512)])
)
@pytest.mark.full
def test_texts_are_those_of_planned_steps(model, events, timestamps, sizes):  # noqa: F811
    memory = windows_of(model, 5)
    planned = texts(*engine_of(model, *sizes), memory, timestamps, events)
    engine, writer = engine_of(model, *sizes)
    device = Device(engine)
    assert texts(engine, writer, memory, timestamps, events) == planned
    assert device.prelaunched > 0


def test_nearly_every_step_of_long_texts_is_prelaunched_and_none_beyond_their_end(model):  # noqa: F811
    engine, writer = engine_of(model)
    device = Device(engine)
    for window in writer.store.hold(windows_of(model, 4)):
        sequence = engine.open(writer.prompt(window, TOKENS.prompt("en"), False))
        engine.generate(sequence, Generation(GREEDY, max_new_rows=12))
    while engine.has_work:
        engine.step()
    ended = {len(sequence) for sequence in engine.scheduler.sequences.values()}
    prompt, max_rows = len(TOKENS.prompt("en")), max(ended)
    assert max_rows - prompt - 2 - len(ended) <= device.prelaunched <= 12 - 2 + len(ended)


@pytest.mark.gpu
@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.parametrize("events", [(0, 1, 2, 3, 4), (12, 3, 16, 9, 1), (3, 14, 2, 11, 18)])
def test_on_a_gpu_texts_are_those_of_steps_without_graphs(model, events, timestamps):  # noqa: F811
    device = pick("cuda")
    there = Whisper(CONFIG).requires_grad_(False).eval()
    there.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    there.to(device.torch_device)
    found = windows_of(model, 5)
    memory = WindowMemory(found.keys.float().to(device.torch_device), found.values.float().to(device.torch_device))
    outputs = []
    for use_graphs in (False, True):
        writer = WhisperWriter(there, TOKENS, SETTINGS, 6)
        limits = EngineLimits(page_size=16, cache_rows=1024, sequences_per_step=8)
        engine = Engine(writer, device, torch.float32, limits, use_graphs)
        assert engine.runner.can_prelaunch == use_graphs
        outputs.append(texts(engine, writer, memory, timestamps, events))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("timestamps", [False, True])
def test_modes_of_the_device_are_those_of_the_host(model, timestamps):  # noqa: F811
    writer = WhisperWriter(model, TOKENS, SETTINGS, 6)
    tokens = [4, TOKENS.timestamps, TOKENS.timestamps + 7, 5, 6, TOKENS.timestamps + 9, TOKENS.endoftext]
    channel = 2 * 3 + timestamps
    for started in (0, BEGUN):
        mode = writer.start_mode((0, channel)) | started
        for token in tokens:
            outputs = writer.next_modes(torch.tensor([mode], dtype=torch.int32), torch.tensor([[token, channel]]))
            mode = writer.next_mode(mode, (token, channel))
            assert outputs.tolist() == [mode]


SPOKEN = Generation(Sampling(temperature=0.9, top_k=12), max_new_rows=14, seed=5)
PENALISED = Generation(Sampling(temperature=0.9, top_k=12, repetition_penalty=1.3), max_new_rows=14, seed=6)


def spoken_engine(device: str = "cpu", dtype: torch.dtype = torch.float64, page_size: int = 4) -> Engine:
    speech = MossSpeech.random(SPEECH, device, dtype)
    with torch.no_grad():  # now and then a reply goes back to text
        speech.audio_lm_head.weight[SPEECH.eosp_token_id] *= 12
    limits = EngineLimits(page_size=page_size, cache_rows=512, sequences_per_step=8)
    return Engine(speech, pick(device), dtype, limits)


def spoken(engine: Engine, listener: PlaybackDeadline | None, replies: int) -> list[list[tuple[int, ...]]]:
    """Replies that begin one after another, and what they say."""
    sequences = []
    for number in range(replies):
        prompt = [(5 + number, SPEECH.audio_pad_token_id), (SPEECH.sosp_token_id, SPEECH.audio_pad_token_id)]
        sequences.append(engine.open(prompt))
        engine.generate(sequences[-1], PENALISED if number % 2 else SPOKEN, listener=listener)
        engine.step()
        engine.step()
    while any(sequence.is_generating for sequence in sequences):
        engine.step()
    return [list(sequence.rows) for sequence in sequences]


@pytest.mark.parametrize(("replies", "heard"), [(1, False), (1, True), (3, True), (6, True)])
def test_sampled_replies_are_those_of_planned_steps(replies, heard):
    listener = PlaybackDeadline(0.08, 4, 0.0, started=0.0) if heard else None
    planned = spoken(spoken_engine(), listener, replies)
    engine = spoken_engine()
    device = Device(engine)
    assert spoken(engine, listener, replies) == planned
    assert device.prelaunched > 0
    speech = [row for rows in planned for row in rows[2:]]
    assert {row[0] == SPEECH.modality_pad_token_id for row in speech} == {True, False}


@pytest.mark.gpu
@pytest.mark.parametrize("replies", [1, 3, 6])
def test_on_a_gpu_sampled_replies_are_those_of_planned_steps(replies):
    outputs = []
    for can_prelaunch in (False, True):
        engine = spoken_engine("cuda", torch.float32, 16)
        if not can_prelaunch:
            engine.runner._graphs.next_modes = None
        outputs.append(spoken(engine, PlaybackDeadline(0.08, 4, 0.0, started=0.0), replies))
        advance = [captured.advance for captured in engine.runner._graphs._captured.values()]
        assert any(each is not None for each in advance) == can_prelaunch
    assert outputs[0] == outputs[1]


def test_no_step_is_prelaunched_while_a_first_audio_is_decoded():
    engine = spoken_engine()
    device, started = Device(engine), []
    sequence = engine.open([(5, SPEECH.audio_pad_token_id), (SPEECH.sosp_token_id, SPEECH.audio_pad_token_id)])
    engine.generate(sequence, SPOKEN, listener=PlaybackDeadline(0.08, 4, engine.scheduler.now()))
    for _ in range(4):
        engine.step()
        started.append(device.prelaunched)
    assert started == [0, 1, 2, 2]  # the first step has the prompt's rows too, the fourth row is the last of the sound


def test_modes_of_a_speaking_device_are_those_of_the_host():
    speech = MossSpeech.random(SPEECH)
    texts, codes = (7, SPEECH.sosp_token_id, SPEECH.modality_pad_token_id), (3, SPEECH.eosp_token_id)
    rows = [(mode, (text, code)) for mode in (0, 1) for text in texts for code in codes]
    outputs = speech.next_modes(torch.tensor([mode for mode, _ in rows], dtype=torch.int32),
                             torch.tensor([row for _, row in rows]))  # fmt: skip
    assert outputs.tolist() == [speech.next_mode(mode, row) for mode, row in rows]
    assert outputs.dtype == torch.int32
