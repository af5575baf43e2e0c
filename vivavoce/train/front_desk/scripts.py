"""The two scripts of Mandarin: Traditional, which is shown, and Simplified, in which texts are compared.

The table has the common characters alone. One Simplified character can stand for several Traditional ones;
`traditional` writes the most common of them, except in the words of WORDS.
"""

import re
import tomllib

from vivavoce.train.front_desk.templates import FOLDER

PAIRS = tomllib.loads((FOLDER / "scripts.zh.toml").read_text(encoding="utf8"))["pairs"].split()
WORDS = {  # Simplified words whose characters are not written as usual
    **{"意大利面": "義大利麵", "牛肉面": "牛肉麵", "面包": "麵包", "面条": "麵條", "点菜单": "點菜單"},
    **{"干净": "乾淨", "干嘛": "幹嘛", "能干": "能幹", "一只": "一隻", "两只": "兩隻", "旅游": "旅遊", "周末": "週末"},
    **{"头发": "頭髮", "理发": "理髮", "皇后": "皇后", "王后": "王后", "公里": "公里", "出租车": "計程車"},
}
IN_WORDS = re.compile(f"({'|'.join(WORDS)})")
TO_SIMPLIFIED = str.maketrans({pair[0]: pair[1] for pair in PAIRS})
TO_TRADITIONAL = str.maketrans({pair[1]: pair[0] for pair in reversed(PAIRS)})


def simplified(text: str) -> str:
    """A text in Simplified script."""
    return text.translate(TO_SIMPLIFIED)


def traditional(text: str) -> str:
    """A text in Traditional script, with the words of Taiwan in WORDS; one that is in it already is not changed."""
    if is_traditional(text):  # also characters that are Simplified forms of others, such as 里 and 制
        return text
    parts = IN_WORDS.split(text)
    return "".join(WORDS.get(part) or part.translate(TO_TRADITIONAL) for part in parts)


def is_traditional(text: str) -> bool:
    """Whether every character is one that Traditional script has (Big5)."""
    try:
        text.encode("big5")
    except UnicodeEncodeError:  # an answer, not a failure
        return False
    return True
