"""Training of the flow decoder: the training forward equals inference, and training lowers the loss."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch

from tests.train.buzz_corpora import equal_buzzes
from vivavoce.audio.io import Sound
from vivavoce.errors import CheckpointError, InputError
from vivavoce.minis.untrained import SPEECH_ENCODER, untrained_codec
from vivavoce.models.flow.estimator import cosine_times, fixed_noise
from vivavoce.models.flow.model import FlowDecoder
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.models.moss_speech.codec import MossSpeechCodec
from vivavoce.nn.attention import KeySpan, attention_bias, visible
from vivavoce.train.corpus import Corpus, split_held_out
from vivavoce.train.flow_vocoder import FRAME, TeacherSpeech, vocoder
from vivavoce.train.flow_vocoder import flow as flow_training
from vivavoce.train.flow_vocoder.flow import (
    TINY,
    FlowLoss,
    MelScale,
    features,
    learned_and_held_out,
    main,
    teacher_vector,
    tiny_config,
    untrained,
    velocity,
)
from vivavoce.train.flow_vocoder.flow_batches import (
    NO_MASK,
    UNLIMITED,
    CodedSpeech,
    FlowBatches,
    FlowBatchShape,
    code_bias,
    coded_speech,
    offsets_within_a_code,
)
from vivavoce.train.flow_vocoder.flow_mels import flow_mels
from vivavoce.train.flow_vocoder.vocoder import main as vocoder_main
from vivavoce.train.loop import Learner
from vivavoce.train.package import assemble_codec

SHORT_VOCODER = dataclasses.replace(vocoder.TINY, frames=8, batch=2, max_steps=4)
CODES = 64
CONFIG = tiny_config(CODES)
SPEAKER = teacher_vector(CONFIG.speaker_dim)


@pytest.fixture(scope="module")
def speech():
    """Buzzes with codes that are the loudness of their frames."""
    sounds = TeacherSpeech.of(equal_buzzes(8), np.arange(8), "cpu")
    loudness = sounds.mel.mean(1).view(-1, CONFIG.ratio).mean(1)
    edges = torch.quantile(loudness, torch.linspace(0, 1, CODES + 1))[1:-1]
    codes = torch.bucketize(loudness, edges).numpy().astype(np.int16)
    return CodedSpeech.of(sounds, np.split(codes, 8), CONFIG.ratio)


@pytest.fixture
def flow(speech):
    return untrained(CONFIG, speech.mel.mean(0), seed=0)


def _batch(speech, number=0, seed=0):
    passages = FlowBatches(speech, CONFIG, TINY.shapes, TINY.options, cosine_times(2, torch.device("cpu"))[:-1], 0.5)
    return passages.batch(number, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("left", [None, 0, 1, 3])
@pytest.mark.parametrize("sink", [0, 5, 10])
def test_training_masks_equal_stream_masks(left, sink):
    span = KeySpan(torch.zeros(1, dtype=torch.int64), 23, torch.tensor([sink]))
    expected = attention_bias(visible(span, 5, left), torch.float32)
    result = code_bias(torch.tensor([UNLIMITED if left is None else left]), torch.tensor([sink]), 23, 5)
    assert torch.equal(result, expected)


def test_offline_batches_have_no_mask():
    assert (code_bias(torch.tensor([NO_MASK]), torch.tensor([5]), 23, 5) == 0).all()


@pytest.mark.parametrize(("left", "final"), [(None, True), (None, False), (2, True), (NO_MASK, True)])
@torch.no_grad()
def test_the_training_forward_equals_inference(speech, flow, left, final):
    """The inference solver, written out over the functions of training, gives the mel of inference."""
    (prompt_codes, prompt_mel), (codes, _) = speech.utterance(0), speech.utterance(1)
    prompt_codes, prompt_mel, codes = prompt_codes[:10], prompt_mel[:40], codes[: 17 if final else 20]
    flow.eval()
    expected = flow(
        codes,
        VoicePrompt(prompt_codes, prompt_mel, SPEAKER),
        streaming=left != NO_MASK,
        final=final,
        left_chunks=None if left in (None, NO_MASK) else left,
    )
    sink = flow._sink(10)
    known = UNLIMITED if left is None else left
    everything = torch.cat([prompt_codes, codes, torch.zeros(3 if final else 0, dtype=torch.int64)])[None]
    time = everything.shape[1] - 3
    code_mask = code_bias(torch.tensor([known]), torch.tensor([sink]), time, CONFIG.chunk)
    mask = code_mask.repeat_interleave(4, 2).repeat_interleave(4, 3)
    result = features(flow, everything, torch.tensor([time if final else time + 3]), (code_mask, mask))
    speaker = flow.spk_embed_affine_layer(SPEAKER)
    prompted = torch.zeros_like(result)
    prompted[:, :40] = prompt_mel
    conditions = torch.cat([result, speaker.expand_as(result), prompted], dim=-1)
    x, times = (
        fixed_noise(80, torch.device("cpu"))[None, : time * 4],
        cosine_times(CONFIG.euler_steps, torch.device("cpu")),
    )
    for now, then in itertools.pairwise(times):
        with_conditions, without = (
            velocity(flow, x, now[None], given, mask) for given in (conditions, torch.zeros_like(conditions))
        )
        x = x + (then - now) * ((1 + CONFIG.guidance) * with_conditions - CONFIG.guidance * without)
    torch.testing.assert_close(x[0, 40:].T, expected, atol=1e-4, rtol=1e-4)


def test_a_batch_is_a_prompt_and_the_speech_after_it(speech):
    batch = _batch(speech, number=1)
    assert batch["codes"].shape == (2, 33) and batch["mel"].shape == (2, 120, 80)
    prompt = batch["prompted"].sum(1) // CONFIG.ratio
    assert (prompt % CONFIG.chunk == 0).all() and (prompt <= 15).all()
    assert (batch["sink"] == (prompt - CONFIG.chunk).clamp(min=0)).all()
    assert _batch(speech, number=2)["codes"].shape == (4, 23)
    again = _batch(speech, number=1)
    assert all(torch.equal(batch[name], again[name]) for name in batch)


def test_codes_and_mels_of_a_batch_belong_together(speech):
    batches = FlowBatches(
        speech, CONFIG, [FlowBatchShape(30, 8)], TINY.options.__class__(replaced=0.0), torch.zeros(1), 0.5
    )
    batch = batches.batch(0, torch.Generator().manual_seed(0))
    pairs = zip(speech.mel.view(-1, 4, 80), speech.codes, strict=True)
    code_of_mel = {mel.numpy().tobytes(): int(code) for mel, code in pairs}
    for codes, mels in zip(batch["codes"], batch["mel"].unflatten(1, (-1, 4)), strict=True):
        assert [code_of_mel[mel.numpy().tobytes()] for mel in mels] == codes[:30].tolist()


def test_speech_at_an_offset_is_aligned_with_its_codes():
    """Offsets are whole mel frames: the mels are those of the recording, later, and the codes those of a stream."""
    stream, corpus = untrained_codec().speech_encoder, equal_buzzes(3)
    offsets = list(offsets_within_a_code(CONFIG.ratio))
    assert offsets == [0, 320, 640, 960], "of the 1,280 samples of a code"
    indices = np.array([0, 2])
    speech = coded_speech(stream.encoder, corpus, indices, CONFIG.ratio, "cpu", offsets)
    assert len(speech) == 8 and speech.mel.shape == (len(speech.codes) * CONFIG.ratio, 80)
    for position, (offset, index) in enumerate(itertools.product(offsets, indices)):
        frames = offset // FRAME
        codes, mel = speech.utterance(position)
        _, original = speech.utterance(position % 2)
        same = slice(2, len(original) - CONFIG.ratio)  # the first two see what is before the recording
        torch.testing.assert_close(mel[frames:][same], original[same], atol=1e-4, rtol=1e-4)
        recording = np.pad(corpus[index][0], (offset, 0))
        streamed, _ = stream.step(stream.initial_state(), torch.from_numpy(recording))
        assert len(codes) == len(recording) // (CONFIG.ratio * FRAME)
        assert torch.equal(codes[: len(streamed)], streamed) and len(streamed) >= len(codes) - 1
    assert not torch.equal(speech.utterance(0)[0], speech.utterance(4)[0]), "another alignment has other codes"


def test_the_vocoders_held_out_sentences_are_not_learned_from_another_corpus():
    first, other = equal_buzzes(40), equal_buzzes(45)
    second = Corpus(other.samples, other.starts, [*other.texts[:40], *(f"new {i}" for i in range(5))], other.voices)
    joined, learned, held_out = learned_and_held_out([first, second])
    assert len(joined) == 85 and held_out.tolist() == split_held_out(first)[1].tolist()
    held_texts = {first.texts[index] for index in held_out}
    assert not held_texts & {joined.texts[index] for index in learned}
    assert len(learned) == 85 - 2 * len(held_texts)
    alone = learned_and_held_out([first])
    assert alone[1].tolist() == split_held_out(first)[0].tolist()


def test_every_weight_of_the_flow_learns(speech, flow):
    loss = FlowLoss(flow, TINY, SPEAKER, MelScale.of(speech.mel))(_batch(speech) | {"guided": torch.ones(4)})["loss"]
    names = dict(flow.named_parameters())
    for name, gradient in zip(names, torch.autograd.grad(loss, list(names.values())), strict=True):
        assert torch.isfinite(gradient).all() and gradient.abs().max() > 0, name


def test_the_loss_falls(speech):
    roomy = dataclasses.replace(CONFIG, estimator=dataclasses.replace(CONFIG.estimator, channels=160))
    flow = untrained(roomy, speech.mel.mean(0), seed=0)
    loss_function, batch = FlowLoss(flow, TINY, SPEAKER, MelScale.of(speech.mel)), _batch(speech, seed=99)
    before = loss_function(batch)
    learner = Learner({"flow": flow}, loss_function, 1e-3)
    for step in range(50):
        learner.step(_batch(speech, step, step), min(1.0, step / 10))
    after = loss_function(batch)
    assert after["flow"] < 0.8 * before["flow"] and after["prior"] < 0.9 * before["prior"]


@torch.no_grad()
def test_an_untrained_flow_negates_its_noise(speech):
    roomy = dataclasses.replace(CONFIG, estimator=dataclasses.replace(CONFIG.estimator, channels=192))
    flow = untrained(roomy, speech.mel.mean(0), seed=0)
    noise = torch.randn(2, 60, 80, generator=torch.Generator().manual_seed(0))
    nothing = torch.zeros(2, 60, 240)
    moved = velocity(flow, noise, torch.zeros(2), nothing, torch.zeros(1))
    wanted = speech.mel.mean(0) - noise
    assert (moved - wanted).square().mean() < 0.3


def test_a_corpus_too_short_for_a_sequence_is_refused(speech):
    with pytest.raises(InputError, match="use a larger corpus"):
        FlowBatches(speech, CONFIG, [FlowBatchShape(1000, 1)], TINY.options, torch.zeros(1), 0.5)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A speech encoder, a flow and a vocoder, as their commands write them."""
    folder = tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocoder, "TINY", SHORT_VOCODER)
        patch.setattr(flow_training, "TINY", dataclasses.replace(TINY, max_steps=6))
        yield _trained_parts(folder)


def _trained_parts(folder):
    equal_buzzes(8).save(folder / "corpus")
    untrained_codec().save(folder / "encoder")
    given = ["--seconds", "60", "--tiny"]
    equal_buzzes(4, codes=30).save(folder / "more")
    corpora = ["--corpus", str(folder / "corpus"), str(folder / "more")]
    main([*given, *corpora, "--speech-encoder", str(folder / "encoder"), "--out", str(folder / "flow")])
    vocoder_main([*given, "--corpus", str(folder / "corpus"), "--out", str(folder / "vocoder")])
    return folder


def test_the_command_writes_a_flow_that_loads(parts):
    config = tiny_config(SPEECH_ENCODER.quantize_vocab_size)
    FlowDecoder.load(parts / "flow" / "flow-chunk-5.safetensors", config)
    figures = json.loads((parts / "flow" / "metrics.json").read_text())
    assert all(np.isfinite(list(figures.values()))) and {"stream_guidance_0.7_l1", "stream_moved_l1"} < figures.keys()
    assert (parts / "flow" / "log.jsonl").is_file()


def test_assembled_parts_are_a_codec_with_the_reply_voice(parts, tmp_path):
    evaluated = assemble_codec(parts / "encoder", parts / "flow", parts / "vocoder", equal_buzzes(8), tmp_path)
    assert evaluated.codes == 25 and evaluated.mel_l1 > 0
    assert not list(tmp_path.rglob("*.pt"))
    codec = MossSpeechCodec.load(tmp_path)
    assert codec.voices() == ["rms"]
    voice = codec.named_voice("rms")
    assert len(voice.codes) == 25 and voice.sink == 20
    codes = codec.encode(Sound(equal_buzzes(1)[0][0], 16_000))
    spoken = codec.speak(codes, voice, left_chunks=4)
    assert spoken.shape == (25 * 1920,) and torch.isfinite(spoken).all()


def test_a_vocoder_continues_on_mels_of_the_flow(parts, tmp_path, capsys):
    given = ["--corpus", str(parts / "corpus"), "--out", str(tmp_path), "--seconds", "60", "--tiny"]
    starting_points = [
        "--init",
        str(parts / "vocoder"),
        "--speech-encoder",
        str(parts / "encoder"),
        "--flow",
        str(parts / "flow"),
    ]
    vocoder_main(given + starting_points)
    assert (tmp_path / "hift.safetensors").is_file()
    assert "mels of the flow" in capsys.readouterr().out


@torch.no_grad()
def test_mels_for_the_vocoder_are_those_of_a_stream(speech, flow):
    prompt = VoicePrompt(*speech.prompt(CONFIG.chunk), SPEAKER)
    mels = flow_mels(flow.eval(), speech, prompt, codes=40, rows=2)
    assert mels.shape == speech.mel.shape
    expected = flow(speech.codes[40:83], prompt, streaming=True, final=False, left_chunks=4)
    torch.testing.assert_close(mels[160:320], expected.T, atol=1e-4, rtol=1e-4)


def test_errors_name_folders_that_are_mixed_up(parts, tmp_path):
    with pytest.raises(CheckpointError, match="no sizes of a flow"):
        assemble_codec(parts / "encoder", parts / "vocoder", parts / "flow", equal_buzzes(8), tmp_path)
    with pytest.raises(CheckpointError, match="sizes"):
        assemble_codec(parts / "encoder", parts / "encoder", parts / "flow", equal_buzzes(8), tmp_path)
