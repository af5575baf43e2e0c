"""`viva train …`: each command is the module of its name; what follows it goes there."""

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Make the miniatures: speech, training, packing. One GPU is enough.")

STEPS = {
    "corpora": ("vivavoce.train.corpora", "Speak what all trainings but the language model's learn from."),
    "ear": ("vivavoce.train.speech_encoder.train", "The speech encoder with its codebook."),
    "lm-data": ("vivavoce.train.lm.corpus", "Speak the dialogues and hear them with the trained ear."),
    "lm": ("vivavoce.train.lm.train", "The layer-splitting language model, in three stages."),
    "flow": ("vivavoce.train.flow_vocoder.flow", "The flow decoder of the reply voice."),
    "vocoder": ("vivavoce.train.flow_vocoder.vocoder", "The vocoder of the reply voice."),
    "assemble": ("vivavoce.train.flow_vocoder.assemble", "One codec of ear, flow and vocoder."),
    "asr": ("vivavoce.train.asr.train", "The recogniser mini-asr."),
    "judge-asr": ("vivavoce.train.asr.evaluate", "Word error rates of a recogniser, on people too."),
    "medusa": ("vivavoce.train.asr.medusa", "Heads that guess ahead of a trained recogniser."),
    "draft": ("vivavoce.train.asr.draft", "A small decoder, or a linear layer, that drafts for it."),
    "tts-codec": ("vivavoce.train.tts.codec", "The codec of mini-tts."),
    "tts": ("vivavoce.train.tts.train", "The language model of mini-tts."),
    "judge-tts": ("vivavoce.train.tts.evaluate", "How well a voice is understood, and how it sounds."),
    "questions": ("vivavoce.train.questions", "Spoken questions that no training heard."),
    "ship": ("vivavoce.train.package", "A miniature small enough to ship."),
}
Arguments = Annotated[list[str] | None, typer.Argument(help="Options of the step; --help lists them.")]


def _add(name: str, module: str, what: str) -> None:
    @app.command(
        name,
        help=what,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def step(arguments: Arguments = None) -> None:
        import sys
        from importlib import import_module

        sys.argv[0] = f"viva train {name}"  # as which the step's own parser names itself
        import_module(module).main(arguments or [])


for _name, (_module, _what) in STEPS.items():
    _add(_name, _module, _what)
