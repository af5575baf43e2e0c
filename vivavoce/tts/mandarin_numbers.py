"""Written dates, times, units and long numbers of a Mandarin text in words; cn2an reads all other numbers."""

import re
import unicodedata

DIGITS = "零一二三四五六七八九"
MAX_READ_DIGITS = 9  # a longer number is a telephone or account number, and is read digit by digit
NOT_IN_NUMBER = r"(?<![\d.,:/-])", r"(?![\d:/-]|[.,]\d)"
DATE = re.compile(rf"{NOT_IN_NUMBER[0]}(\d{{4}})([-/])(\d{{1,2}})\2(\d{{1,2}}){NOT_IN_NUMBER[1]}")
TIME = re.compile(rf"{NOT_IN_NUMBER[0]}([01]?\d|2[0-4])[:：]([0-5]\d){NOT_IN_NUMBER[1]}")
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
DIGIT_STRING = re.compile(rf"(?<![\d.])(?:0\d+|\d{{{MAX_READ_DIGITS + 1},}})(?!\d|\.\d|[月日号])")
MONEY = re.compile(r"([$€£¥￥])\s?(\d+(?:\.\d+)?)(?!\d|[万亿千百]?\s?(?:美元|欧元|英镑|元|块))")
CURRENCIES = {"$": "美元", "€": "欧元", "£": "英镑", "¥": "元", "￥": "元"}
PERCENT_RANGE = re.compile(r"(?<=\d%)\s?[-~～—]\s?(?=\d)")
CHARACTERS = {
    "°C": "摄氏度",
    "°F": "华氏度",
    "°": "度",
    "⁄": "/",
    "〇": "零",
    "％": "%",
    **dict.fromkeys(CURRENCIES, ""),
}


def spoken_numbers(text: str) -> str:
    """A text whose numbers are words, or such as cn2an reads as they are meant."""
    text = "".join(unicodedata.normalize("NFKC", each) if each.isnumeric() or each in "℃℉" else each for each in text)
    text = GROUPED.sub(lambda match: match[0].replace(",", ""), text)
    text = DATE.sub(lambda match: f"{match[1]}年{int(match[3])}月{int(match[4])}日", text)
    text = TIME.sub(lambda match: f"{int(match[1])}点{_minutes(match[2])}", text)
    text = MONEY.sub(lambda match: match[2] + CURRENCIES[match[1]], text)
    text = DIGIT_STRING.sub(lambda match: "".join(DIGITS[int(digit)] for digit in match[0]), text)
    for written, spoken in CHARACTERS.items():
        text = text.replace(written, spoken)
    return PERCENT_RANGE.sub("到", text)


def _minutes(digits: str) -> str:
    if digits == "00":
        return ""
    return f"零{digits[1]}分" if digits[0] == "0" else f"{digits}分"
