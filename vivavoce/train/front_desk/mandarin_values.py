"""Values of the front desk as Mandarin guests and replies say them, and numbers in words."""

import re

from vivavoce.train.front_desk.english_values import DAYS, NUMBERS, PRICES, TIMES
from vivavoce.train.front_desk.templates import read

DIGITS = "零一二三四五六七八九"
UNITS = ((1000, "千"), (100, "百"), (10, "十"))
UNIT_SIZES = {"十": 10, "百": 100, "千": 1000}
DIGIT_VALUES = {digit: value for value, digit in enumerate(DIGITS)} | {"兩": 2, "两": 2, "〇": 0}
YUAN_PER_EURO = 35


def number_words(number: int) -> str:
    """A whole number below 100,000 in words: 十二, 兩百零五, 三千一百五十."""
    if number >= 10_000:
        high, rest = divmod(number, 10_000)
        gap = "零" if 0 < rest < 1000 else ""
        ten = "一" if 10 <= rest < 20 else ""  # 十 alone is ten at the start of a number only
        return f"{counted(high, '萬')}{gap}{ten}{number_words(rest) if rest else ''}"
    if number < 10:
        return DIGITS[number]
    words, has_gap = "", False
    for size, unit in UNITS:
        digit, number = divmod(number, size)
        if not digit:
            has_gap = bool(words)
            continue
        spoken = "兩" if digit == 2 and size > 10 else DIGITS[digit]
        words += ("零" if has_gap else "") + ("" if size == 10 and digit == 1 and not words else spoken) + unit
        has_gap = False
    if number:
        words += ("零" if has_gap else "") + DIGITS[number]
    return words


def number_value(words: str) -> int:
    """The number that words or digits say; digits said one by one are a number, too (二零五)."""
    if words.isascii():
        return int(words)
    if "萬" in words or "万" in words:
        high, _, low = re.sub("万", "萬", words).partition("萬")
        return number_value(high) * 10_000 + (number_value(low) if low else 0)
    if not UNIT_SIZES.keys() & set(words):
        return int("".join(str(DIGIT_VALUES[digit]) for digit in words))
    total, digit = 0, 1
    for position, character in enumerate(words):
        if character in UNIT_SIZES:
            total += (digit if position else 1) * UNIT_SIZES[character]
            digit = 0
        else:
            digit = DIGIT_VALUES[character]
    return total + digit


def counted(number: int, measure: str) -> str:
    """A number before a measure word: 兩位, 十二晚."""
    return ("兩" if number == 2 else number_words(number)) + measure


def _times() -> dict[str, tuple[str, ...]]:
    """Clock times with the ways to say them; the first is that of replies."""
    ways: list[tuple[str, ...]] = []
    for hour in range(1, 13):
        clock, following = counted(hour, "點"), counted(hour % 12 + 1, "點")
        ways.append((clock, f"{clock}鐘", f"{clock}整"))
        ways.append((f"{clock}十五分", f"{clock}一刻", f"{clock}十五"))
        ways.append((f"{clock}半", f"{clock}三十分", f"{clock}半左右"))
        ways.append((f"{clock}四十五分", f"{clock}四十五", f"差一刻{following}"))
    return dict(zip(TIMES, ways, strict=True))


WEEKDAYS = dict(zip(DAYS, "一二三四五六日", strict=True))
COUNTS = dict(zip(NUMBERS, range(1, 13), strict=True))
NAMES: dict[str, tuple[str, ...]] = {  # as English replies say them; some with the character that guests explain
    "Chen Zhiming": ("陳志明", "陳志明，耳東陳"),
    "Lin Meiling": ("林美玲", "林美玲，雙木林"),
    "Huang Jianguo": ("黃建國", "黃建國，草頭黃"),
    "Zhang Yating": ("張雅婷", "張雅婷，弓長張"),
    "Li Xiaohua": ("李曉華", "李曉華，木子李"),
    "Wang Junjie": ("王俊傑", "王俊傑，三橫王"),
    "Wu Shufen": ("吳淑芬", "吳淑芬，口天吳"),
    "Liu Jiahao": ("劉家豪",),
    "Cai Yiling": ("蔡依玲",),
    "Yang Guangming": ("楊光明", "楊光明，木易楊"),
    "Xu Wenbin": ("許文斌", "許文斌，言午許"),
    "Zheng Lihua": ("鄭麗華",),
    "Xie Boyu": ("謝博宇",),
    "Guo Xinyi": ("郭欣怡",),
    "Hong Dawei": ("洪大為",),
    "Qiu Shuzhen": ("邱淑貞",),
    "Zeng Zhiwei": ("曾志偉",),
    "Liao Meifeng": ("廖美鳳",),
    "Lai Mingde": ("賴明德",),
    "Zhou Yulan": ("周玉蘭",),
    "Ye Tianming": ("葉天明",),
    "Su Kaiwen": ("蘇凱文",),
    "Lu Peishan": ("呂佩珊", "呂佩珊，雙口呂"),
    "Jiang Haoran": ("江浩然",),
}
FOREIGN_NAMES: dict[str, str] = read("words", "zh")["foreign_names"]  # of guests who gave their name in English
DISHES: dict[str, tuple[str, ...]] = {
    "tomato soup": ("番茄湯",),
    "onion soup": ("洋蔥湯",),
    "garden salad": ("田園沙拉", "沙拉"),
    "garlic bread": ("大蒜麵包",),
    "grilled salmon": ("烤鮭魚", "鮭魚"),
    "roast chicken": ("烤雞", "烤全雞"),
    "beef steak": ("牛排",),
    "fish and chips": ("炸魚薯條",),
    "mushroom risotto": ("蘑菇燉飯", "燉飯"),
    "vegetable curry": ("蔬菜咖哩", "咖哩"),
    "spaghetti": ("義大利麵",),
    "cheeseburger": ("起司漢堡", "漢堡"),
    "apple pie": ("蘋果派",),
    "chocolate cake": ("巧克力蛋糕",),
    "ice cream": ("冰淇淋",),
    "black coffee": ("黑咖啡", "咖啡"),
}
EUROS = {"twenty": 20, "twenty one": 21, "twenty two": 22, "twenty six": 26} | COUNTS
DISH_PRICES = {dish: number_words(YUAN_PER_EURO * EUROS[price]) for dish, price in PRICES.items()}  # in yuan
ROOM_PRICE = number_words(YUAN_PER_EURO * 90)
PLACES: dict[str, tuple[str, ...]] = {
    "toilets": ("洗手間", "廁所", "化妝室"),
    "lift": ("電梯", "升降梯"),
    "breakfast room": ("早餐廳", "早餐區"),
    "restaurant": ("餐廳", "用餐的地方"),
    "pool": ("游泳池", "泳池"),
    "gym": ("健身房", "健身中心"),
    "bar": ("酒吧", "飯店酒吧"),
    "car park": ("停車場", "地下停車場", "停車的地方"),
    "station": ("火車站", "車站"),
    "bus stop": ("公車站", "公車站牌"),
    "pharmacy": ("藥局", "藥房"),
    "beach": ("海灘", "海邊"),
}
DIRECTIONS = {
    "toilets": "洗手間在樓下左手邊。",
    "lift": "電梯在櫃檯後面。",
    "breakfast room": "早餐廳在二樓。",
    "restaurant": "餐廳在花園對面。",
    "pool": "游泳池在頂樓。",
    "gym": "健身房在三溫暖旁邊。",
    "bar": "酒吧在走廊盡頭。",
    "car park": "停車場在地下室。",
    "station": "火車站走路十分鐘就到。",
    "bus stop": "公車站在對面馬路。",
    "pharmacy": "藥局在兩條街外的右手邊。",
    "beach": "海灘坐公車五分鐘就到。",
}
TIMES_SAID = _times()
WAYS_TO_SAY: dict[str, dict[str, tuple[str, ...]]] = {
    "people": {
        **{key: (counted(count, "位"), counted(count, "個人"), counted(count, "個")) for key, count in COUNTS.items()},
        "one": ("一位", "一個人", "我一個人"),
    },
    "nights": {key: (counted(count, "晚"), counted(count, "個晚上")) for key, count in COUNTS.items()},
    "time": TIMES_SAID,
    "day": {
        "today": ("今天",),
        "tonight": ("今晚", "今天晚上"),
        "tomorrow": ("明天", "明天晚上", "明晚"),
        **{f"on {day}": (f"星期{word}", f"禮拜{word}", f"週{word}") for day, word in WEEKDAYS.items()},
    },
    "name": NAMES,
    "dish": DISHES,
    "place": PLACES,
}
VALUES = {slot: tuple(ways) for slot, ways in WAYS_TO_SAY.items()}
