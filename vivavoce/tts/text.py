"""Text normalisation: markup, emoji and symbols are removed, lines become sentences, English numbers become words."""

import re
import unicodedata

from vivavoce.errors import NothingToSayError, shown
from vivavoce.models.moss_tts_nano.prompt import CLOSERS, SENTENCE_ENDS, has_cjk

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
    """The text on one line, each of its lines ended as a sentence. A text without letters and digits is an error."""
    text = FENCE.sub("", COMMENT.sub(" ", text.replace("\r\n", "\n").replace("\r", "\n")))
    lines = [_end_sentence(line) for raw in re.split(r"[\n\u2028\u2029\f\v]", text) if (line := _clean_line(raw))]
    joined = "".join(lines) if lines and all(has_cjk(line) for line in lines) else " ".join(lines)
    if not any(character.isalnum() for character in joined):
        raise NothingToSayError(f"there is nothing to say in {shown(text)}; give at least one letter or digit")
    return joined


def _clean_line(raw: str) -> str:
    """A line without markup; empty if it has no letter or digit."""
    if RULE.match(raw):
        return ""
    line = LINE_START.sub("", "".join(_visible(character) for character in raw))
    for pattern, replacement in ((PICTURE, r"\1"), (LINK, r"\1"), (ADDRESS, r"\1"), (TAG, " "), (EMPHASIS, r"\2")):
        line = pattern.sub(replacement, line)
    comma = "，" if has_cjk(line) else ", "
    line = re.sub(r"\s*\|\s*", comma, line.strip().strip("|"))
    for pattern in (ARROW, DASH, OPENER, CLOSER):
        line = pattern.sub(comma, line)
    line = _normalise_punctuation(" ".join(line.translate(UNSAID_MARKS).split()), comma)
    return line if any(character.isalnum() for character in line) else ""


def _normalise_punctuation(line: str, comma: str) -> str:
    """Collapse repeated punctuation, and remove the spaces before it."""
    end = "。" if comma == "，" else "."
    line = DOTS.sub(lambda match: end + " " if match.end() < len(line) else end, line)
    line = MIXED_END.sub(lambda match: match[1] or match[2], line)
    line = REPEATED.sub(r"\1", line)
    line = COMMAS.sub(r"\1", line)
    line = COMMA_BEFORE_END.sub(r"\1", END_BEFORE_COMMA.sub(r"\1", line))
    return " ".join(SPACE_BEFORE.sub(r"\1", line).split()).strip(" ,，、=+/").rstrip("-–").lstrip(" .。!！?？;；:：")


def _end_sentence(line: str) -> str:
    """Add a full stop if the line does not end like a sentence."""
    bare = line.rstrip("".join(CLOSERS))
    if bare and bare[-1] in SENTENCE_ENDS:
        return line
    return line.rstrip(",，、;；:：") + ("。" if has_cjk(line[-1]) else ".")


def _visible(character: str) -> str:
    """The character; a space for white space and emoji, nothing for control characters."""
    if character.isspace():
        return " "
    kind = unicodedata.category(character)
    if kind in ("Cc", "Cf", "Cs", "Co", "Cn", "Me"):
        return ""
    if kind in ("So", "Sk") and not ("←" <= character <= "⇿" or "➔" <= character <= "➾") and character not in "^`°":
        return " "
    return character


ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
GROUPS = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand"))
ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
ORDINALS |= {"twelve": "twelfth"}
MONEY = {"$": ("dollar", "cent"), "£": ("pound", "penny"), "€": ("euro", "cent")}
SIGNS = {"%": " percent", "&": " and ", "+": " plus ", "=": " equals ", "@": " at ", "°": " degrees ", "§": " section "}
LARGEST = 10**15  # from here on, numbers are read digit by digit

TIME = re.compile(r"\b([01]?\d|2[0-3]):([0-5]\d)\b(?:\s?([ap])\.?m\b\.?)?", re.IGNORECASE)
PRICE = re.compile(r"([$£€])\s?(\d[\d,]*)(?:\.(\d\d))?(?!\d)|(?<![\d.])(\d[\d,]*)(?:\.(\d\d))?\s?([€£])")
ORDINAL = re.compile(r"\b(\d[\d,]*)(?:st|nd|rd|th)\b", re.IGNORECASE)
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?|\d+")


def numbers_as_words(text: str) -> str:
    """A text without digits: "7:30" is "seven thirty", "$12" "twelve dollars", "3rd" "third"."""
    text = TIME.sub(_time, text)
    text = PRICE.sub(_price, text)
    text = ORDINAL.sub(lambda match: f" {ordinal(_whole(match[1]))} ", text)
    text = NUMBER.sub(lambda match: f" {_number(match[0])} ", text)
    for sign, word in SIGNS.items():
        text = text.replace(sign, word)
    return re.sub(r"\s+([,.;:!?'])", r"\1", " ".join(text.split()))


def cardinal(number: int) -> str:
    """A whole number in words."""
    if number < 0:
        return f"minus {cardinal(-number)}"
    if number >= LARGEST:
        return " ".join(ONES[int(digit)] for digit in str(number))
    for size, name in GROUPS:
        if number >= size:
            return _join(f"{cardinal(number // size)} {name}", number % size)
    if number >= 100:
        return _join(f"{ONES[number // 100]} hundred", number % 100)
    if number >= 20:
        return _join(TENS[number // 10], number % 10)
    return ONES[number]


def ordinal(number: int) -> str:
    """First, second, third."""
    *leading, last = cardinal(number).split(" ")
    regular = last[:-1] + "ieth" if last.endswith("y") else last + "th"
    return " ".join([*leading, ORDINALS.get(last, regular)])


def _join(head: str, rest: int) -> str:
    return f"{head} {cardinal(rest)}" if rest else head


def _whole(digits: str) -> int:
    return int(digits.replace(",", ""))


def _number(written: str) -> str:
    digits = written.rstrip(",")
    trailing = "," * (len(written) - len(digits))
    whole, point, rest = digits.partition(".")
    value = _whole(whole)
    words = f"minus {cardinal(-value)}" if whole.startswith("-") else cardinal(value)
    if whole.isdecimal() and len(whole) == 4 and 1100 <= value < 2000 and not point:
        words = _year(value)
    if point:
        words += " point " + " ".join(ONES[int(digit)] for digit in rest)
    return words + trailing


def _year(value: int) -> str:
    """A four-digit number read as a year."""
    rest = value % 100
    tail = "hundred" if rest == 0 else f"oh {ONES[rest]}" if rest < 10 else cardinal(rest)
    return f"{cardinal(value // 100)} {tail}"


def _time(match: re.Match[str]) -> str:
    hour, minute = int(match[1]), int(match[2])
    half = f" {match[3].lower()} m" if match[3] else ""
    if minute == 0:
        full = " o'clock" if 1 <= hour <= 12 else " hundred"
        return f"{cardinal(hour)}{half or full}"
    return f"{cardinal(hour)} {'oh ' if minute < 10 else ''}{cardinal(minute)}{half}"


def _price(match: re.Match[str]) -> str:
    sign, whole, cents = (match[1], match[2], match[3]) if match[1] else (match[6], match[4], match[5])
    coin, small = MONEY[sign]
    value = _whole(whole.rstrip(","))
    words = f"{cardinal(value)} {coin}{'' if value == 1 else 's'}"
    if cents and int(cents):
        words += f" and {cardinal(int(cents))} {_plural(small, int(cents))}"
    return words + ("," if whole.endswith(",") else "")


def _plural(coin: str, count: int) -> str:
    return coin if count == 1 else "pence" if coin == "penny" else coin + "s"
