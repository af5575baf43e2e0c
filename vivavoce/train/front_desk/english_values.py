"""Values of the front desk (numbers, times, days, names, dishes, places) and how English guests say them."""

from vivavoce.train.front_desk.templates import read

WORDS = read("words", "en")["words"]
ONES, TENS, NAMES = (tuple(WORDS[name].split()) for name in ("ones", "tens", "names"))
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
PRICES = {  # in euros; none ends in -teen, which sounds like -ty
    "tomato soup": "six",
    "onion soup": "seven",
    "garden salad": "eight",
    "garlic bread": "five",
    "grilled salmon": "twenty two",
    "roast chicken": "twenty",
    "beef steak": "twenty six",
    "fish and chips": "twenty one",
    "mushroom risotto": "twelve",
    "vegetable curry": "eleven",
    "spaghetti": "ten",
    "cheeseburger": "nine",
    "apple pie": "seven",
    "chocolate cake": "eight",
    "ice cream": "four",
    "black coffee": "three",
}
SHORT_DISHES: dict[str, tuple[str, ...]] = {  # short names
    dish: (dish, short)
    for dish, short in {
        "grilled salmon": "salmon",
        "roast chicken": "chicken",
        "beef steak": "steak",
        "mushroom risotto": "risotto",
        "vegetable curry": "curry",
        "black coffee": "coffee",
        "cheeseburger": "burger",
        "garden salad": "salad",
    }.items()
}
PLACES: dict[str, tuple[str, ...]] = {  # synonyms
    "toilets": ("toilets", "toilet", "bathroom", "restroom", "men's room", "ladies room"),
    "lift": ("lift", "elevator", "lifts", "elevators"),
    "breakfast room": ("breakfast room", "breakfast buffet", "breakfast hall"),
    "restaurant": ("restaurant", "dining room", "dining hall"),
    "pool": ("pool", "swimming pool", "indoor pool"),
    "gym": ("gym", "fitness room", "fitness center"),
    "bar": ("bar", "hotel bar", "lounge bar"),
    "car park": ("car park", "parking", "parking lot", "garage"),
    "station": ("station", "train station", "railway station"),
    "bus stop": ("bus stop", "nearest bus stop", "next bus stop"),
    "pharmacy": ("pharmacy", "drugstore", "nearest pharmacy"),
    "beach": ("beach", "seaside", "nearest beach"),
}
DIRECTIONS = {  # the replies
    "toilets": "The toilets are down the stairs, on the left.",
    "lift": "The lift is behind the front desk.",
    "breakfast room": "The breakfast room is on the first floor.",
    "restaurant": "The restaurant is across the garden.",
    "pool": "The pool is on the top floor.",
    "gym": "The gym is next to the sauna.",
    "bar": "The bar is at the end of the hall.",
    "car park": "The car park is under the building.",
    "station": "The station is ten minutes away on foot.",
    "bus stop": "The bus stop is across the street.",
    "pharmacy": "The pharmacy is two streets away, on the right.",
    "beach": "The beach is five minutes away by bus.",
}
PARTIES: dict[str, tuple[str, ...]] = {  # ways to say a party size
    **{number: (number, f"{number} people", f"{number} persons") for number in NUMBERS},
    "one": ("one", "one person", "just me", "just one"),
    "two": ("two", "two people", "the two of us", "my wife and me", "my husband and me"),
}
STAYS: dict[str, tuple[str, ...]] = {
    **{number: (f"{number} nights",) for number in NUMBERS},
    "one": ("one night", "a single night"),
}


def _hour_after(hour: str) -> str:
    return NUMBERS[(NUMBERS.index(hour) + 1) % 12]


def _times() -> dict[str, tuple[str, ...]]:
    """Clock times as in replies, with the ways users say them."""
    times: dict[str, tuple[str, ...]] = {}
    for hour in NUMBERS:
        following = _hour_after(hour)
        times[f"{hour} o'clock"] = (hour, f"{hour} o'clock", f"{hour} o'clock", f"{hour} sharp")
        times[f"a quarter past {hour}"] = (f"quarter past {hour}", f"a quarter past {hour}", f"{hour} fifteen")
        times[f"half past {hour}"] = (f"half past {hour}", f"{hour} thirty")
        times[f"a quarter to {following}"] = (
            f"quarter to {following}",
            f"a quarter to {following}",
            f"{hour} forty five",
        )
    return times


TIMES = _times()
SPOKEN_DAYS: dict[str, tuple[str, ...]] = {
    "today": ("today", "this evening"),
    "tonight": ("tonight",),
    "tomorrow": ("tomorrow", "tomorrow evening", "tomorrow night"),
    **{f"on {day}": (f"on {day}", f"this {day}", f"for {day}") for day in DAYS},
}
WAYS_TO_SAY: dict[str, dict[str, tuple[str, ...]]] = {
    "time": TIMES,
    "day": SPOKEN_DAYS,
    "people": PARTIES,
    "nights": STAYS,
    "dish": SHORT_DISHES,
    "place": PLACES,
}
VALUES: dict[str, tuple[str, ...]] = {
    "people": NUMBERS,
    "nights": NUMBERS,
    "time": tuple(TIMES),
    "day": tuple(SPOKEN_DAYS),
    "name": NAMES,
    "dish": tuple(PRICES),
    "place": tuple(DIRECTIONS),
}


def number_words(number: int) -> str:
    """A whole number below a million in words."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")
    size, word = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = number % size
    return f"{number_words(number // size)} {word}" + (f" {number_words(rest)}" if rest else "")
