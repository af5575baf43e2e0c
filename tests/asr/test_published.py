"""Published recognisers in this package write what their publishers' programs write, and understand people."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vivavoce import hub
from vivavoce.asr.backends import MoonshineBackend, load_backend
from vivavoce.asr.backends.ctranslate2 import load_converted
from vivavoce.bench.asr import LabelledRecording, spoken_sentences
from vivavoce.bench.recognisers import characters
from vivavoce.errors import InputError
from vivavoce.evaluation.scoring import error_rate
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.models.whisper.config import WhisperTokens
from vivavoce.models.whisper.files import open_whisper
from vivavoce.models.whisper.steps import TranscriptionOptions
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.models.whisper.vocabulary import MULTILINGUAL_RANKS, tokenizer_of_ranks
from vivavoce.train.front_desk.answers import normalise

DATA = Path(__file__).parents[1] / "data"
GREEDY = TranscriptionOptions("en", timestamps=False, temperatures=(0.0,))
SIMPLIFIED = "以下是普通话的句子。"  # Whisper goes on in the script of its prompt

pytestmark = [pytest.mark.published, pytest.mark.full]


@pytest.fixture(scope="module")
def english() -> list[LabelledRecording]:
    return spoken_sentences(DATA / "english")


def texts_of(backend, spoken: list[LabelledRecording], options: TranscriptionOptions) -> list[str]:
    return ["".join(s.text for s in backend.segments(one.samples, options)).strip() for one in spoken]


def word_error_rate(texts: list[str], spoken: list[LabelledRecording]) -> float:
    return error_rate([normalise(one.text).split() for one in spoken], [normalise(text).split() for text in texts])


def transformers_texts(folder: Path, ours: WhisperTranscriber, spoken: list[LabelledRecording]) -> list[str]:
    """Greedy texts of transformers with the weights of a folder."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config, checkpoint = open_whisper(folder)
    with checkpoint:
        weights = {f"model.{name}": checkpoint.tensor(name).float() for name in checkpoint.names()}
    tokens = ours.tokens
    sizes = {name: getattr(config, name) for name in config.__dataclass_fields__}
    special = {"decoder_start_token_id": tokens.startoftranscript, "eos_token_id": tokens.endoftext}
    theirs = WhisperForConditionalGeneration(WhisperConfig(**sizes, **special, pad_token_id=tokens.endoftext)).eval()
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert set(missing) <= {"proj_out.weight"} and not unexpected
    theirs.tie_weights()
    never = [*ours.settings.suppressed, *range(tokens.timestamps, config.vocab_size)]
    texts = []
    for one in spoken:
        mel = ours.window(ours.log_mel(one.samples), 0, "full").float()
        with torch.inference_mode():
            encoded = theirs.model.encoder(mel[None] if mel.ndim == 2 else mel)
            ids = tokens.prompt("en")
            begin = len(ids)
            while len(ids) < 200 and (len(ids) == begin or ids[-1] != tokens.endoftext):
                logits = theirs(encoder_outputs=encoded, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
                logits[never] = -torch.inf
                if len(ids) == begin:
                    logits[list(ours.settings.suppressed_at_start)] = -torch.inf
                ids.append(int(logits.argmax()))
        texts.append(ours.tokenizer.decode([id_ for id_ in ids[begin:] if id_ < tokens.endoftext]).strip())
    return texts


def test_tiny_en_writes_what_transformers_writes(published_model, english):
    folder = published_model("whisper-tiny.en")
    assert not (folder / "tokenizer.json").exists()
    backend = load_backend(folder, "ours", "cpu", "float32")
    texts = texts_of(backend, english, GREEDY)
    assert texts == transformers_texts(folder, backend.transcriber, english)
    assert word_error_rate(texts, english) <= 0.05


def test_tiny_en_has_word_times_and_no_symbols(published_model, english):
    backend = load_backend(published_model("whisper-tiny.en"), "ours", "cpu", "float32")
    longest = max(english, key=lambda one: one.seconds)
    segments = list(backend.segments(longest.samples, replace(GREEDY, word_times=True)))
    words = [word for segment in segments for word in segment.words]
    assert normalise("".join(word.text for word in words)) == normalise("".join(s.text for s in segments))
    starts = [word.start for word in words]
    assert starts == sorted(starts) and words[-1].end <= longest.seconds + 0.5


def test_base_writes_the_words_of_ctranslate2(published_model, english):
    pytest.importorskip("faster_whisper")
    folder = published_model("whisper-base")
    ours, theirs = load_backend(folder, "ours", "cpu", "float32"), load_converted(folder, "cpu", "float32")
    written = texts_of(ours, english, GREEDY)
    assert [normalise(text) for text in written] == [normalise(text) for text in texts_of(theirs, english, GREEDY)]
    assert word_error_rate(written, english) <= 0.05

    mandarin = spoken_sentences(DATA / "mandarin")
    options = replace(GREEDY, language="zh", prompt=SIMPLIFIED)
    written = texts_of(ours, mandarin, options)
    assert list(map(characters, written)) == list(map(characters, texts_of(theirs, mandarin, options)))
    assert error_rate([one.text for one in mandarin], list(map(characters, written))) <= 0.12


def test_base_detects_the_language(published_model, english):
    backend = load_backend(published_model("whisper-base"), "ours", "cpu", "float32")
    assert backend.own_language(english[0].samples) == "en"
    assert backend.own_language(spoken_sentences(DATA / "mandarin")[0].samples) == "zh"


def test_the_ranks_make_the_published_tokenizer(published_model):
    ranks = published_model("whisper-vocabulary") / MULTILINGUAL_RANKS
    ours = tokenizer_of_ranks(ranks, WhisperTokens.of_vocabulary(51865))
    theirs = TextTokenizer.load(published_model("whisper-base"))
    for text in (
        " It's 2,345 o'clock…",
        " 今天天氣很好，我們去台北。 ♪♪ 😀",
        "<|en|> naïve  café\n\n x",
        "Привет 안녕",
    ):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_moonshine_understands_people(published_model, english):
    pytest.importorskip("onnxruntime")
    backend = load_backend(published_model("moonshine-base-en"))
    assert isinstance(backend, MoonshineBackend)
    assert word_error_rate(texts_of(backend, english, TranscriptionOptions()), english) <= 0.05
    joined = torch.cat([one.samples for one in english] * 3)
    segments = list(backend.segments(joined))
    assert len(segments) > 1 and max(s.end - s.start for s in segments) <= 30.0
    whole = LabelledRecording(joined, " ".join(one.text for one in english * 3))
    assert word_error_rate(["".join(s.text for s in segments)], [whole]) <= 0.1


def test_a_folder_of_openais_needs_only_its_weights(published_model, english, tmp_path):
    published_model("whisper-vocabulary")
    (tmp_path / "tiny.en.pt").symlink_to(published_model("whisper-tiny.en") / "tiny.en.pt")
    assert hub.resolve(str(tmp_path)) == tmp_path
    backend = load_backend(tmp_path, "ours", "cpu", "float32")
    assert normalise(texts_of(backend, english[:1], GREEDY)[0]) == normalise(english[0].text)


@pytest.mark.parametrize("backend", ["ours", "faster-whisper"])
def test_a_language_is_detected_among_those_that_are_named(published_model, english, backend):
    loaded = load_backend(published_model("whisper-base"), backend, "cpu", "float32")
    spoken = english[0].samples
    options = TranscriptionOptions(timestamps=False, temperatures=(0.0,))
    detected = {}
    for languages in ((), ("fr", "en"), ("zh", "ja"), ("de",)):
        segments = list(loaded.segments(spoken, replace(options, languages=languages)))
        detected[languages] = {segment.language for segment in segments}
    assert detected[()] == detected["fr", "en"] == {"en"} and detected["de",] == {"de"}
    assert len(detected["zh", "ja"]) == 1 and detected["zh", "ja"] < {"zh", "ja"}


def test_log_probabilities_sum_to_those_of_the_text(published_model, english):
    loaded = load_backend(published_model("whisper-base"), "ours", "cpu", "float32")
    (segment,) = loaded.segments(english[0].samples, replace(GREEDY, logprobs=True))
    assert b"".join(each.data for each in segment.logprobs).decode() == segment.text
    # The mean of a segment counts the end of its text too, which is all but certain.
    mean = sum(each.logprob for each in segment.logprobs) / (len(segment.logprobs) + 1)
    assert mean == pytest.approx(segment.average_logprob, abs=0.02)


def test_moonshine_refuses_what_it_cannot_follow(published_model, english):
    loaded = load_backend(published_model("moonshine-base-en"), "moonshine", "cpu")
    for options in ({"prompt": "Hotels."}, {"hotwords": ("curry",)}, {"logprobs": True}, {"languages": ("zh", "ja")}):
        with pytest.raises(InputError, match="Moonshine"):
            list(loaded.segments(english[0].samples, TranscriptionOptions(**options)))
    assert list(loaded.segments(english[0].samples, TranscriptionOptions(languages=("en", "fr"))))
