"""`viva train all`: the order of its steps, going on after a stop, and a whole run of tiny models."""

import asyncio
import json
import sys

import pytest

from tests.models.tiny_kokoro import tiny_kokoro, write_folder
from vivavoce.errors import InputError, VivaError
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.hub.languages import spoken_languages
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.train import recipe
from vivavoce.train.recipe import RecipeOptions, RecipeRun, RecipeStep, main, steps
from vivavoce.train.utterances import TRAINING_VOICES, Utterance, write_plan


@pytest.mark.parametrize("changes", [{}, {"kokoro": "K"}, {"kokoro": "K", "classic": False}, {"tiny": True}])
def test_every_step_comes_after_those_it_needs(tmp_path, changes):
    done = set()
    for step in steps(RecipeOptions(tmp_path, **changes)):
        assert set(step.needs) <= done, step
        done.add(step.name)
    assert {"encoder", "lm", "flow", "vocoder", "codec", "package"} <= done
    assert ("voices" in done) == ("kokoro" in changes) and ("classic" in done) == changes.get("classic", True)


def test_the_plan_of_another_machine_is_not_made_again(tmp_path):
    names = [step.name for step in steps(RecipeOptions(tmp_path, kokoro="K", plan=tmp_path / "plan.jsonl"))]
    assert "plan" not in names and names[0] == "voices"


@pytest.mark.parametrize("parts", [None, ["teacher", "voice"], ["teacher"]])
def test_the_flow_learns_more_sentences_of_the_reply_voice_if_they_are_planned(tmp_path, parts):
    plan = None
    if parts is not None:
        plan = tmp_path / "plan.jsonl"
        write_plan(plan, [Utterance(part, "en", "Yes.", "af_heart") for part in parts])
    named = {step.name: step for step in steps(RecipeOptions(tmp_path, kokoro="K", plan=plan))}
    more = str(tmp_path / "kokoro" / "voice")
    arguments = named["flow"].arguments
    assert arguments[1:3] == ("--corpus", str(tmp_path / "kokoro" / "teacher"))
    assert (arguments[3] == more) == (parts != ["teacher"])
    assert not any(more in step.arguments for name, step in named.items() if name != "flow")


def test_the_time_of_every_step_is_scaled(tmp_path):
    (lm,) = (step for step in steps(RecipeOptions(tmp_path, scale=0.5)) if step.name == "lm")
    assert lm.arguments[lm.arguments.index("--seconds") + 1] == str(recipe.SECONDS["lm"] / 2)


def _run(out, commands):
    """Run steps whose arguments are Python code."""
    lines, python = [], (sys.executable, "-c")
    asyncio.run(
        RecipeRun(out, [RecipeStep(name, (code,), needs) for name, code, needs in commands], lines.append, python)()
    )
    return lines


def test_what_is_done_is_not_run_again(tmp_path):
    file = tmp_path / "file"
    first = ("first", f"open({str(file)!r}, 'a').write('1')", ())
    failing = ("second", "import sys; print('a reason'); sys.exit(3)", ("first",))
    with pytest.raises(VivaError, match=r"second ended with 3.*\n.*a reason"):
        _run(tmp_path, [first, failing])
    working = ("second", f"open({str(file)!r}, 'a').write('2')", ("first",))
    lines = _run(tmp_path, [first, working])
    assert file.read_text() == "12" and lines[0] == "first: done before"
    assert json.loads((tmp_path / "done" / "second.json").read_text())["seconds"] >= 0
    with pytest.raises(InputError, match="other arguments"):
        _run(tmp_path, [("first", "pass", ())])


def test_a_folder_with_done_steps_needs_resume(tmp_path):
    (step, *_) = steps(RecipeOptions(tmp_path, tiny=True))
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / f"{step.name}.json").write_text(json.dumps({"arguments": step.arguments}))
    with pytest.raises(InputError, match="--resume"):
        main(["--out", str(tmp_path), "--tiny"])


@pytest.mark.full
@pytest.mark.debian
def test_a_tiny_run_makes_a_model_that_calls_tools(tmp_path):
    main(["--out", str(tmp_path), "--tiny", "--device", "cpu"])
    model = tmp_path / "mini-speech"
    assert MossSpeech.load(model).config.vocab_size > 300
    stored = json.loads((model / "generation_config.json").read_text())
    assert stored["tool_calls"] is True and stored["languages"] == ["en"]
    main(["--out", str(tmp_path / "on"), "--tiny", "--device", "cpu", "--init", str(model), "--keep-codec"])
    continued = tmp_path / "on" / "mini-speech"
    for file in (model / "codec").rglob("*.*"):
        assert (continued / file.relative_to(model)).read_bytes() == file.read_bytes(), "the codec is kept"
    assert (continued / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()


@pytest.mark.full
def test_a_tiny_run_in_kokoros_voices_and_both_languages(tmp_path):
    for phonemiser in ("hibari", "misaki", "pypinyin"):
        pytest.importorskip(phonemiser, reason="the plan needs phonemes of both languages")
    kokoro = write_folder(tiny_kokoro(), tmp_path / "kokoro-model")
    for code, voices in TRAINING_VOICES.items():
        for voice in (*voices, *HELD_OUT_VOICES[code]):
            (kokoro / "voices" / f"{voice}.bin").write_bytes((kokoro / "voices" / "af_bella.bin").read_bytes())
    command = ["--out", str(tmp_path / "work"), "--kokoro", str(kokoro), "--without-synthesizers", "--tiny"]
    command += ["--languages", "en", "zh"]
    main([*command, "--device", "cpu"])
    metrics = json.loads((tmp_path / "work" / "lm" / "metrics.json").read_text())
    assert {"en", "zh"} == set(metrics["speech_speech"]["by_language"])
    assert spoken_languages(str(tmp_path / "work" / "mini-speech")) == ("en", "zh")
    codec = tmp_path / "work" / "mini-speech" / "codec"
    assert [file.stem for file in (codec / "voices").iterdir()] == ["af_heart"]
    main([*command, "--device", "cpu", "--resume"])


def _option(step, name):
    return step.arguments[step.arguments.index(name) + 1] if name in step.arguments else None


def test_beginnings_of_encoder_and_reply_voice_take_the_place_of_an_earlier_models(tmp_path):
    def parts(**changes):
        named = {step.name: step for step in steps(RecipeOptions(tmp_path, kokoro="K", init=tmp_path / "m", **changes))}
        return named["encoder"], named["flow"], named.get("vocoder1", named["vocoder"])

    encoder, flow, vocoder = parts()
    assert _option(encoder, "--init") == str(tmp_path / "m/codec") and _option(encoder, "--begin") is None
    assert _option(flow, "--init") == _option(vocoder, "--init") == str(tmp_path / "m/codec/flow")
    assert "--new-voice" in vocoder.arguments, "the earlier model has the synthesizer's voice"
    encoder, flow, vocoder = parts(begin=tmp_path / "whisper", reply_voice=tmp_path / "voice")
    assert _option(encoder, "--begin") == str(tmp_path / "whisper") and _option(encoder, "--init") is None
    assert _option(flow, "--init") == _option(vocoder, "--init") == str(tmp_path / "voice")
    assert vocoder.name == "vocoder" and "--new-voice" not in vocoder.arguments, "it knows the recordings already"
    assert "vocoder1" not in vocoder.needs


def test_a_trained_speech_encoder_is_taken_as_it_is(tmp_path):
    found = steps(RecipeOptions(tmp_path, kokoro="K", plan=tmp_path / "plan", speech_encoder=tmp_path / "trained"))
    named = {step.name: step for step in found}
    assert "encoder" not in named and "classic" not in named, "the synthesizers' own corpora were for the encoder"
    for name in ("data", "flow", "vocoder", "codec"):
        assert _option(named[name], "--speech-encoder") == str(tmp_path / "trained"), name
    before: set[str] = set()
    for step in found:
        assert before.issuperset(step.needs), f"{step.name} comes after what it needs"
        before.add(step.name)
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--speech-encoder", "trained", "--begin", "whisper"])


def test_an_encoder_learns_another_language_and_texts_are_kept(tmp_path):
    options = RecipeOptions(
        tmp_path, kokoro="K", continued_encoder=tmp_path / "e", text_from=tmp_path / "m", languages=("en", "zh")
    )
    named = {step.name: step for step in steps(options)}
    assert _option(named["encoder"], "--init") == str(tmp_path / "e")
    assert str(tmp_path / "kokoro/callers") in named["encoder"].arguments
    assert _option(named["lm"], "--init") == str(tmp_path / "m")
    assert {"--new-vocabulary", "--new-codes", "text_entries=2048"} <= set(named["lm"].arguments)
    one = {step.name: step for step in steps(RecipeOptions(tmp_path, kokoro="K"))}
    assert int(_option(named["data"], "--spoken")) > int(_option(one["data"], "--spoken"))
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--speech-encoder", "trained", "--continued-encoder", "e"])


def test_with_the_codec_kept_only_the_language_model_is_trained(tmp_path):
    found = steps(RecipeOptions(tmp_path, init=tmp_path / "earlier", keep_codec=True))
    assert [step.name for step in found] == ["callers", "data", "lm", "package"]
    _, data, lm, package = found
    assert _option(data, "--speech-encoder") == _option(package, "--codec") == str(tmp_path / "earlier/codec")
    assert _option(lm, "--init") == str(tmp_path / "earlier") and "--new-vocabulary" in lm.arguments
    with_kokoro = steps(RecipeOptions(tmp_path, init=tmp_path / "earlier", keep_codec=True, kokoro="K"))
    named = {step.name: step for step in with_kokoro}
    assert _option(named["plan"], "--beginning-with") == "lm"
    for name in ("callers", "data"):
        assert _option(named[name], "--replies-by") == "synthesizers", "the codec speaks in their voice"
    assert {"voices", "callers"} <= set(named["data"].needs)
    for refused in (["--keep-codec"], ["--keep-codec", "--init", "m", "--kokoro", "K", "--languages", "en", "zh"]):
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path), *refused])
