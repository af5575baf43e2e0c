"""Voices that a codec's folder brings along: prompts ready to be spoken with, one small file each."""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.flow.state import VoicePrompt

FOLDER = "voices"
SUFFIX = ".safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class NamedVoices:
    """Prompts by name: those of a codec's folder, and those kept since."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` is the codec's; None: there is none, and what is kept lasts as long as this."""
        self.folder = None if folder is None else folder / FOLDER
        self._prompts: dict[str, VoicePrompt] = {}

    def names(self) -> list[str]:
        """All names, in the order of the alphabet."""
        files = [] if self.folder is None else self.folder.glob(f"*{SUFFIX}")
        return sorted({*self._prompts, *(file.stem for file in files)})

    def prompt(self, name: str) -> VoicePrompt:
        """The prompt of this name."""
        if name not in self._prompts:
            file = None if self.folder is None else self.folder / f"{_checked(name)}{SUFFIX}"
            if file is None or not file.is_file():
                known = ", ".join(self.names()) or "none"
                raise InputError(f"the codec has no voice {name!r}; it has: {known}")
            self._prompts[name] = read_prompt(file)
        return self._prompts[name]

    def keep(self, name: str, prompt: VoicePrompt) -> None:
        """Keep a prompt under a name, in the folder too where there is one."""
        self._prompts[_checked(name)] = prompt
        if self.folder is not None:
            write_prompt(prompt, self.folder / f"{name}{SUFFIX}")

    def copy_to(self, folder: Path) -> None:
        """Write all of them into another codec's folder."""
        for name in self.names():
            write_prompt(self.prompt(name), folder / FOLDER / f"{name}{SUFFIX}")


def read_prompt(file: Path) -> VoicePrompt:
    """The prompt of a file that `write_prompt` made."""
    try:
        tensors = load_file(file)
        return VoicePrompt(tensors["codes"].long(), tensors["mel"].float(), tensors["speaker"].float())
    except (SafetensorError, OSError, KeyError) as error:
        raise CheckpointError(f"{file} is not a voice with codes, mel and speaker ({error}); make it anew") from error


def write_prompt(prompt: VoicePrompt, file: Path) -> None:
    """One file with codes, mel and the speaker's vector."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"codes": prompt.codes.to(torch.int32), "mel": prompt.mel, "speaker": prompt.speaker}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)


def _checked(name: str) -> str:
    if not NAME.fullmatch(name):
        raise InputError(f"a voice cannot be named {name!r}; use letters, digits, - and _")
    return name
