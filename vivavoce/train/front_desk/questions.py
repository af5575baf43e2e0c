"""How guests ask a front desk for what it tells anybody: templates of the intents whose answer no booking changes.

One template between bars. `(a/b)` is a choice, `[a]` may be left out, `{slot}` is filled from `front_desk_words`.
"""

QUESTIONS: dict[str, str] = {
    "greeting": """
hello | hi | hi there | hello there | good morning | good afternoon | good evening | good day | hey there | hey
| hello again | hello, good (morning/evening) | hi, good (morning/afternoon) | good evening to you | morning
| hello, is anybody there? | hello, is this the front desk? | hi, am i speaking to the hotel?
| is this the Garden Hotel? | good morning, is this the reception? | hello, can you hear me? | hi, anybody there?
| hello, front desk? | good evening, can you help me? | hi, can you help me? | hello, i have a question
| hi, i need some help | could you help me[, please]? | excuse me, can i ask you something?
| a very good (morning/evening) to you | greetings | hello, i just arrived | hello hello | hi, nice to meet you""",
    "how_are_you": """
how are you? | how are you (today/this evening/this morning)? | how are you doing[ today]? | how is it going?
| hello, how are you? | hi, how are you doing? | how do you do? | how are things? | how have you been?
| are you well? | are you all right? | is everything all right with you? | how is your day? | how is your day going?
| how was your day? | good morning, how are you? | and how are you? | i'm fine, how are you?
| how do you feel today? | are you having a good day? | how are you feeling? | what's up? | how is everything?
| hope you are well | i hope you are doing well | how goes it? | are you doing all right?""",
    "identity": """
who are you? | what are you? | who am i talking to? | who am i speaking (to/with)? | what is your name?
| what's your name? | may i ask your name? | who is this? | who is speaking? | are you a (robot/machine/computer)?
| are you a real person? | am i talking to a machine? | am i talking to a (real person/human)? | do you have a name?
| what do they call you? | are you human? | tell me who you are | can you tell me your name?
| what should i call you? | is this a recording? | is that a real voice? | are you the receptionist?
| are you the manager? | introduce yourself[, please] | what kind of machine are you? | who is on the line?
| what is this?""",
    "help": """
what can you do? | what can i ask you? | what can you help me with? | how can you help me? | what do you do?
| what can i say? | what can you do for me? | what services do you offer? | what are my options? | help
| what do you know? | what can i ask? | tell me what you can do | what kind of questions can i ask?
| what else can you do? | what sort of things can you help with? | i do not know what to ask | how does this work?
| how do i use this? | what are you able to do? | can you explain what you do? | which questions do you answer?
| what is your job? | what things can you book? | what may i ask you about? | give me some help""",
    "restaurant_hours": """
when (do you/does the restaurant) open? | when (do you/does the restaurant) close? | what are your opening hours?
| what time does the restaurant open? | what time does the restaurant close? | until when is the restaurant open?
| are you open (today/tonight/now)? | are you open on {weekday}? | is the restaurant open on {weekday}?
| is the restaurant still open? | is the restaurant open now? | how late are you open? | how late can we eat?
| how long is the restaurant open? | when is the restaurant open? | can you tell me the opening hours?
| i would like to know your opening hours | when can we have dinner? | when can i eat? | what time is dinner?
| when is dinner served? | when do you serve (lunch/dinner)? | what are the hours of the restaurant?
| what time do you open [on {weekday}]? | what time do you close [on {weekday}]? | is the kitchen still open?
| when does the kitchen close? | till what time can we eat? | from when are you open? | do you open on {weekday}?
| can we still eat? | are you open every day? | are you closed on {weekday}? | at what hour do you close?""",
    "breakfast": """
when is breakfast? | what time is breakfast? | when is breakfast served? | what time is breakfast served?
| when do you serve breakfast? | when can i have breakfast? | when does breakfast (start/begin)?
| when does breakfast end? | what time does breakfast (start/begin)? | until when is breakfast served?
| until what time is breakfast? | how late can i have breakfast? | when can we get breakfast?
| can i still get breakfast? | is breakfast still on? | what are the breakfast hours?
| what are the breakfast times? | at what time can i have breakfast? | do you serve breakfast?
| is there breakfast in the morning? | tell me about breakfast | how long is breakfast served?
| from when is breakfast available? | can we have breakfast early? | what time can we come down for breakfast?
| how early can i get breakfast? | when should i come for breakfast? | when is breakfast over?""",
    "menu": """
what is on the menu? | what's on the menu[ (today/tonight)]? | what do you have to eat? | what can i eat?
| what can i eat here? | what food do you have? | what food do you serve? | what dishes do you have?
| can i see the menu? | could i have the menu[, please]? | may i see the menu[, please]? | the menu, please
| tell me about the menu | what do you serve? | what do you serve for dinner? | what meals do you have?
| what kind of food do you serve? | what is there to eat? | do you have a menu? | could you bring us the menu?
| can you tell me the menu? | what's for dinner[ tonight]? | what is for lunch? | what main courses do you have?
| read me the menu | we would like to see the menu | what are the dishes today? | which dishes do you offer?
| what are you cooking today? | what could we eat tonight? | what have you got to eat?
| i would like to see the menu""",
    "recommend": """
what do you recommend? | what would you recommend? | what can you recommend? | can you recommend (a dish/something)?
| could you recommend something? | what is good here? | what's good today? | what is the best dish?
| what is the special[ today]? | what's the special of the day? | do you have any specials? | what are the specials?
| what should i (eat/order/try)? | which dish is the best? | what is your favorite dish?
| what do most people order? | any recommendations? | what is the house special? | what would you eat?
| what is popular here? | what is the chef's special? | can you suggest something? | what do you suggest?
| i don't know what to order | i can't decide what to eat | help me choose a dish | what dish are you known for?
| what is the dish of the day? | what tastes best here? | which dish do you like best?""",
    "vegetarian": """
do you have anything vegetarian? | do you have vegetarian (food/dishes/options)? | what do you have without meat?
| i am a vegetarian | i'm vegetarian | i don't eat meat | i do not eat meat, what can i have?
| is there something vegetarian? | are there any vegetarian dishes? | what can a vegetarian eat here?
| have you got anything without meat? | which dishes are vegetarian? | which dishes have no meat?
| my wife is a vegetarian | my friend does not eat meat | we are vegetarians | do you have meals without meat?
| what are the vegetarian options? | something vegetarian, please | i need a vegetarian dish
| anything without meat? | is anything on the menu vegetarian? | do you cook for vegetarians?
| we would like something without meat | can i get a meal without meat? | i would like to eat vegetarian
| i'd prefer something without meat""",
    "price": """
how much is the {dish}? | what does the {dish} cost? | what is the price of the {dish}? | how much for the {dish}?
| how much does the {dish} cost? | what do you charge for the {dish}? | how much do you charge for the {dish}?
| how expensive is the {dish}? | is the {dish} expensive? | what's the price of the {dish}?
| the {dish}, how much is it? | can you tell me the price of the {dish}? | could you tell me what the {dish} costs?
| price of the {dish}[, please]? | what would the {dish} cost me? | how much would the {dish} be?
| how many euros is the {dish}? | what do i pay for the {dish}? | how much money is the {dish}?
| what's the {dish} going to cost? | i would like to know the price of the {dish}
| do you know how much the {dish} is? | tell me the price of the {dish} | the {dish}, what does it cost?
| how much will the {dish} be? | how much do i pay for the {dish}? | what is the cost of the {dish}?
| how dear is the {dish}? | what are you asking for the {dish}?""",
    "room_price": """
how much is a room? | what does a room cost? | how much does a room cost? | how much is a room for one night?
| what is the price of a room? | how much is it per night? | what is your room rate? | what are your room rates?
| how much is one night? | what do you charge for a room? | how much do you charge per night?
| how expensive are the rooms? | are the rooms expensive? | what does one night cost?
| what does it cost to stay here? | how much is a double room? | how much is a single room?
| can you tell me the price of a room? | what is the rate for a room? | how much would a room be?
| what would one night cost us? | i would like to know the price of a room | how much do i pay for a room?
| what's the nightly rate? | what do the rooms cost? | price of a room, please?
| is breakfast included in the room price?""",
    "bill": """
the bill, please | the check, please | can i have the bill[, please]? | could i have the bill[, please]?
| may i have the bill[, please]? | could we have the check[, please]? | can we get the bill[, please]?
| we would like to pay | i would like to pay[, please] | i'd like to pay now | can i pay[, please]? | could we pay?
| bring me the bill[, please] | could you bring us the bill? | we are ready to pay | we want to pay
| i want to pay now | let me have the bill | please bring the check | may we have the bill?
| could you make out the bill? | can you get me the bill? | i'll take the bill now | how much do we owe you?
| what do i owe you? | we'd like the bill[, please] | we're done, the bill please | i need the bill""",
    "pay_card": """
can i pay by card? | can i pay with a credit card? | do you take (credit cards/cards)?
| do you accept (credit cards/cards)? | is it possible to pay by card? | can i pay cash? | can i pay in cash?
| do you take cash? | do you accept cash? | can we pay with a card? | may i pay by card? | how can i pay?
| how can we pay? | which cards do you take? | is cash all right? | is card all right? | could i pay by credit card?
| do i have to pay cash? | i only have a card | i only have cash | what kind of payment do you take?
| can i use my credit card here? | do you take debit cards? | is a credit card okay? | can i pay with my phone?
| cash or card? | i have no cash, can i use a card?""",
    "directions": """
where is the {place}? | where's the {place}[, please]? | how do i get to the {place}?
| where can i find the {place}? | can you tell me where the {place} is? | could you tell me the way to the {place}?
| i am looking for the {place} | i'm looking for the {place} | which way is the {place}? | which way to the {place}?
| is there a {place} (here/nearby)? | do you have a {place}? | i can't find the {place} | i cannot find the {place}
| how can i get to the {place}? | how far is the {place}? | is the {place} far from here?
| show me the way to the {place} | can you show me the {place}? | what is the way to the {place}?
| where would i find the {place}? | i need to find the {place} | i need the {place} | the {place}, please?
| how do we get to the {place}? | do you know where the {place} is? | tell me where the {place} is
| where exactly is the {place}? | could you direct me to the {place}? | would you know where the {place} is?
| how do i find the {place}? | we are looking for the {place} | i want to go to the {place}
| please tell me where to find the {place}""",
    "wifi": """
do you have wifi? | is there wifi? | is the wifi free? | what is the wifi password? | what's the wifi password?
| how do i get on the wifi? | how do i connect to the wifi? | can i use the wifi?
| what is the password for the wifi? | do you have internet? | is there internet (here/in the rooms)?
| how can i get online? | i need the wifi password | can i have the wifi password[, please]?
| could you give me the wifi password? | is there free wifi? | can you tell me the password?
| what is the internet password? | the wifi password, please | i can't get on the internet
| how do i use the internet here? | does the room have wifi? | do the rooms have wifi? | my wifi is not working
| i would like to use the wifi | what is the password? | how does the wifi work? | what's the name of your wifi?
| i forgot the wifi password""",
    "check_in": """
when can i check in? | what time is check in? | when is check in? | what time can i check in?
| when can we check in? | from when can i check in? | how early can i check in? | when is my room ready?
| when will the room be ready? | what time will my room be ready? | when can i get my room?
| when can i have my key? | can i check in now? | can we check in early? | is it possible to check in early?
| at what time can we check in? | when does check in start? | what time can we get into our room?
| from what time can we check in? | i would like to know when i can check in | when can i move into my room?
| tell me the check in time | what is the check in time? | what's the earliest check in? | when may we check in?
| is my room ready? | when can i come to my room?""",
    "check_out": """
when do i have to check out? | what time is check out? | when is check out? | what time do i have to check out?
| when do we have to leave? | when must i leave the room? | what time must we leave the room?
| how late can i check out? | can i check out late? | is late check out possible? | until when can i stay?
| until when can i keep the room? | by when do i have to check out? | at what time do i need to check out?
| when should we check out? | when do i need to leave? | what is the check out time? | tell me the check out time
| what's the latest check out? | how long can i keep the room? | when do i have to be out of my room?
| when do i give back the key? | do we have to check out early? | can we stay a bit longer in the morning?
| what time do we need to be out? | by what time should i leave the room? | when do you need the room back?""",
    "taxi": """
can you call me a taxi? | could you call a taxi[, please]? | i need a taxi | i need a cab | please call me a taxi
| can i get a taxi? | could i get a cab? | would you call me a cab? | call a taxi[, please] | a taxi, please
| i would like a taxi | i'd like a taxi to the airport | we need a taxi to the (airport/station/center)
| could you order a taxi for us? | can you order me a taxi? | please get me a taxi | can you get us a cab?
| i want a taxi | order a taxi for me[, please] | could you arrange a taxi? | is it possible to get a taxi?
| where can i get a taxi? | how do i get a taxi? | i want to take a taxi | we'd like a cab[, please] | get me a cab
| would it be possible to call a taxi?""",
    "thanks": """
thank you | thanks | thank you very much | thanks a lot | many thanks | thank you so much | thanks very much
| thank you, that's very kind | that's very kind of you | great, thank you | perfect, thank you | wonderful, thanks
| okay, thank you | all right, thank you | good, thanks | lovely, thank you | thank you for your help
| thanks for your help | thank you, that helps | thanks, you have been very helpful | i appreciate it
| thank you, i appreciate it | that is very helpful, thank you | excellent, thank you | cheers | cheers, thanks
| thank you kindly | thanks ever so much | oh great, thanks | brilliant, thank you""",
    "goodbye": """
goodbye | bye | bye bye | goodbye, and thank you | thank you, goodbye | thanks, bye | see you | see you later
| see you soon | see you tonight | good night | have a nice day | have a good evening | that is all, goodbye
| that's all, thank you | no, that's all | no, that is everything | nothing else, thank you | no, nothing else
| that will be all | i have to go now | i must go, goodbye | okay, bye | all right, goodbye | take care
| until tomorrow | well, goodbye then | farewell | have a lovely day | no thanks, that was all | until next time""",
}


def listed(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
NAMES = listed(
    "Miller Baker Johnson Robinson Campbell Mitchell Anderson Thompson Harrison Watson Wilson Taylor Cooper Parker "
    "Fisher Murphy Kennedy Morgan Garcia Lopez Martinez Novak Peterson Hamilton Sullivan Bennett Douglas Webster "
    "Anna Emma Maria Olivia Sophia Victoria Jessica Patricia Daniel David Michael Benjamin Alexander Oliver Samuel "
    "Jonathan"
)
PRICES = {  # in euros; none that ends in -teen, which is too near to -ty by ear
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
SHORT_DISHES: dict[str, tuple[str, ...]] = {  # how else a guest may call it
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
PLACES: dict[str, tuple[str, ...]] = {  # what guests call them
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
DIRECTIONS = {  # the one way there
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
PARTIES: dict[str, tuple[str, ...]] = {  # how guests say how many they are
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
    """Each time of the clock as the desk says it, with the ways in which guests say it."""
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
WAYS: dict[str, dict[str, tuple[str, ...]]] = {
    "time": TIMES,
    "day": SPOKEN_DAYS,
    "people": PARTIES,
    "nights": STAYS,
    "dish": SHORT_DISHES,
    "place": PLACES,
}


def ways_to_say(slot: str, value: str) -> tuple[str, ...]:
    """How a guest may say one value of a slot."""
    return WAYS.get(slot, {}).get(value, (value,))


VALUES: dict[str, tuple[str, ...]] = {
    "people": NUMBERS,
    "nights": NUMBERS,
    "time": tuple(TIMES),
    "day": tuple(SPOKEN_DAYS),
    "name": NAMES,
    "dish": tuple(PRICES),
    "place": tuple(DIRECTIONS),
}
