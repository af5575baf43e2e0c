"""Text to ids and back by a published `tokenizer.json`."""

from pathlib import Path
from typing import Any

from vivavoce.errors import CheckpointError, MissingDependencyError


class TextTokenizer:
    """A byte-level BPE tokenizer as Hugging Face publishes it; special tokens are recognised, never added."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    @classmethod
    def load(cls, folder: str | Path) -> "TextTokenizer":
        """The tokenizer of a checkpoint folder."""
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingDependencyError("text needs the tokenizers package: pip install tokenizers") from error
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist; the folder must hold the checkpoint's tokenizer files")
        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file} is not a tokenizer ({error})") from error

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens left out."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def id_of(self, token: str) -> int | None:
        """The id of a special token, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found
