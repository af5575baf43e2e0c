"""XY-Tokenizer: speech to eight codes every 80 ms and back."""

from vivavoce.models.xy_tokenizer.model import XYTokenizer, XYTokenizerConfig
from vivavoce.models.xy_tokenizer.windows import Windows, XYCodec

__all__ = ["Windows", "XYCodec", "XYTokenizer", "XYTokenizerConfig"]
