"""`viva train …`: each command runs one training step, whose own parser gets the remaining arguments."""

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Train the bundled miniature models on one GPU.")

STEPS = {  # name: module and function, help
    "phrasings": ("vivavoce.train.phrasings:main", "Have a chat model write ways to ask for each intent."),
    "plan": ("vivavoce.train.batch_synthesis:plan_main", "Plan utterances of sentences, with voices and phonemes."),
    "corpora": ("vivavoce.train.corpus:main", "Synthesize the corpora of all models except the language model."),
    "speech-encoder": ("vivavoce.train.speech_encoder.train:main", "Train the speech encoder with its codebook."),
    "lm-data": ("vivavoce.train.lm.corpus:main", "Synthesize dialogues and encode them with the speech encoder."),
    "lm": ("vivavoce.train.lm.train:main", "Train the layer-splitting language model, in three stages."),
    "flow": ("vivavoce.train.flow_vocoder.flow:main", "Train the flow decoder of the reply voice."),
    "vocoder": ("vivavoce.train.flow_vocoder.vocoder:main", "Train the vocoder of the reply voice."),
    "assemble": ("vivavoce.train.package:assemble_main", "Assemble speech encoder, flow and vocoder into one codec."),
    "causal-whisper": (
        "vivavoce.train.speech_encoder.causal_whisper:main",
        "Make a published Whisper's encoder the beginning of a speech encoder.",
    ),
    "prune-asr": (
        "vivavoce.train.asr.prune:main",
        "Cut a published Whisper to shorter windows and fewer pieces.",
    ),
    "asr": ("vivavoce.train.asr.train:main", "Train mini-asr."),
    "evaluate-asr": (
        "vivavoce.train.asr.evaluate:main",
        "Measure word error rates of an ASR model, also on human speech.",
    ),
    "medusa": ("vivavoce.train.asr.draft:medusa_main", "Train Medusa heads for an ASR model."),
    "draft": ("vivavoce.train.asr.draft:main", "Train a small decoder or a CTC head that drafts for an ASR model."),
    "tts-codec": ("vivavoce.train.tts.codec:main", "Train the codec of mini-tts."),
    "tts": ("vivavoce.train.tts.train:main", "Train the language model of mini-tts."),
    "evaluate-tts": (
        "vivavoce.train.tts.train:evaluate_main",
        "Measure intelligibility and opinion score of a TTS model.",
    ),
    "turn-end-data": ("vivavoce.train.turn_end.corpus:main", "Synthesize finished and unfinished turns."),
    "turn-end": ("vivavoce.train.turn_end.train:main", "Train the turn-end model."),
    "barge-in-data": ("vivavoce.train.barge_in.corpus:main", "Synthesize what is said over replies, on the CPU."),
    "barge-in": ("vivavoce.train.barge_in.train:main", "Train the barge-in model, on the CPU."),
    "questions": ("vivavoce.train.questions:main", "Synthesize spoken questions that no training uses."),
    "all": ("vivavoce.train.recipe:main", "Run all steps of mini-speech, side by side where that is possible."),
    "package": ("vivavoce.train.package:main", "Pack a trained miniature for distribution."),
}
FORMER_NAMES = {
    "ear": "speech-encoder",
    "judge-asr": "evaluate-asr",
    "judge-tts": "evaluate-tts",
    "ship": "package",
}
"""Names that still work but are not listed."""
Arguments = Annotated[list[str] | None, typer.Argument(help="Options of the step; --help lists them.")]


def _add(name: str, target: str, description: str, hidden: bool = False) -> None:
    @app.command(
        name,
        help=description,
        hidden=hidden,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def step(arguments: Arguments = None) -> None:
        import sys
        from importlib import import_module

        sys.argv[0] = f"viva train {name}"  # the step's own parser shows this as its program name
        module, _, function = target.partition(":")
        getattr(import_module(module), function)(arguments or [])


for _name, (_target, _description) in STEPS.items():
    _add(_name, _target, _description)
for _name, _present_name in FORMER_NAMES.items():
    _add(_name, *STEPS[_present_name], hidden=True)
