"""Training of mini-asr in miniature: on CPU, with beeps for speech."""

import json
import random
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from transformers import WhisperForConditionalGeneration

from vivavoce.audio.mel import WhisperMel
from vivavoce.errors import InputError
from vivavoce.models.quantised import rounded
from vivavoce.models.speech_encoder.model import SpeechEncoderConfig
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.models.whisper.config import WhisperConfig, WhisperTokens
from vivavoce.models.whisper.model import Whisper
from vivavoce.train.asr import Vocabulary, init_from_speech_encoder, spread_layers
from vivavoce.train.asr.batches import (
    IGNORED,
    RATE,
    AudioAugmentation,
    Recordings,
    WindowMaker,
    WindowOptions,
    WindowShape,
)
from vivavoce.train.asr.evaluate import CONDITIONS, main, score_texts, transcribe_all
from vivavoce.train.asr.train import TINY, ASRRecipe, Rounding, Training
from vivavoce.train.asr.train import main as train_main
from vivavoce.train.corpus import Corpus
from vivavoce.train.speech_encoder import Lattice, new_encoder

PITCHES = {"low": 300.0, "mid": 900.0, "high": 2500.0}
BEEP = RATE // 3


def beeps(count: int, seed: int = 0) -> Recordings:
    """Sentences of one to three beeps, each a word."""
    source = random.Random(seed)
    sounds, texts = [], []
    for _ in range(count):
        words = [source.choice(list(PITCHES)) for _ in range(source.randint(1, 3))]
        time = torch.arange(BEEP) / RATE
        fade = torch.hann_window(BEEP)
        sound = torch.cat([0.5 * fade * torch.sin(2 * torch.pi * PITCHES[word] * time) for word in words])
        sounds.append((sound * 32767).to(torch.int16))
        texts.append(" ".join(words))
    lengths = torch.tensor([len(sound) for sound in sounds])
    return Recordings(torch.cat(sounds), lengths.cumsum(0) - lengths, lengths, texts)


RECIPE = ASRRecipe(
    config=WhisperConfig(
        d_model=48,
        encoder_layers=1,
        encoder_attention_heads=2,
        encoder_ffn_dim=96,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=96,
        max_source_positions=100,
        max_target_positions=48,
    ),
    merges=16,
    shapes=(WindowShape(1.6, 8, 1, 24), WindowShape(2.0, 6, 2, 24)),
    steps=40,
    warmup=10,
    peak_rate=5e-3,
    dropout=0.0,
    smoothing=0.0,
    average=0.9,
    augmentation=0.0,
    wrong_tokens=0.0,
    log_every=5,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("asr")
    training = Training(beeps(64), folder, RECIPE, report=lambda line: None)
    training.run()
    training.save(folder)
    return training, folder


def test_the_loss_falls(trained):
    _, folder = trained
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert log[-1]["text"] < 0.6 * log[0]["text"]
    assert log[-1]["ctc"] < 0.5 * log[0]["ctc"]


def test_a_saved_model_transcribes_as_the_trained_one(trained):
    training, folder = trained
    loaded, vocabulary = Whisper.load(folder), Vocabulary.read(folder)
    training.module.model.half().float()  # the weights as they were saved
    fresh = beeps(6, seed=1)
    assert transcribe_all(loaded, vocabulary, fresh) == transcribe_all(
        training.module.model, training.vocabulary, fresh
    )
    mel = WhisperMel(80)(fresh.samples[None, :32000].float() / 32768)
    tokens = torch.tensor([[*vocabulary.tokens.prompt("en"), *vocabulary.encode("low high mid")]])
    with torch.no_grad():
        assert torch.equal(loaded(mel, tokens), training.module.model(mel, tokens))


def test_transformers_and_tokenizers_read_the_checkpoint(trained):
    training, folder = trained
    theirs = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    mel = torch.randn(1, 80, 200, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([training.vocabulary.tokens.prompt("en")])
    with torch.no_grad():
        expected = theirs(input_features=mel, decoder_input_ids=tokens).logits
        assert (Whisper.load(folder)(mel, tokens) - expected).abs().max() < 1e-4
    assert theirs.generation_config.lang_to_id == {"<|en|>": training.vocabulary.tokens.languages["en"]}
    tokens_of_tokenizer = WhisperTokens.of_tokenizer(TextTokenizer.load(folder), training.vocabulary.size)
    assert tokens_of_tokenizer == training.vocabulary.tokens
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == training.vocabulary.size


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    recipe = replace(RECIPE, steps=6, dropout=0.2, wrong_tokens=0.3, augmentation=1.0)
    whole = Training(beeps(16), tmp_path / "whole", recipe, report=lambda line: None)
    whole.run()
    interrupted = Training(beeps(16), tmp_path / "killed", recipe, report=lambda line: None)
    make = interrupted._batch

    def interrupted_batch(plan, step):
        if step.number == 3:
            raise KeyboardInterrupt
        return make(plan, step)

    interrupted._batch = interrupted_batch
    with pytest.raises(KeyboardInterrupt):
        interrupted.run()
    interrupted.training_run.save()
    resumed = Training(beeps(16), tmp_path / "killed", recipe, report=lambda line: None)
    assert resumed.training_run.number == 3
    resumed.run()
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(tensor, resumed.module.state_dict()[name]), name


def test_the_vocabulary_encodes_as_the_tokenizers_library(tmp_path):
    texts = ["good evening to you", "a table for three, please", "don't you have 20 rooms?", "where's the lift"] * 3
    vocabulary = Vocabulary.learn(texts, merges=60, window_seconds=2.0)
    vocabulary.write(tmp_path)
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*texts, "Étage 3 — naïve café!  double  space", "we'll've it's"]:
        ids = vocabulary.encode(text)
        assert ids == library.encode(" " + text, add_special_tokens=False).ids
        assert vocabulary.decode(ids) == " " + text == library.decode(ids)
    assert library.token_to_id("<|2.00|>") == vocabulary.size - 1 == vocabulary.tokens.timestamp(2.0)
    assert Vocabulary.read(tmp_path).encode(texts[1]) == vocabulary.encode(texts[1])


def test_merge_dropout_gives_other_pieces_of_the_same_word():
    vocabulary = Vocabulary.learn(["reservation reservation"] * 3, merges=30, window_seconds=2.0)
    source = random.Random(0)
    encodings = {tuple(vocabulary.encode("reservation", 0.4, source)) for _ in range(20)}
    assert len(encodings) > 3
    assert {vocabulary.decode(ids) for ids in encodings} == {" reservation"}


def test_windows_agree_with_their_labels():
    recordings = beeps(12)
    vocabulary = Vocabulary.learn(recordings.texts, 16, 4.0)
    options = WindowOptions(share_as_recorded=1.0, share_with_times=1.0, share_after_earlier=0.5, share_of_silence=0.2)
    maker = WindowMaker(recordings, vocabulary, options)
    batch = maker.make(WindowShape(4.0, 40, 3, 48), seed=1)
    ids, kinds = vocabulary.tokens, set()
    for row in range(40):
        labels, tokens, samples = batch["labels"][row].tolist(), batch["tokens"][row].tolist(), batch["samples"][row]
        begin = tokens.index(ids.startoftranscript)
        assert set(labels[:begin]) <= {IGNORED}
        written = [label for label in labels if label != IGNORED]
        assert written[-1] == ids.endoftext
        assert tokens[begin + 1 : begin + len(written)] == written[:-1]
        if written == [ids.nospeech, ids.endoftext]:
            assert not samples.any()
            kinds.add("silence")
            continue
        times = [ids.seconds(token) for token in written if ids.is_timestamp(token)]
        assert times == sorted(times) and len(times) % 2 == 0
        kinds |= {"earlier"} if begin else set()
        kinds |= {"joined"} if len(times) > 2 else set()
        spoken = samples.abs().view(-1, 160).amax(-1) > 0.02
        inside = torch.zeros(400, dtype=torch.bool)
        for first, last in zip(times[::2], times[1::2], strict=True):
            inside[round(first * 100) : round(last * 100) + 1] = True
        assert not (spoken & ~inside).any() and spoken[inside].float().mean() > 0.6
        pieces = batch["pieces"][row, : batch["piece_counts"][row]].tolist()
        assert pieces == [token for token in written if token < ids.endoftext]
    assert kinds == {"silence", "earlier", "joined"}
    assert all(torch.equal(batch[name], tensor) for name, tensor in maker.make(WindowShape(4.0, 40, 3, 48), 1).items())


def test_a_recording_read_faster_is_shorter_and_higher():
    recordings = beeps(1)
    vocabulary = Vocabulary.learn(recordings.texts, 4, 4.0)
    options = WindowOptions(rates=(1.25, 1.25), share_as_recorded=0.0, max_gap=0.0, share_of_silence=0.0)
    samples = WindowMaker(recordings, vocabulary, options).make(WindowShape(2.0, 1, 1, 48), 0)["samples"][0]
    original = recordings.samples.float() / 32768
    assert int(samples.nonzero().max()) == pytest.approx(len(original) / 1.25, abs=30)

    def peak(sound):
        return torch.fft.rfft(sound, n=32000).abs().argmax().item() / 2

    assert peak(samples) == pytest.approx(1.25 * peak(original), rel=0.02)


def test_mels_of_a_batch_are_those_of_each_window_alone():
    samples = torch.randn(5, 32000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, -1, 5)[:, None]
    augmentation = AudioAugmentation(80, "cpu", strength=0.0)
    mel = WhisperMel(80)
    batch_mel = mel(samples)
    assert (batch_mel - torch.cat([mel(row[None]) for row in samples])).abs().max() < 1e-5
    assert augmentation(samples, 3).shape == batch_mel.shape == (5, 80, 200)


def test_augmentation_is_deterministic_and_finite_for_silence():
    augmentation = AudioAugmentation(80, "cpu", strength=1.0)
    samples = torch.cat([torch.zeros(2, 16000), torch.randn(2, 16000)])
    first = augmentation(samples, 5)
    assert torch.equal(first, augmentation(samples, 5)) and not torch.equal(first, augmentation(samples, 6))
    assert torch.isfinite(first).all()


def test_word_errors_are_counted():
    evaluated = score_texts(["A table for two!", "seven 30", "no"], ["a table for three", "seven thirty", "not at all"])
    assert (evaluated.word_errors, evaluated.words, evaluated.right_sentences) == (4, 9, 1)


def test_the_command_trains_evaluates_and_writes_everything(tmp_path):
    for name, count, seed in (("train", 40, 0), ("held_out", 6, 1)):
        sounds = beeps(count, seed)
        pieces = [
            (sounds.samples[start : start + length].numpy(), text, "beep")
            for start, length, text in zip(sounds.starts, sounds.lengths, sounds.texts, strict=True)
        ]
        Corpus.of(pieces).save(tmp_path / name)
    out = tmp_path / "out"
    train_main(["--corpus", str(tmp_path), "--out", str(out), "--tiny", "--device", "cpu"])
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["steps"] == TINY.steps
    assert set(metrics["judged"]) == {
        f"{voices}, {condition}" for voices in ("known voices", "held-out voices") for condition, _, _ in CONDITIONS
    }
    names = ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "preprocessor_config.json")
    assert all((out / name).is_file() for name in (*names, "course/log.jsonl", "course/curves.png"))


def test_a_trained_model_is_fine_tuned_on_several_corpora_without_ctc(trained, tmp_path):
    _, folder = trained
    for name, seed in (("one", 0), ("two", 1)):
        sounds = beeps(12, seed)
        pieces = [(sounds.samples[s : s + n].numpy(), t, "beep") for s, n, t in zip(*_parts(sounds), strict=True)]
        Corpus.of(pieces).save(tmp_path / name)
    out, corpora = tmp_path / "out", [str(tmp_path / name) for name in ("one", "two")]
    options = ["--out", str(out), "--tiny", "--device", "cpu", "--fine-tune", "--rate", "1e-6", "--bits", "7"]
    train_main(["--corpus", *corpora, "--init", str(folder), *options])
    assert json.loads((out / "metrics.json").read_text())["recordings"] > 12
    assert "ctc" not in json.loads((out / "course" / "log.jsonl").read_text().splitlines()[-1])
    assert not (out / "pieces").exists()
    earlier, later = Whisper.load(folder).state_dict(), Whisper.load(out).state_dict()
    assert all((later[name] - earlier[name]).abs().max() < 1e-3 for name in earlier)
    with pytest.raises(InputError, match="--init"):
        train_main(["--corpus", *corpora, *options])


def _parts(recordings):
    return recordings.starts.tolist(), recordings.lengths.tolist(), recordings.texts


def test_the_encoder_is_initialised_from_a_speech_encoder():
    torch.manual_seed(0)
    sizes = {"d_model": 48, "encoder_attention_heads": 2, "encoder_ffn_dim": 96, "num_mel_bins": 80}
    encoder = new_encoder(SpeechEncoderConfig(**sizes, quantize_position=2, quantize_vocab_size=16), Lattice((4, 4)))
    model = Whisper(RECIPE.config)
    init_from_speech_encoder(model, encoder)
    torch.testing.assert_close(model.encoder.layers[0].fc1.weight, encoder.layers[0].fc1.weight)
    mel = torch.randn(1, 80, 3)  # one position after the convolutions that sees no edge the other does not
    features = torch.nn.functional.gelu(encoder.conv1(mel))[..., 2]
    torch.testing.assert_close(torch.nn.functional.gelu(model.encoder.conv1(mel))[..., 1], features)
    with pytest.raises(InputError, match="other sizes"):
        init_from_speech_encoder(Whisper(TINY.config), encoder)


def test_a_larger_decoder_initialised_from_an_earlier_model_has_its_output(trained, tmp_path):
    training, folder = trained
    sizes = replace(RECIPE.config, decoder_layers=3, decoder_ffn_dim=2 * RECIPE.config.decoder_ffn_dim)
    larger = Training(beeps(8), tmp_path, replace(RECIPE, config=sizes), report=lambda line: None, initial=folder)
    assert larger.vocabulary.merges == training.vocabulary.merges
    mel, tokens = torch.randn(2, 80, 200), torch.randint(larger.vocabulary.size, (2, 9))
    with torch.no_grad():
        mine, theirs = larger.module.model.eval()(mel, tokens), Whisper.load(folder)(mel, tokens)
    assert torch.allclose(mine, theirs, atol=1e-5)
    pieces = training.module.pieces.weight
    assert torch.equal(larger.module.pieces.weight.half(), pieces.half()), "the CTC head too"


def test_layers_are_spread_among_more_of_them():
    assert [spread_layers(4, 4), spread_layers(4, 8), spread_layers(2, 3)] == [[0, 1, 2, 3], [1, 3, 5, 7], [1, 2]]


def test_rounded_weights_have_straight_through_gradients(trained):
    training, _ = trained
    module = training.module
    name = "model.decoder.layers.0.fc1.weight"
    rounding = Rounding(module, bits=5)
    weights = rounding(torch.tensor(1.0))
    weight = module.get_parameter(name)
    assert torch.equal(rounding(torch.tensor(0.0))[name], weight)
    assert torch.allclose(weights[name], rounded(weight, 5)) and not torch.equal(weights[name], weight)
    (gradient,) = torch.autograd.grad(weights[name].sum(), [weight])
    assert torch.equal(gradient, torch.ones_like(weight))


def test_a_saved_model_is_evaluated_on_a_corpus(trained, tmp_path, capsys):
    sounds = beeps(4, seed=2)
    Corpus.of([(sounds.samples[: sounds.lengths[0]].numpy(), sounds.texts[0], "beep")]).save(tmp_path / "one")
    main(["--model", str(trained[1]), "--corpus", str(tmp_path / "one")])
    assert capsys.readouterr().out.count("WER") == len(CONDITIONS)


def test_the_recipe_fits_its_budget_of_parameters():
    vocabulary = Vocabulary.learn(["a b"], 0, 10.0)
    with torch.device("meta"):
        model = Whisper(replace(ASRRecipe().config, vocab_size=vocabulary.size + 256))
    assert 5e6 < sum(parameter.numel() for parameter in model.parameters()) < 11e6


@pytest.mark.gpu
def test_steps_are_captured_as_graphs_on_a_gpu(tmp_path):
    training = Training(beeps(64), tmp_path, replace(RECIPE, augmentation=1.0, steps=60), device="cuda", report=print)
    training.run()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log[-1]["text"] < log[0]["text"] and len(training.learner._graphs) == len(RECIPE.shapes)
    training.save(tmp_path)
    assert len(transcribe_all(training.module.model, training.vocabulary, beeps(3).to("cuda"))) == 3
