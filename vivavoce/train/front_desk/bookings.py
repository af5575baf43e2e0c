"""How guests book, order, answer the desk's questions and ask back: templates of the intents that need or make memory.

One template between bars. `(a/b)` is a choice, `[a]` may be left out, `{slot}` is filled from `front_desk_words`.
"""

import itertools
import re
from collections.abc import Iterator

from vivavoce.train.front_desk.booking_cores import BOOKING_CORES
from vivavoce.train.front_desk.question_cores import QUESTION_CORES

BOOKINGS: dict[str, str] = {
    "table": """
a table for {people}[, please] | a table for {people} at {time}[, please] | a table for {people} {day} at {time}
| i would like a table for {people}[, please] | i'd like a table for {people} at {time} | a table for {time}, please
| i would like to book a table[, please] | i'd like to reserve a table | can i book a table?
| could we have a table? | can i book a table for {people}? | could i book a table for {people} at {time}[, please]?
| do you have a table free? | can we have a table for {people}? | do you have a table for {people}?
| do you have a table for {people} at {time}? | i want to book a table | i want to book a table for {people}
| i want to book a table {day} | a table, please | i would like to book a table for {people} at {time}
| i'd like to book a table for {people} {day} at {time} | we would like a table | we would like a table for {people}
| we need a table for {people} at {time} | we need a table {day} at {time} for {people} | table for {people}, please
| table for {people} at {time} | could you book us a table for {people}? | is there a table free {day}?
| is there a table free at {time}? | can i get a table at {time}? | can i reserve a table for {people}?
| could i reserve a table for {people} at {time}? | i'd like to make a reservation
| i'd like to make a reservation for {people} | can i make a reservation {day}?
| a reservation for {people} at {time}[, please] | i want to make a reservation for {people} at {time}
| we are {number}, do you have a table? | there are {number} of us, can we have a table? | we want to eat {day}
| we would like to come for dinner {day} at {time} | a table at {time} for {people}[, please]
| a table {day}, please | book a table for {people}[, please] | book a table for {people} at {time}[, please]
| book me a table {day} at {time} | please reserve a table for {people} at {time}
| please book a table for {people} {day} | have you got a table for {people}?
| i need a table for {people} at {time}, the name is {name} | a table for {people} at {time} for {name}, please
| my name is {name}, i would like a table for {people} at {time} | table for {people} at {time}, name of {name}
| can i book a table for {people} at {time} under {name}? | this is {name}, a table for {people} at {time}, please
| could i have a table for {people} {day}? | i'd like to book for dinner
| may i book a table for {people} at {time}? | would you have a table for {people} at {time}?
| can you fit us in at {time}? we are {number}""",
    "give_people": """
{people} | {people}, please | for {people} | for {people}, please | we are {number} | there are {number} of us
| we will be {number} | it's for {people} | it is for {people} | there will be {number} of us
| a table for us, we are {number} | make it {number} people | {number} people in all | {number} people, please
| i think {number} of us | probably {number} people | we are {number} people | about {number} people
| {number} in total | we'll be {number} | oh, {number} | just {number} people | party of {number}
| that would be {number} | {number} adults | well, {number} of us | let's say {number} of us""",
    "give_time": """
{time} | {time}, please | at {time} | at {time}, please | around {time} | about {time} | at about {time}
| let's say {time} | let us say {time} | we will come at {time} | we would like to come at {time} | for {time}
| is {time} all right? | would {time} be possible? | can we come at {time}? | how about {time}?
| {time} would be good | {time} if possible | maybe {time} | i think {time} | {time} is fine | make it {time}
| i would say {time} | we can be there at {time} | could we come at {time}? | what about {time}?
| preferably at {time} | say {time}""",
    "room": """
i would like a room[, please] | i'd like to book a room | i need a room | can i book a room?
| do you have a room free? | do you have any rooms? | a room for {nights}[, please]
| i would like a room for {nights} | i need a room for {nights} | i'd like to book a room for {nights}[, please]
| can i have a room for {nights}? | do you have a room for {nights}? | could i book a room for {nights}?
| we need a room for {nights} | we would like a room | is there a room free? | a double room for {nights}[, please]
| a single room for {nights}[, please] | i want to book a room | i want to book a room for {nights}
| i want to stay for {nights} | we would like to stay for {nights} | can we stay for {nights}?
| i'd like to stay {nights} | have you got a room for {nights}? | a room, please
| i am looking for a room for {nights} | book a room for {nights}[, please] | please book me a room for {nights}
| can i reserve a room for {nights}? | i'd like to reserve a room | is it possible to stay for {nights}?
| do you have a double room? | i'm looking for a room | could we have a room for {nights}[, please]?
| a room for {nights}, my name is {name} | i'd like a room for {nights}, the name is {name}
| my name is {name} and i need a room for {nights} | can i have a room for {nights} under the name {name}?
| have you any vacancies? | do you have any vacancies? | could you book me a room for {nights}?""",
    "give_nights": """
{nights} | {nights}, please | for {nights} | for {nights}, please | just {nights} | only {nights} | {number}
| {number}, please | i will stay {nights} | we will stay {nights} | i'm staying {nights}
| we are staying for {nights} | i'd like to stay {nights} | it's for {nights} | about {nights} | i think {nights}
| maybe {nights} | {nights} in all | let's say {nights} | make it {nights} | probably {nights}
| {nights} would be good | we need it for {nights} | i want to stay {nights} | {nights} in total""",
    "give_name": """
{name} | {name}, please | my name is {name} | the name is {name} | it's {name} | it is {name} | i am {name}
| i'm {name} | under {name} | under {name}, please | the name's {name} | my name's {name} | on the name of {name}
| {name} is my name | that would be {name} | put it under {name} | you can put it under {name} | for {name}
| my last name is {name} | my family name is {name} | call me {name} | this is {name} | just write {name}
| name is {name} | the name would be {name} | please put {name} | it's under the name {name}""",
    "cancel": """
i want to cancel my booking | i would like to cancel[, please] | i need to cancel my reservation
| cancel my booking[, please] | please cancel my (booking/reservation) | can i cancel my booking?
| could you cancel my reservation? | cancel it, please | i have to cancel | can you cancel it?
| i'd like to cancel the booking | we want to cancel our booking | we have to cancel the reservation
| cancel the reservation | i'm afraid i have to cancel | please cancel that | sorry, we can't come, please cancel
| i do not need the booking any more | we cannot come | i don't want the booking | forget the booking
| could i cancel that? | scrap my booking, please | i must cancel | drop my reservation, please
| we need to cancel[, sorry] | may i cancel my booking?""",
    "order": """
i would like the {dish}[, please] | i'd like the {dish}[, please] | i'll have the {dish}[, please]
| i will take the {dish} | can i have the {dish}[, please]? | could i have the {dish}[, please]?
| may i have the {dish}[, please]? | i'll take the {dish} | the {dish}, please | the {dish} for me, please
| one {dish}, please | i want the {dish} | can i get the {dish}? | could i get the {dish}[, please]?
| bring me the {dish}[, please] | for me the {dish} | i would like to order the {dish}
| i'd like to order the {dish} | i want to order the {dish} | can i order the {dish}? | i'm going to have the {dish}
| give me the {dish}[, please] | let me have the {dish} | i'd love the {dish} | i think i'll have the {dish}
| could you bring me the {dish}? | one {dish} for me | i'm having the {dish} | then i'll have the {dish}
| we'll have one {dish} | a {dish} for me, please""",
    "wake_up": """
can you wake me at {time}? | could you wake me up at {time}[, please]? | please wake me at {time}
| wake me at {time} | wake me up at {time}[, please] | i would like a wake up call at {time}
| i'd like a wake up call at {time} | can i have a wake up call at {time}? | a wake up call at {time}[, please]
| i need a wake up call at {time} | could i get a wake up call for {time}? | i want to be woken at {time}
| would you wake us at {time}? | please call me at {time} in the morning | can you ring me at {time} in the morning?
| i need to get up at {time} | i have to get up at {time}, can you wake me? | wake us at {time}, please
| set a wake up call for {time} | can you set an alarm for {time}? | i must be up at {time}
| could you call my room at {time} tomorrow? | give me a wake up call at {time} | please make sure i am up at {time}
| can we get a wake up call at {time}? | call me at {time} so that i wake up""",
    "repeat": """
say that again[, please] | can you say that again? | could you say that again[, please]? | pardon? | pardon me?
| sorry? | what did you say? | sorry, what did you say? | could you repeat that[, please]? | can you repeat that?
| please repeat that | repeat that, please | once more, please | one more time, please | again, please
| i did not hear you | i didn't hear that | i didn't catch that | sorry, i did not catch that | come again?
| what was that? | sorry, what was that? | i beg your pardon? | would you repeat that?
| excuse me, what did you say? | can you repeat what you said? | i missed that | say it again
| could you say it once more? | what? | tell me again | would you mind saying that again? | i'm sorry, say again?
| can i hear that again?""",
    "memory_people": """
how many people did i say? | how many did i say? | for how many people did i book? | for how many did i book?
| how many people is my table for? | how many people did i book for? | how many of us did i say? | how many are we?
| for how many is the table? | what number of people did i give you? | do you remember how many people i said?
| how big is my table? | how many people was that for? | can you tell me how many people i said?
| how many guests did i say? | how many people are on my booking? | how many persons did i say?
| how many people did i tell you? | remind me how many people i said | for how many people is my booking?
| how many people do you have down? | did i tell you how many people? | and how many people was it?
| how many seats did i book? | how many people did we say?""",
    "memory_time": """
what time did i say? | what time did i book? | when is my table? | at what time did i book?
| what time is my booking? | what time is my table? | when did i book? | which time did i give you?
| do you remember the time i said? | for what time did i book? | what was the time? | what time did i give you?
| when did i say? | what time did i tell you? | can you tell me what time i said? | what time is my reservation?
| when is my reservation? | for when is the table? | remind me what time i said | at what time is our table?
| what time do you have for me? | what time was it again? | when are we coming? | when did i say we would come?
| what time did we say?""",
    "memory_name": """
what name did i give? | what name did i say? | what is my name? | what's my name? | do you remember my name?
| under what name did i book? | which name did i give you? | whose name is on the booking?
| what name is the booking under? | can you tell me my name? | do you know my name? | what name do you have?
| what name is it under? | who did i say i am? | under which name is my table? | remind me what name i gave
| what did i say my name was? | what was the name? | what name did i tell you? | did i give you my name?
| which name is it under? | what name did you write down? | say my name | do you still know my name?
| in whose name is the reservation?""",
    "memory_nights": """
how many nights did i say? | for how many nights did i book? | how many nights did i book? | how long am i staying?
| how many nights is it for? | how many nights do i stay? | how long did i say i would stay?
| how many nights is my booking? | do you remember how many nights i said? | how long is my stay?
| how many nights do you have for me? | for how long did i book? | how many nights did i tell you?
| can you tell me how many nights i said? | how many nights was it? | for how many nights is my room?
| how long did i book the room? | remind me how many nights | how many nights are we staying?
| how many nights did we say? | for how long is my room? | how long do we stay? | what did i say, how many nights?
| how long was my stay again? | how many nights have i booked?""",
    "memory_order": """
what did i order? | what was my order? | what have i ordered? | which dish did i order? | what dish did i order?
| do you remember my order? | do you remember what i ordered? | can you tell me what i ordered?
| what did i ask for? | what did i say i would eat? | what am i having? | what am i getting?
| remind me what i ordered | what food did i order? | what was it that i ordered? | what is my order?
| what did i choose? | what's my order? | could you tell me my order? | what do you have as my order?
| which dish am i getting? | what did i pick? | what did we order? | what meal did i order? | tell me what i ordered""",
}


OPENINGS: dict[str, str] = {
    "clause": """
can you tell me ~? | could you tell me ~? | can you tell us ~? | would you tell me ~? | do you know ~?
| do you happen to know ~? | would you happen to know ~? | i would like to know ~ | i'd like to know ~
| i want to know ~ | i need to know ~ | i was wondering ~ | i wonder ~ | we were wondering ~ | may i ask ~?
| can i ask ~? | could i ask you ~? | i wanted to ask ~ | any idea ~? | have you any idea ~? | please tell me ~
| tell me ~ | tell me please, ~? | let me know ~ | i am not sure ~ | i don't know ~ | we would like to know ~
| could you let me know ~? | i have to find out ~ | you don't know ~, do you?""",
    "favour": """
can you ~? | could you ~? | would you ~? | will you ~? | can you please ~? | could you please ~?
| would you please ~? | please ~ | ~, please | ~ | ~ now, please | i would like you to ~ | i want you to ~
| i'd like you to ~ | is it possible for you to ~? | would you be so kind and ~? | be so kind and ~
| can somebody ~? | could someone ~? | i need you to ~ | if you could ~, please | i wanted to ask you to ~
| do you think you could ~? | just ~, please""",
    "deed": """
can i ~? | could i ~? | may i ~? | can we ~? | could we ~? | may we ~? | i would like to ~ | i'd like to ~
| i want to ~ | we would like to ~ | we'd like to ~ | we want to ~ | i need to ~ | we need to ~ | i have to ~
| is it possible to ~? | would it be possible to ~? | i was hoping to ~ | we were hoping to ~ | i am calling to ~
| i'm here to ~ | i'd love to ~ | am i able to ~? | i wish to ~ | let me ~ | how can i ~? | is there a way to ~?
| i would love to ~, please""",
    "thing": """
can i have ~? | could i have ~? | may i have ~? | can we have ~? | could we have ~? | may we have ~? | can i get ~?
| could i get ~? | can we get ~? | could we get ~? | i would like ~ | i'd like ~ | i'd like ~, please
| we would like ~ | we'd like ~ | i want ~ | we want ~ | i need ~ | we need ~ | i would love ~ | i'd love ~
| i could use ~ | ~, please | ~ | could you give me ~? | can you get us ~? | could you get me ~? | please give me ~
| please get me ~ | let me have ~ | let us have ~ | i am after ~ | i was hoping for ~ | is it possible to have ~?
| would it be possible to get ~? | we could do with ~ | get me ~, please""",
    "subject": """
~ | ~, please | ~? | what about ~? | and ~? | what can you tell me about ~? | tell me about ~
| i have a question about ~ | a question about ~ | can i ask about ~? | it's about ~ | i am calling about ~
| something about ~ | how about ~? | could you tell me about ~? | i need to know about ~
| i would like to know about ~ | about ~""",
    "whole": "~",
}
CORES = QUESTION_CORES | BOOKING_CORES
SAME = {  # words that make no other phrasing of one
    **dict.fromkeys(("could", "may", "would", "will"), "can"),
    **{"we": "i", "us": "me", "our": "my", "we'd": "i'd", "i'll": "i can", "we'll": "i can", "i'd": "i can"},
    **{
        "what's": "what is",
        "where's": "where is",
        "name's": "name is",
        "i'm": "i am",
        "it's": "it is",
        "we're": "i am",
    },
    **{"can't": "cannot", "don't": "do not", "didn't": "did not"},
}
POLITE = frozenset(("please", "um", "uh", "sorry", "hello", "hi", "well", "okay", "so", "oh", "and"))
LONG = 5  # words from which a phrasing that differs in one word only is the same one


def phrasings(text: str) -> list[str]:
    """The templates between bars."""
    return [" ".join(template.split()) for template in text.split("|")]


def composed(intent: str) -> list[str]:
    """Every opening of each kind before every core of that kind."""
    found: dict[str, None] = {}
    for kind, cores in CORES[intent].items():
        for opening, core in itertools.product(phrasings(OPENINGS[kind]), phrasings(cores)):
            found.update(dict.fromkeys(expanded(opening.replace("~", core))))
    return list(found)


def expanded(template: str) -> Iterator[str]:
    """A template with each of its choices made, and optional parts there and not."""
    found = re.search(r"(\s*)\[([^\]]*)\]|\(([^)]*)\)", template)
    if found is None:
        yield " ".join(template.split()).replace(" ,", ",")
        return
    ways = found[3].split("/") if found[3] is not None else ("", found[1] + found[2])
    for way in ways:
        yield from expanded(template[: found.start()] + way + template[found.end() :])


def plain_words(phrasing: str) -> tuple[str, ...]:
    """What tells a phrasing from another: its words without politeness, "could we" being no other than "can I"."""
    words = re.sub(r"[^\w'{} ]", " ", phrasing.lower()).split()
    plain = " ".join(SAME.get(word, word) for word in words if word not in POLITE)
    return tuple(plain.replace("{number}", "{people}").split())


class Near:
    """Knows which phrasings are no more than copies of some given ones."""

    def __init__(self, templates: list[str]) -> None:
        every = {plain_words(way) for template in templates for way in expanded(template)}
        self._same = every
        self._shorter = {short for words in every if len(words) > LONG for short in _one_left_out(words)}
        self._gapped = {gapped for words in every if len(words) >= LONG for gapped in _one_hidden(words)}

    def __contains__(self, phrasing: str) -> bool:
        words = plain_words(phrasing)
        if words in self._same or words in self._shorter:
            return True
        if len(words) < LONG:
            return False
        return any(gapped in self._gapped for gapped in _one_hidden(words)) or any(
            len(short) >= LONG and short in self._same for short in _one_left_out(words)
        )


def _one_left_out(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [words[:place] + words[place + 1 :] for place in range(len(words))]


def _one_hidden(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [(*words[:place], "", *words[place + 1 :]) for place in range(len(words))]
