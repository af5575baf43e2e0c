"""Text as it can be said: no markup, no pictures, no marks that only the eye needs, and an end to every line."""

import re
import unicodedata

from vivavoce.errors import NothingToSayError, shown
from vivavoce.models.moss_tts_nano_text import CLOSERS, SENTENCE_ENDS, has_cjk

FENCE = re.compile(r"^\s*(```|~~~).*$", re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
TAG = re.compile(r"</?[a-zA-Z][^<>\n]{0,200}>")
PICTURE = re.compile(r"!\[([^\]\n]*)\]\([^)\n]*\)")
LINK = re.compile(r"\[([^\]\n]+)\]\([^)\n]*\)")
ADDRESS = re.compile(r"\b(?:https?|ftp)://(?:www\.)?([^\s/?#]+)\S*")
LINE_START = re.compile(r"^\s*(?:>\s*|#{1,6}\s+|[-*+•·▪◦‣–]\s+|\d{1,3}[.)]\s+)+")
RULE = re.compile(r"^\s*(?:[-*_=~]\s*){3,}$|^[\s|:+-]*$")
EMPHASIS = re.compile(r"(\*{1,3}|~~|`+|(?<!\w)_{1,3})(?=\S)(.+?)(?<=\S)\1")
ARROW = re.compile(r"\s*(?:<?[-=]{1,3}>|<[-=]{1,3}|[←-⇿⟵-⟿➔-➾])\s*")
DASH = re.compile(r"\s*(?:[—―⸺]+|\s[-–]+\s|-{2,})\s*")
OPENER, CLOSER = re.compile(r"\s*[(\[{（【［〔《「『]\s*"), re.compile(r"\s*[)\]}）】］〕》」』]")
REPEATED = re.compile(r"([!?。！？，、,;；:：])(?:\s*\1)+")
MIXED_END = re.compile(r"[!?！？]*([?？])[!?！？]+|[!！]+([?？])[!?！？]*")
DOTS = re.compile(r"(?:\.\s*){2,}|…+|⋯+")
COMMAS = re.compile(r"([,，、])(?:\s*[,，、])+")
COMMA_BEFORE_END = re.compile(r"[,，、;；:：]\s*([.!?。！？])")
END_BEFORE_COMMA = re.compile(r"([.!?。！？])\s*[,，、]")
SPACE_BEFORE = re.compile(r"\s+([,.;:!?，。；：！？、])")
UNSAID_MARKS = str.maketrans(dict.fromkeys("*`^~|\\<>{}[]", " ") | {"_": " ", "\u00ad": "", "\ufeff": ""})


def cleaned(text: str) -> str:
    """The text on one line, every line of it a sentence. A text in which nothing can be said is an error."""
    text = FENCE.sub("", COMMENT.sub(" ", text.replace("\r\n", "\n").replace("\r", "\n")))
    lines = [_ended(line) for raw in re.split(r"[\n\u2028\u2029\f\v]", text) if (line := _line(raw))]
    joined = "".join(lines) if lines and all(has_cjk(line) for line in lines) else " ".join(lines)
    if not any(character.isalnum() for character in joined):
        raise NothingToSayError(f"there is nothing to say in {shown(text)}; give at least one letter or digit")
    return joined


def _line(raw: str) -> str:
    """A line without markup; empty if nothing in it is said."""
    if RULE.match(raw):
        return ""
    line = LINE_START.sub("", "".join(_visible(character) for character in raw))
    for pattern, kept in ((PICTURE, r"\1"), (LINK, r"\1"), (ADDRESS, r"\1"), (TAG, " "), (EMPHASIS, r"\2")):
        line = pattern.sub(kept, line)
    comma = "，" if has_cjk(line) else ", "
    line = re.sub(r"\s*\|\s*", comma, line.strip().strip("|"))
    for pattern in (ARROW, DASH, OPENER, CLOSER):
        line = pattern.sub(comma, line)
    line = _settled(" ".join(line.translate(UNSAID_MARKS).split()), comma)
    return line if any(character.isalnum() for character in line) else ""


def _settled(line: str, comma: str) -> str:
    """Marks once each and close to their word."""
    end = "。" if comma == "，" else "."
    line = DOTS.sub(lambda found: end + " " if found.end() < len(line) else end, line)
    line = MIXED_END.sub(lambda found: found[1] or found[2], line)
    line = REPEATED.sub(r"\1", line)
    line = COMMAS.sub(r"\1", line)
    line = COMMA_BEFORE_END.sub(r"\1", END_BEFORE_COMMA.sub(r"\1", line))
    return " ".join(SPACE_BEFORE.sub(r"\1", line).split()).strip(" ,，、=+/").rstrip("-–").lstrip(" .。!！?？;；:：")


def _ended(line: str) -> str:
    """With a mark at the end, so that the next line is another sentence."""
    bare = line.rstrip("".join(CLOSERS))
    if bare and bare[-1] in SENTENCE_ENDS:
        return line
    return line.rstrip(",，、;；:：") + ("。" if has_cjk(line[-1]) else ".")


def _visible(character: str) -> str:
    """The character; nothing for control and picture characters, a space for any white space."""
    if character.isspace():
        return " "
    kind = unicodedata.category(character)
    if kind in ("Cc", "Cf", "Cs", "Co", "Cn", "Me"):
        return ""
    if kind in ("So", "Sk") and not ("←" <= character <= "⇿" or "➔" <= character <= "➾") and character not in "^`°":
        return " "
    return character
