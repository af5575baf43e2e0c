"""All steps of mini-speech in one command, in the order in which they need each other.

    viva train all --out work                                   # synthesizers' voices
    viva train all --kokoro KOKORO --plan PLAN --out work       # callers of both, replies in Kokoro's af_heart
    viva train all --resume --out work …                        # goes on after a stop

Every step is a process with its own log in `work/logs`; steps that do not need each other run side by side. A step that
is done leaves a file in `work/done` and is not run again with `--resume`; one that was stopped goes on from its folder.
The plan of `viva train plan --dialogues` needs a phonemiser, so it may be made on another machine; without `--plan` it
is made here. The result is in `work/mini-speech`.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vivavoce.cores import usable_cores
from vivavoce.errors import InputError, VivaError
from vivavoce.train.front_desk import LANGUAGES
from vivavoce.train.lm.dialogue_plan import DialoguePlan
from vivavoce.train.reply_voice import KOKORO
from vivavoce.train.utterances import REPLY_VOICES, read_plan

DIALOGUES = DialoguePlan(spoken=14_000, general=4_000, slot_questions=3_000, tools=5_000, edition=2, versions=3)
DIALOGUES_OF_TWO = replace(DIALOGUES, spoken=22_000, slot_questions=5_000, tools=10_000)  # languages
SECONDS = {"voices": 370, "encoder": 700, "vocoder1": 300, "flow": 360, "lm": 880, "vocoder": 420}
CLASSIC_SCALE = 0.4  # of the synthesizers' corpora beside Kokoro's
TEXT_ENTRIES = 1_024  # of the language model's tokenizer, for each language
TINY_SCALE, TINY_PLAN_SCALE, TINY_SECONDS = 0.004, 0.0015, 20.0
LOG_LINES = 20
COMMAND = (sys.executable, "-m", "vivavoce.cli", "train")
Report = Callable[[str], None]


@dataclass(frozen=True)
class RecipeStep:
    """A command of `viva train`, and the steps that have to be done before it."""

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecipeOptions:
    """What the steps depend on."""

    out: Path
    kokoro: str | None = None
    plan: Path | None = None
    synthesizers: Path | None = None
    classic: bool = True
    """Whether the synthesizers speak, too."""
    scale: float = 1.0
    device: str | None = None
    seed: int = 0
    languages: tuple[str, ...] = ("en",)
    """Of callers and replies; those other than English need `kokoro`."""
    init: Path | None = None
    """An earlier speech-to-speech model, whose speech encoder, flow and vocoder are the beginning of the new ones."""
    keep_codec: bool = False
    """Whether those of `init` are kept, and only its language model is trained on, with a new vocabulary."""
    begin: Path | None = None
    """What the speech encoder begins with in its place, written by `viva train causal-whisper`."""
    continued_encoder: Path | None = None
    """A trained speech encoder, which is trained on, for example in another language."""
    speech_encoder: Path | None = None
    """A trained speech encoder, which is taken as it is."""
    text_from: Path | None = None
    """An earlier language model, which keeps what it knows of texts, and learns the codes anew."""
    reply_voice: Path | None = None
    """Flow and vocoder in the reply voice, which are continued in place of those of `init`."""
    tiny: bool = False

    @property
    def beginning(self) -> str:
        """The first part of the model that is trained."""
        return "lm" if self.keep_codec else "encoder" if self.speech_encoder is None else "flow"


def steps(options: RecipeOptions) -> list[RecipeStep]:
    """The steps, each after those it needs."""
    model_steps = _language_model_steps if options.keep_codec else _model_steps
    return _voice_steps(options) + model_steps(options)


def _voice_steps(options: RecipeOptions) -> list[RecipeStep]:
    out = options.out
    programs = [] if options.synthesizers is None else ["--synthesizers", options.synthesizers]
    scale = TINY_SCALE if options.tiny else CLASSIC_SCALE if options.kokoro else 1.0
    seed = ["--seed", options.seed]
    found: list[RecipeStep] = []
    if options.kokoro is not None:
        plan = _plan_file(options)
        if options.plan is None:
            part = TINY_PLAN_SCALE if options.tiny else 1.0
            arguments = ["plan", "--dialogues", "--kokoro", options.kokoro, "--scale", part, "--out", plan]
            arguments += ["--beginning-with", options.beginning]
            found.append(_step("plan", [*arguments, *_dialogues(options)]))
        spoken = ["corpora", "--kokoro", options.kokoro, "--plan", plan, "--batched", "--out", out / "kokoro"]
        limit = [] if options.tiny else _seconds(options, "voices")
        found.append(_step("voices", [*spoken, *limit, *_device(options)], *(step.name for step in found)))
    if not options.classic:
        return found
    needs = []
    if _needs_classic(options):
        found.append(_step("classic", ["corpora", "--out", out / "classic", "--scale", scale, *programs, *seed]))
        needs.append("classic")  # both use all cores
    callers = ["lm-data", "--corpus", out / "speech", *programs, *_kokoro(options), *_replies(options)]
    callers += _dialogues(options)
    return [*found, _step("callers", callers, *needs)]


def _language_model_steps(options: RecipeOptions) -> list[RecipeStep]:
    """The language model of an earlier model goes on, on codes of the codec that it has."""
    assert options.init is not None
    out, codec = options.out, options.init / "codec"
    voices = (*(("voices",) if options.kokoro is not None else ()), "callers")
    data = ["lm-data", "--corpus", out / "speech", *_kokoro(options), *_replies(options), "--speech-encoder", codec]
    data += ["--out", out / "data", *_device(options), *_dialogues(options)]
    learn = _trained(options, "lm", "lm", "--data", out / "data", "--init", options.init, "--new-vocabulary")
    package = ["package", "--lm", out / "lm", "--codec", codec, "--out", out / "mini-speech"]
    return [_step("data", data, *voices), _step("lm", learn, "data"), _step("package", package, "lm")]


def _plan_file(options: RecipeOptions) -> Path:
    """What Kokoro speaks: the plan that is given, or the one that is made here."""
    return options.plan or options.out / "plan.jsonl.xz"


def _has_more_of_the_reply_voice(options: RecipeOptions) -> bool:
    """Whether the plan has sentences for the flow alone; plans of earlier versions have none."""
    if options.kokoro is None:
        return False
    plan = _plan_file(options)
    return not plan.is_file() or any(each.part == "voice" for each in read_plan(plan))


def _needs_classic(options: RecipeOptions) -> bool:
    """Whether the synthesizers' own corpora are used: by the speech encoder, and as replies where Kokoro has none."""
    return options.classic and (
        options.beginning == "encoder" or (options.beginning == "flow" and options.kokoro is None)
    )


def _model_steps(options: RecipeOptions) -> list[RecipeStep]:
    out, by_kokoro = options.out, options.kokoro is not None
    has_classic = _needs_classic(options)
    voices = (*(("voices",) if by_kokoro else ()), *(("classic",) if has_classic else ()))
    teacher = out / ("kokoro" if by_kokoro else "classic") / "teacher"
    more = [out / "kokoro" / "voice"] if _has_more_of_the_reply_voice(options) else []
    from_kokoro = [out / "kokoro" / part for part in ("mixed", "teacher", "callers")] if by_kokoro else []
    folders = [out / name for name, has in (("kokoro", by_kokoro), ("classic", has_classic)) if has]
    mixed = [*from_kokoro, *([out / "classic" / "mixed"] if has_classic else [])]
    reply_voices = [f"{KOKORO}{REPLY_VOICES[code]}" for code in options.languages] if by_kokoro else []
    encoder = ["--speech-encoder", options.speech_encoder or out / "encoder"]
    held_out = [folder / "held_out" for folder in folders]
    speech = ["--corpus", out / "speech"] if options.classic else []

    trained = partial(_trained, options)
    first, first_flow, first_vocoder = _beginnings(options)
    first += ["--reply-voice", *reply_voices] if reply_voices else []
    vocabulary = (
        [] if len(options.languages) == 1 else ["--set", f"text_entries={TEXT_ENTRIES * len(options.languages)}"]
    )
    earlier_lm: list[object] = []
    if options.text_from is not None:
        earlier_lm = ["--init", options.text_from, "--new-vocabulary", "--new-codes"]
    learn = trained("encoder", "speech-encoder", "--corpus", *mixed, "--held-out", *held_out, *first)
    data = ["lm-data", *speech, *_kokoro(options), *encoder, "--out", out / "data", *_device(options)]
    parts = [*encoder, "--flow", out / "flow", "--vocoder", out / "vocoder"]
    encoders = [] if options.speech_encoder is not None else [_step("encoder", learn, *voices)]
    encoded = tuple(step.name for step in encoders) or voices
    earlier, vocoders = options.reply_voice, []
    if earlier is None:  # a vocoder learns the recordings' mels first, then those of the flow
        earlier, replies = out / "vocoder1", "voices" if by_kokoro else "classic"
        vocoder = trained("vocoder1", "vocoder", "--corpus", teacher, *first_vocoder)
        vocoders.append(_step("vocoder1", vocoder, replies))
    again = ["vocoder", "--corpus", teacher, "--init", earlier, *encoder, "--flow", out / "flow"]
    return [
        *encoders,
        *vocoders,
        _step("data", [*data, *_dialogues(options)], *encoded, *(("callers",) if options.classic else ())),
        _step("flow", trained("flow", "flow", "--corpus", teacher, *more, *encoder, *first_flow), *encoded),
        _step("lm", trained("lm", "lm", "--data", out / "data", *vocabulary, *earlier_lm), "data"),
        _step("vocoder", trained("vocoder", *again), "flow", *(step.name for step in vocoders)),
        _step("codec", ["assemble", *parts, "--corpus", teacher, "--out", out / "codec"], "vocoder"),
        _step(
            "package",
            ["package", "--lm", out / "lm", "--codec", out / "codec", "--out", out / "mini-speech"],
            *("lm", "codec"),
        ),
    ]


def _beginnings(options: RecipeOptions) -> tuple[list[object], list[object], list[object]]:
    """What speech encoder, flow and first vocoder begin with, as options of their commands."""
    codec = None if options.init is None else options.init / "codec"
    encoder: list[object] = [] if codec is None else ["--init", codec]
    if options.begin is not None:
        encoder = ["--begin", options.begin]
    if options.continued_encoder is not None:
        encoder = ["--init", options.continued_encoder]
    if options.reply_voice is not None:
        return encoder, ["--init", options.reply_voice], []
    flow: list[object] = [] if codec is None else ["--init", codec / "flow"]
    return encoder, flow, [*flow, *(["--new-voice"] if codec is not None and options.kokoro is not None else [])]


def _step(name: str, arguments: Sequence[object], *needs: str) -> RecipeStep:
    return RecipeStep(name, tuple(map(str, arguments)), needs)


def _trained(options: RecipeOptions, name: str, *arguments: object) -> list[object]:
    """The arguments of a step that trains: its time, device and seed, and where the result goes."""
    seconds = ["--seconds", TINY_SECONDS] if options.tiny else _seconds(options, name)
    tiny = ["--tiny"] if options.tiny else []
    return [*arguments, "--out", options.out / name, *seconds, *_device(options), *tiny, "--seed", options.seed]


def _seconds(options: RecipeOptions, name: str) -> list[object]:
    return ["--seconds", round(options.scale * SECONDS[name], 1)]


def _device(options: RecipeOptions) -> list[object]:
    return [] if options.device is None else ["--device", options.device]


def _kokoro(options: RecipeOptions) -> list[object]:
    return ["--kokoro", options.out / "kokoro"] if options.kokoro is not None else []


def _replies(options: RecipeOptions) -> list[object]:
    """The bundled codec has a voice of the synthesizers."""
    return ["--replies-by", "synthesizers"] if options.keep_codec else []


def _dialogues(options: RecipeOptions) -> list[object]:
    spoken = ["--languages", *options.languages, "--seed", options.seed]
    if options.tiny:
        return ["--tiny", "--tools", 6, "--edition", DIALOGUES.edition, *spoken]
    names = ("spoken", "general", "slot_questions", "tools", "edition", "versions")
    plan = DIALOGUES if len(options.languages) == 1 else DIALOGUES_OF_TWO
    numbers = [word for name in names for word in (f"--{name.replace('_', '-')}", getattr(plan, name))]
    return [*numbers, *spoken]


class RecipeRun:
    """Runs steps as processes; what is done is noted in a folder."""

    def __init__(
        self, out: Path, steps: Sequence[RecipeStep], report: Report, command: Sequence[str] = COMMAND
    ) -> None:
        """`command`: the words before the arguments of a step."""
        self.steps, self.report, self.command = {step.name: step for step in steps}, report, command
        self.done_folder, self.logs = out / "done", out / "logs"
        for folder in (self.done_folder, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        self._processes: list[asyncio.subprocess.Process] = []

    def done(self) -> set[str]:
        """The names of the steps that are done. InputError where one was done with other arguments."""
        names = set()
        for name, step in self.steps.items():
            marker = self.done_folder / f"{name}.json"
            if marker.is_file():
                if json.loads(marker.read_text(encoding="utf8"))["arguments"] != list(step.arguments):
                    raise InputError(f"step {name} was done with other arguments; remove {marker} to do it again")
                names.add(name)
        return names

    async def __call__(self) -> None:
        """Run what is not done yet; the first step that fails ends the others."""
        done = self.done()
        for name in done:
            self.report(f"{name}: done before")
        running: dict[asyncio.Task[None], str] = {}
        try:
            while len(done) < len(self.steps):
                for name, step in self.steps.items():
                    if name not in done and name not in running.values() and done.issuperset(step.needs):
                        running[asyncio.get_running_loop().create_task(self._run(step))] = name
                finished, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    done.add(running.pop(task))
                    task.result()
        finally:
            for process in self._processes:
                if process.returncode is None:
                    process.terminate()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, step: RecipeStep) -> None:
        self.report(f"{self._elapsed():6.0f} s  {step.name} begins: viva train {' '.join(step.arguments)}")
        began = self._elapsed()
        log = self.logs / f"{step.name}.log"
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(*self.command, *step.arguments, stdout=file, stderr=file)
            self._processes.append(process)
            code = await process.wait()
        if code != 0:
            lines = log.read_text(encoding="utf8", errors="replace").splitlines()[-LOG_LINES:]
            raise VivaError(f"step {step.name} ended with {code}; the end of {log}:\n" + "\n".join(lines))
        seconds = round(self._elapsed() - began, 1)
        content = {"arguments": step.arguments, "seconds": seconds}
        (self.done_folder / f"{step.name}.json").write_text(json.dumps(content), encoding="utf8")
        self.report(f"{self._elapsed():6.0f} s  {step.name} is done after {seconds:.0f} s")

    def _elapsed(self) -> float:
        return time.monotonic() - self._started


def main(arguments: list[str] | None = None) -> None:
    """The command `viva train all`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="go on in a folder that has steps that are done")
    parser.add_argument("--kokoro", metavar="MODEL", help="Kokoro's name or folder: callers and replies in its voices")
    parser.add_argument("--plan", type=Path, help="written by `viva train plan --dialogues`; default: made here")
    parser.add_argument("--synthesizers", type=Path, help="written by voices.bundle; default: the installed ones")
    parser.add_argument("--without-synthesizers", action="store_true", help="with --kokoro: its voices alone")
    parser.add_argument("--init", type=Path, help="begin with encoder, flow and vocoder of this speech-to-speech model")
    parser.add_argument(
        "--keep-codec",
        action="store_true",
        help="with --init: its language model alone is trained on, on new dialogues",
    )
    parser.add_argument("--begin", type=Path, help="begin with an encoder of `viva train causal-whisper` instead")
    parser.add_argument("--continued-encoder", type=Path, help="train this speech encoder on instead")
    parser.add_argument("--speech-encoder", type=Path, help="take this trained one as it is; the others learn from it")
    parser.add_argument("--text-from", type=Path, help="begin with the texts of this speech-to-speech model")
    parser.add_argument("--reply-voice", type=Path, help="continue flow and vocoder of this folder, of the same voice")
    parser.add_argument("--seconds-scale", type=float, default=1.0, help="factor on the time of every step")
    parser.add_argument("--device", help="default: CUDA where there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--languages", nargs="+", choices=sorted(LANGUAGES), default=["en"], help="with --kokoro")
    parser.add_argument("--list", action="store_true", help="print the steps and run nothing")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a few sentences, to test the pipeline")
    options = parser.parse_args(arguments)
    if options.without_synthesizers and options.kokoro is None:
        parser.error("--without-synthesizers needs --kokoro")
    if options.languages != ["en"] and options.kokoro is None:
        parser.error("the synthesizers speak English only: --languages needs --kokoro")
    if options.plan is not None and options.kokoro is None:
        parser.error("--plan needs --kokoro")
    beginnings = (options.init, options.begin, options.continued_encoder)
    if options.speech_encoder is not None and any(each is not None for each in beginnings):
        parser.error("--speech-encoder is not trained again: without --init, --begin and --continued-encoder")
    if options.keep_codec and (options.init is None or options.without_synthesizers or options.languages != ["en"]):
        parser.error("--keep-codec needs --init, and the synthesizers' English voices for the replies")
    wanted = steps(
        RecipeOptions(
            out=options.out,
            kokoro=options.kokoro,
            plan=options.plan,
            synthesizers=options.synthesizers,
            classic=not options.without_synthesizers,
            scale=options.seconds_scale,
            device=options.device,
            seed=options.seed,
            languages=tuple(options.languages),
            init=options.init,
            keep_codec=options.keep_codec,
            begin=options.begin,
            continued_encoder=options.continued_encoder,
            speech_encoder=options.speech_encoder,
            text_from=options.text_from,
            reply_voice=options.reply_voice,
            tiny=options.tiny,
        )
    )
    if options.list:
        for step in wanted:
            print(f"viva train {' '.join(step.arguments)}")
        return
    run = RecipeRun(options.out, wanted, lambda line: print(line, flush=True))
    if run.done() and not options.resume:
        raise InputError(f"{options.out} has steps that are done; go on with --resume, or give another folder")
    print(f"{len(wanted)} steps on {usable_cores()} cores", flush=True)
    asyncio.run(run())
