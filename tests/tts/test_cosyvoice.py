"""CosyVoice: streamed audio equals the plain computation, whatever the hops and the concurrent texts."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny_cosyvoice import write_folder
from vivavoce.audio.io import Sound
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation
from vivavoce.errors import InputError
from vivavoce.models.cosyvoice.lm import shorten_silence
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.tts.cosyvoice import PUBLISHED, RATE, CosyVoiceSettings, CosyVoiceTTS
from vivavoce.tts.cosyvoice_hops import UtteranceOptions
from vivavoce.tts.cosyvoice_inputs import References
from vivavoce.tts.interface import SpeakingStyle, VoiceStore
from vivavoce.tts.style import DirectedStyle

TEXT = "Hello world, my friend!"
WORDS = "hello world hello there"
LEFT = 2
SETTINGS = CosyVoiceSettings(left_chunks=LEFT, prompt_seconds=3.0)


def a_recording(seconds=4.0, rate=24_000, pitch=180):
    time = np.arange(int(seconds * rate)) / rate
    tone = 0.2 * np.sin(2 * np.pi * pitch * time) * (1 + np.sin(2 * np.pi * 3 * time))
    return Sound(tone.astype(np.float32), rate)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("cosyvoice")
    return {version: write_folder(root / str(version), version) for version in (2, 3)}


@pytest.fixture(scope="module")
def speakers(folders, tmp_path_factory):
    made = {}
    for version, folder in folders.items():
        voices = tmp_path_factory.mktemp("voices")
        made[version] = CosyVoiceTTS.load(str(folder), "cpu", "float32", voices, SETTINGS)
        made[version].add_voice("ann", a_recording(), "asked", WORDS)
        made[version].add_voice("bob", a_recording(5.0, 16_000, 110))
    return made


@pytest.fixture(scope="module")
def tts(speakers):
    return speakers[3]


def heard(pieces):
    return np.concatenate(list(pieces), axis=1)[0]


def assert_same_sound(ours, expected):
    """Equal but for rounding, which the vocoder's phase adds up."""
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() <= 2e-3
    assert np.linalg.norm(ours - expected) <= 1e-3 * np.linalg.norm(expected)


def drawn_codes(tts, rows, generation):
    """What the language model writes when it is alone, silences shortened as version 3 does."""
    engine = Engine(tts.parts.lm, pick("cpu"), torch.float32, EngineLimits(cache_rows=2048))
    codes = tts.parts.lm.spoken_codes(engine.complete(engine.open(rows), generation))
    return shorten_silence(codes)[0]


def plain_sound(tts, voice, codes, seed=0):
    """Codes of a whole reply at once: the flow under its chunk mask, the vocoder over all of its mel."""
    flow, vocoder = tts.parts.speech.flow, tts.parts.speech.vocoder
    prompt = tts.prepared_voices.shorten(tts.references.by_name(voice).prompt)
    mel = flow(torch.tensor(codes), prompt, streaming=True, left_chunks=LEFT)
    return vocoder(mel[None], seed)[0].numpy()


class TestSound:
    def test_a_stream_is_the_plain_computation(self, tts):
        reference = tts.references.by_name("ann").prompt.codes.tolist()
        ids = tts.prompt.text(TEXT)
        min_rows, max_rows = tts.parts.lm.length_limits(len(ids))
        generation = Generation(PUBLISHED, max_new_rows=max_rows, min_new_rows=min_rows, seed=5)
        rows = tts.prompt.rows(tts.prompt.zero_shot("hello world hello there.", reference), ids)
        codes = drawn_codes(tts, rows, generation)
        said = heard(tts.stream(TEXT, "ann", SpeakingStyle(seed=5)))
        assert said.shape == (len(codes) * 960,)
        assert_same_sound(said, plain_sound(tts, "ann", codes, seed=5))

    def test_it_does_not_depend_on_how_soon_it_is_played(self, tts):
        voice = tts.prepared_voices.get(tts.references.by_name("ann"))
        codes = torch.randint(6561, (130,), generator=torch.Generator().manual_seed(0)).tolist()
        ways = [
            list(tts.synthesizer.speech_codes(codes, UtteranceOptions(voice, lambda lead=lead: lead)))
            for lead in (0, 2.5, 9)
        ]
        hops = [[len(sound) / 960 for sound in sounds] for sounds in ways]
        assert [round(max(each)) for each in hops] == [25, 25, 50]  # codes: more with a long lead
        expected = plain_sound(tts, "ann", codes)
        for sounds in ways:
            assert_same_sound(torch.cat(sounds).numpy(), expected)

    def test_the_first_hop_has_fifteen_codes_in_any_voice(self, tts):
        held = tts.parts.speech.vocoder.delay_frames * 480 + 4
        firsts = []
        for _ in range(3):
            firsts.append(next(iter(tts.stream(TEXT, "ann", clock=None))))
            hops = [piece.shape[1] for piece in tts.convert(a_recording(12.0), "ann")]
            assert hops[0] == 15 * 960 - held
            assert 2 * RATE in hops  # they have grown, and the next request does not begin so
        assert [first.shape[1] for first in firsts] == [15 * 960 - held] * 3
        assert all(np.array_equal(first, firsts[0]) for first in firsts)

    def test_texts_said_together_are_those_said_alone(self, tts):
        texts = [TEXT, "Good morning.", "It is late, is it not?", "One, two, three."]
        voices = ["ann", "bob", "ann", "bob"]

        def said(number):
            return heard(tts.stream(texts[number], voices[number], SpeakingStyle(seed=number)))

        alone = [said(number) for number in range(4)]
        with ThreadPoolExecutor(4) as threads:
            together = threads.map(said, range(4))
        for ours, expected in zip(together, alone, strict=True):
            assert_same_sound(ours, expected)

    def test_closing_a_stream_early_frees_its_sequence(self, tts):
        engine = tts.synthesizer.engine
        free = engine.scheduler.pool.free
        with closing(tts.stream(TEXT, "ann")) as pieces:
            next(pieces)
            assert len(engine.scheduler.sequences) == 1
        tts.synthesizer.driver.call(lambda: None)
        assert not engine.scheduler.sequences
        assert engine.scheduler.pool.free == free

    @pytest.mark.parametrize("version", [2, 3])
    def test_both_versions_speak_and_go_on_from_a_short_first_hop(self, speakers, version):
        first, *rest = speakers[version].stream("Hello.", "ann")
        assert 0.4 * RATE <= first.shape[1] <= 15 * 960
        assert np.isfinite(heard([first, *rest])).all()

    @pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
    def test_it_speaks_in_less_precision(self, folders, tmp_path, dtype):
        tts = CosyVoiceTTS.load(str(folders[3]), "cpu", dtype, tmp_path, SETTINGS)
        tts.add_voice("ann", a_recording())
        sound = heard(tts.stream("Hello.", "ann"))
        assert len(sound) > 0
        assert np.isfinite(sound).all()

    def test_a_long_text_is_said_in_parts(self, tts):
        text = " ".join(f"This is sentence number {number}." for number in range(3))
        pieces = list(tts.stream(text, "ann", SpeakingStyle(pause=3.0)))
        assert [piece.shape[1] for piece in pieces if not piece.any()] == [3 * 0.24 * RATE]  # one cut


class TestStreamingText:
    def test_speech_begins_before_the_text_is_over_and_all_of_it_is_said(self, tts):
        given = []

        def pieces():
            for piece in ["Hello wor", "ld, how ", "are you ", "today, my ", "dear old ", "friend of ", "many years?"]:
                given.append(piece)
                yield piece

        stream = tts.stream(pieces(), "ann", SpeakingStyle(seed=3))
        next(stream)
        assert len(given) < 7
        rest = heard(stream)
        assert len(given) == 7
        assert len(rest) > 0

    def test_it_does_not_depend_on_where_the_text_is_cut(self, tts):
        whole = "Hello world, how are you today, my friend?"
        cuts = [[whole], [*whole], [whole[:7], whole[7:21], whole[21:]]]
        sounds = [heard(tts.stream(iter(pieces), "bob", SpeakingStyle(seed=1))) for pieces in cuts]
        for sound in sounds[1:]:
            assert_same_sound(sound, sounds[0])

    def test_a_text_that_waits_for_input_does_not_delay_others(self, tts):
        may_go_on = threading.Event()

        def halting():
            yield "Hello world, how are"
            may_go_on.wait()
            yield " you today, my friend?"

        with ThreadPoolExecutor(1) as thread:
            halted = thread.submit(lambda: heard(tts.stream(halting(), "bob", SpeakingStyle(seed=1))))
            beside = heard(tts.stream(TEXT, "ann", SpeakingStyle(seed=2)))
            may_go_on.set()
            whole = tts.stream(iter(["Hello world, how are you today, my friend?"]), "bob", SpeakingStyle(seed=1))
            assert_same_sound(halted.result(timeout=60), heard(whole))
        assert_same_sound(beside, heard(tts.stream(TEXT, "ann", SpeakingStyle(seed=2))))

    def test_no_text_is_refused(self, tts):
        with pytest.raises(InputError, match="no text to say"):
            list(tts.stream(iter([]), "ann"))
        tts.synthesizer.driver.call(lambda: None)
        assert not tts.synthesizer.engine.scheduler.sequences


class TestConversion:
    def test_a_recording_is_said_by_another_voice(self, tts):
        source = a_recording(3.0, pitch=90)
        codes = tts.parts.speech_tokenizer.codes(source).tolist()
        said = heard(tts.convert(source, "ann"))
        assert_same_sound(said, plain_sound(tts, "ann", codes))

    def test_a_long_recording_is_converted_in_windows(self, tts):
        assert len(heard(tts.convert(a_recording(31.0), "bob"))) == pytest.approx(31 * RATE, abs=RATE // 10)

    def test_conversion_takes_no_instructions(self, tts):
        with pytest.raises(InputError, match="keeps its speaking style"):
            tts.convert(a_recording(2.0), "ann", DirectedStyle(style="happy"))


class TestStyle:
    def test_speed_changes_the_length_alone(self, tts):
        usual, fast = (heard(tts.stream(TEXT, "ann", SpeakingStyle(speed=speed))) for speed in (1.0, 1.5))
        assert len(fast) == pytest.approx(len(usual) / 1.5, rel=0.02)

    def test_volume_is_louder_but_never_over_full_scale(self, tts):
        usual, soft, loud = (heard(tts.stream(TEXT, "ann", DirectedStyle(volume=volume))) for volume in (1.0, 0.5, 4.0))
        np.testing.assert_allclose(soft, 0.5 * usual, atol=1e-6)
        assert np.abs(loud).max() <= 1.0
        assert np.sqrt((loud**2).mean()) > np.sqrt((usual**2).mean())

    def test_an_instruction_goes_without_the_references_words(self, tts):
        reference = tts.references.by_name("ann")
        prefix = tts._prompt_prefix(reference, DirectedStyle(style="happy"))
        assert prefix == tts.prompt.instructed("请非常开心地说一句话。")
        assert not prefix.codes
        assert tts._prompt_prefix(reference, DirectedStyle()).codes
        assert tts._prompt_prefix(tts.references.by_name("bob"), DirectedStyle()) == tts.prompt.cross_lingual()

    def test_what_a_version_cannot_do_is_refused_by_name(self, speakers):
        with pytest.raises(InputError, match=r"CosyVoice 2 has no style 'happy'; it has cantonese"):
            speakers[2].stream(TEXT, "ann", DirectedStyle(style="happy"))
        with pytest.raises(InputError, match=r"CosyVoice 2 has no phonemes, so \[AA1\]"):
            speakers[2].stream("[AA1]", "ann")
        with pytest.raises(InputError, match=r"CosyVoice 3 has no event \[applause\]; it has \[breath\]"):
            speakers[3].stream("Bravo [applause]", "ann")
        with pytest.raises(InputError, match="style 'happy' or an instruction"):
            DirectedStyle(style="happy", instruction="Be quick.")
        with pytest.raises(InputError, match="volume must be"):
            DirectedStyle(volume=9.0)


class TestVoices:
    def test_what_was_derived_is_kept_and_used_again(self, folders, tmp_path):
        tts = CosyVoiceTTS.load(str(folders[3]), "cpu", "float32", tmp_path, SETTINGS)
        tts.add_voice("ann", a_recording(), "asked", WORDS)
        derived = tts.references.by_name("ann")
        assert tts.references.by_name("ann") is derived

        def deaf():
            raise AssertionError("the recording was heard again")

        again = References(tts.voices, deaf, "cosyvoice3").by_name("ann")
        assert (again.digest, again.transcript) == (derived.digest, "hello world hello there.")
        for name in ("codes", "mel", "speaker"):
            assert torch.equal(getattr(again.prompt, name), getattr(derived.prompt, name))
        first, second = (tts.references.from_recording(a_recording()) for _ in range(2))
        assert first.prompt is second.prompt

    @pytest.mark.parametrize("damage", [b"", b"\x00" * 40])
    def test_a_damaged_file_is_made_anew(self, folders, tmp_path, damage):
        tts = CosyVoiceTTS.load(str(folders[3]), "cpu", "float32", tmp_path, SETTINGS)
        tts.add_voice("ann", a_recording())
        file = tmp_path / "ann.cosyvoice3.safetensors"
        before = file.read_bytes()
        file.write_bytes(damage)
        tts.references.by_name("ann")
        assert file.read_bytes() == before

    def test_a_voice_replaced_is_derived_anew(self, folders, tmp_path):
        tts = CosyVoiceTTS.load(str(folders[3]), "cpu", "float32", tmp_path, SETTINGS)
        tts.add_voice("ann", a_recording())
        first = tts.references.by_name("ann")
        tts.add_voice("ann", a_recording(pitch=300))
        second = tts.references.by_name("ann")
        assert first.digest != second.digest
        assert not torch.equal(first.prompt.mel, second.prompt.mel)

    @pytest.mark.parametrize(("codes", "kept"), [(100, 85), (60, 60), (40, 35), (30, 30), (25, 25)])
    def test_a_voice_is_cut_for_a_short_first_hop_unless_it_is_short_itself(self, tts, codes, kept):
        prompt = VoicePrompt(torch.zeros(codes).long(), torch.zeros(2 * codes, 80), torch.ones(192))
        shorten = tts.prepared_voices.shorten(prompt)
        assert len(shorten.codes) == min(kept, 75 - 15)  # SETTINGS let the flow see three seconds
        assert len(shorten.mel) == 2 * len(shorten.codes)

    def test_the_voice_store_may_be_replaced(self, folders, tts, tmp_path):
        other = CosyVoiceTTS.load(str(folders[3]), "cpu", "float32", tmp_path, SETTINGS)
        other.voices = VoiceStore(None, tts.voices.folder)
        assert other.references.by_name("ann").digest == tts.references.by_name("ann").digest

    def test_a_voice_is_computed_once_and_shared(self, tts):
        reference = tts.references.by_name("ann")
        assert tts.prepared_voices.get(reference) is tts.prepared_voices.get(tts.references.by_name("ann"))

    def test_its_keys_and_values_are_kept_too_and_gone_with_it(self, folders, tmp_path):
        def said():
            tts = CosyVoiceTTS.load(str(folders[3]), "cpu", "float32", tmp_path, SETTINGS)
            if "ann" not in tts.voices:
                tts.add_voice("ann", a_recording(), "asked", WORDS)
            return tts, tts.say("Hello.", "ann").samples

        tts, first = said()
        file = tmp_path / "ann.cosyvoice3.ready.safetensors"
        whole = file.read_bytes()
        assert np.array_equal(said()[1], first)
        tensors = load_file(file)
        save_file(tensors | {"mel_windows": torch.zeros_like(tensors["mel_windows"])}, file)
        assert not np.array_equal(said()[1], first), "what was kept is used"
        for damage in (b"", whole[: len(whole) // 2]):
            file.write_bytes(damage)
            assert np.array_equal(said()[1], first)
            assert file.read_bytes() == whole
        half = CosyVoiceTTS.load(str(folders[3]), "cpu", "bfloat16", tmp_path, SETTINGS)
        half.say("Hello.", "ann")
        assert load_file(file)["mel_windows"].dtype == torch.bfloat16
        tts.voices.remove("ann")
        assert not list(tmp_path.iterdir())

    def test_the_shouted_transcript_is_brought_to_sentence_case(self, folders, tmp_path):
        tts = CosyVoiceTTS.load(str(folders[3]), "cpu", "float32", tmp_path, SETTINGS)
        assert tts.add_voice("ann", a_recording(), "", "HELLO  WORLD HELLO THERE").text == "Hello world hello there."


class TestBadInput:
    @pytest.mark.parametrize("text", ["", "  \n", "***", "…?!"])
    def test_a_text_with_nothing_to_say_is_refused(self, tts, text):
        with pytest.raises(InputError, match=r"nothing to say|no text"):
            list(tts.stream(text, "ann"))

    @pytest.mark.parametrize("text", ["Hi 🎉👍 you", "a\x00b\x07c\u200b d", "Hi 你好 привет مرحبا", "ħ"])
    def test_odd_texts_are_said(self, tts, text):
        with closing(tts.stream(text, "bob")) as pieces:
            assert next(pieces).shape[1] > 0

    def test_a_long_text_begins_at_once_and_one_too_long_is_refused(self, tts):
        with closing(tts.stream("Hello there. " * 7500, "bob")) as pieces:
            assert next(pieces).shape[1] > 0
        with pytest.raises(InputError, match="give at most 100000"):
            tts.stream("Hello there. " * 8000, "bob")

    def test_a_reference_that_is_none_is_refused(self, tts):
        with pytest.raises(InputError, match=r"31\.0 s; give 1 to 30"):
            tts.add_voice("long", a_recording(31.0))
        with pytest.raises(InputError, match=r"0\.5 s; give 1 to 30"):
            tts.stream(TEXT, a_recording(0.5))
        with pytest.raises(InputError, match="8000 Hz; give at least 16000"):
            tts.add_voice("phone", a_recording(2.0, 8_000))
        with pytest.raises(InputError, match="is silent"):
            tts.add_voice("mute", Sound(np.zeros(48_000, np.float32), 24_000))
        assert set(tts.voices.names()) == {"ann", "bob"}

    def test_a_wrong_transcript_is_refused_and_the_voice_not_kept(self, tts):
        with pytest.raises(InputError, match=r"4\.0 s, too short for the"):
            tts.add_voice("carl", a_recording(), "", "word after word " * 20)
        with pytest.raises(InputError, match=r"4\.0 s, too long for the"):
            tts.add_voice("carl", a_recording(), "", "no")
        assert "carl" not in tts.voices.names()

    def test_a_voice_that_is_not_there_is_refused(self, tts, folders, tmp_path):
        with pytest.raises(InputError, match="there is no voice 'zoe'; known: ann, bob"):
            tts.stream(TEXT, "zoe")
        bare = CosyVoiceTTS.load(str(folders[3]), "cpu", "float32", tmp_path / "none")
        with pytest.raises(InputError, match="no built-in voice; add one"):
            bare.stream(TEXT)

    def test_one_text_that_fails_does_not_stop_the_others(self, tts):
        synthesizer, voice = tts.synthesizer, tts.prepared_voices.get(tts.references.by_name("ann"))
        sound = tts.stream(TEXT, "ann", SpeakingStyle(seed=2))
        pieces = [next(sound)]
        with pytest.raises(InputError, match="codes go from"):
            list(synthesizer.speech_codes([1] * 20 + [9999] + [1] * 30, UtteranceOptions(voice, lambda: 0.0)))
        assert_same_sound(heard([*pieces, *sound]), heard(tts.stream(TEXT, "ann", SpeakingStyle(seed=2))))
