"""What differs between the versions of TensorRT-LLM that read our checkpoints."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from vivavoce.errors import InputError

PATTERN = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:rc(\d+))?")
FINAL = 10_000  # a release comes after its candidates


class Version(NamedTuple):
    """A release or a release candidate, in the order they came out."""

    major: int
    minor: int
    patch: int
    candidate: int

    def __str__(self) -> str:
        rc = "" if self.candidate == FINAL else f"rc{self.candidate}"
        return f"{self.major}.{self.minor}.{self.patch}{rc}"


def parse_version(text: str) -> Version:
    """A version as people write it: 0.13, 1.2.1, 1.3.0rc20."""
    found = PATTERN.fullmatch(text.strip().removeprefix("v"))
    if found is None:
        raise InputError(f"{text!r} is no version of TensorRT-LLM; write it like 0.21.0, 1.2.1 or 1.3.0rc20")
    major, minor, patch, candidate = found.groups()
    return Version(int(major), int(minor), int(patch or 0), FINAL if candidate is None else int(candidate))


OLDEST = parse_version("0.13.0")
QWEN3_ENGINES = parse_version("1.0.0")
LAST_ENGINES = parse_version("1.3.0rc20")


@dataclass(frozen=True)
class CheckpointFormat:
    """How a version wants its `config.json`; the tensors are the same in all of them."""

    version: Version

    @property
    def has_engines(self) -> bool:
        """Whether this version still builds engines; later ones have the PyTorch backend alone."""
        return self.version <= LAST_ENGINES

    @property
    def has_qwen3(self) -> bool:
        """Whether its decoder knows norms on queries and keys under `Qwen3ForCausalLM`."""
        return self.version >= QWEN3_ENGINES

    @property
    def general_keys(self) -> dict[str, object]:
        """Keys of every decoder that only some versions have."""
        keys: dict[str, object] = {}
        if self.version < parse_version("0.16.0"):
            keys["share_embedding_table"] = False  # later versions find out for themselves
        if self.version >= parse_version("0.19.0"):
            keys["runtime_defaults"] = None
        return keys

    @property
    def qwen_keys(self) -> dict[str, object]:
        """Keys of the Qwen family that only some versions have."""
        return {"use_logn_attn": False} if self.version >= parse_version("0.16.0") else {}

    @property
    def quantization_keys(self) -> dict[str, object]:
        """Keys of `quantization`, whose reader refuses those it does not know."""
        return {"clamp_val": None, "use_meta_recipe": False} if self.version >= parse_version("0.14.0") else {}


def format_of(text: str) -> CheckpointFormat:
    """The format of a version from 0.13 on."""
    version = parse_version(text)
    if version < OLDEST:
        raise InputError(f"TensorRT-LLM {version} is older than {OLDEST}, the first version this writes for")
    return CheckpointFormat(version)
