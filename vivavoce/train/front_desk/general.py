"""Plain English sentences of many subjects, for breadth of sounds and words beyond the desk."""

import random

from vivavoce.train.front_desk.answers import number_words
from vivavoce.train.front_desk.questions import listed


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(" ".join(phrase.split()) for phrase in text.split("|"))


PEOPLE = listed(
    """
man woman boy girl child doctor teacher farmer driver sailor soldier captain judge nurse artist writer king queen
brother sister mother father uncle aunt cousin neighbor friend stranger student visitor worker guest officer
engineer lawyer hunter butcher tailor priest poet clerk banker shepherd thief witness scholar merchant gardener
carpenter musician actor player prisoner servant owner partner leader mayor senator scientist manager pilot waiter
cashier photographer journalist grandmother grandfather nephew niece daughter son husband wife baby customer caller
agent
"""
)
THINGS = listed(
    """
house garden river mountain forest road bridge village city market church school station window door table chair bed
lamp candle mirror clock watch ring coat dress shirt shoe hat glove basket bottle glass cup plate knife fork spoon
kettle oven fire stone rock leaf flower tree branch root grass field hill valley lake ocean island beach boat ship
train car truck wagon bicycle wheel engine machine tool hammer nail rope chain wire box bag letter paper book page
story song picture camera film radio telephone computer screen keyboard number message question answer problem
reason idea plan dream voice sound noise word language country law war peace army battle sword shield flag horse dog
cat bird fish sheep cow pig goat chicken duck eagle wolf bear fox mouse snake spider butterfly apple orange lemon
cherry grape bread butter cheese milk egg sugar salt pepper honey wine beer water coffee tea soup meat potato onion
carrot bean rice cloud storm thunder lightning shadow light color shape circle square corner edge surface wood metal
iron gold silver copper leather cotton wool silk brush pencil needle thread button pocket wallet key lock gate fence
wall roof floor ceiling stair kitchen bathroom bedroom hallway office factory hospital library museum theater prison
palace castle tower cottage tent cave desert jungle harbor airport account address agreement extension password
directory system service network mailbox menu option channel conference recording signal switch tone operator code
pound dollar cent ticket passport suitcase umbrella newspaper magazine calendar doctor medicine bandage thumb finger
shoulder elbow knee ankle forehead stomach lung bone treasure mystery accident adventure measure pleasure vision
division garage judge chance teacher future nature furniture thirst earth mouth health wealth truth youth month
breath cloth path bath feather weather brother rhythm throat throne ability absence advice afternoon agency ambition
analysis appetite argument article attempt attitude audience balance bargain behavior benefit birthday bottom
breakfast budget business campaign candidate career celebration century ceremony chapter character charity chemical
childhood choice citizen climate college comfort committee community company complaint concert condition confidence
connection contract conversation courage crisis criticism culture curtain damage danger deadline debate decision
degree delivery department description device dinner discovery disease distance document drama economy education
election electricity emergency emotion employer energy entrance environment equipment error evening evidence
exercise experience experiment failure fashion feature festival finance fortune freedom fuel funeral gallery gesture
government gravity guarantee guitar habit harvest history holiday horizon humor image impression improvement
industry injury insurance invitation journey justice kingdom knowledge ladder laughter lecture lesson liberty
lottery luggage lunch marriage memory midnight minute mixture moment muscle mustard neighborhood obligation occasion
opinion opportunity orchestra package painting partnership passage patience payment permission personality
philosophy physics poem poison policy politics population poverty power prayer prediction preparation pressure
principle prize procedure profit progress promise property proposal protest purpose quality quantity quarrel rainbow
reaction receipt recipe reference reflection region relief religion remedy reputation request research resource
responsibility reward risk routine safety salary sample sandwich satellite schedule science secret sentence shelter
signature silence situation society solution species speech strategy strength struggle success suggestion sunrise
surprise survey sympathy talent technology telescope temperature theory tournament tradition traffic tragedy
training transport trouble tunnel universe vacation variety vehicle version victory violin volume weakness weapon
wedding weekend welcome whistle wisdom yard zebra zone
"""
)
QUALITIES = listed(
    """
big small old new young long short tall wide narrow deep shallow high low hot cold warm cool wet dry clean dirty
bright dark light heavy soft hard smooth rough sharp dull loud quiet fast slow early late rich poor strong weak
happy sad angry afraid brave proud shy kind cruel honest clever foolish wise busy lazy hungry thirsty tired sick
healthy beautiful ugly strange common rare simple difficult easy dangerous safe empty full open closed broken whole
fresh stale sweet sour bitter salty red blue green yellow white black brown gray purple golden wooden ancient modern
foreign local public private secret famous unknown useful useless cheap expensive perfect terrible wonderful
ordinary curious gentle nervous silent hollow enormous tiny curly crooked frozen yellowish royal loyal joyful noisy
poisonous precious various serious usual unusual casual visible invisible possible impossible temporary permanent
available important successful
"""
)
DEEDS = _phrases(
    """
saw | found | lost | took | brought | carried | bought | sold | broke | fixed | built | opened | closed | moved | pushed
| pulled | lifted | dropped | threw | caught | held | kept | left | watched | heard | heard about | remembered | forgot
| knew | liked | loved | hated | feared | wanted | needed | used | washed | cleaned | painted | drew | wrote about
| read about | asked about | talked about | thought about | dreamed of | looked at | looked for | waited for | paid for
| sent | showed | offered | gave up | picked up | put down | turned over | covered | filled | emptied | burned | cut
| measured | weighed | counted | shared | hid | discovered | followed | led | stopped | started | finished | changed
| improved | ruined | saved | borrowed | returned | described | explained | admired | chose | refused | accepted
| expected | noticed | recognized | touched | tasted | smelled | cooked | ate | wrapped | tied | shook | squeezed
| chased | guarded | protected | attacked | destroyed | repaired | replaced | collected | examined | tested | checked
| joined | judged | enjoyed | avoided | poisoned | measured again | treasured | envied | owed | allowed | announced
"""
)
MOVES = listed(
    """
walked ran drove sailed climbed jumped swam flew crawled marched wandered traveled hurried returned moved went came
stayed waited slept worked played sang danced laughed cried shouted whispered prayed fought rested lived fell stood
sat listened learned taught smoked paused turned escaped vanished appeared arrived departed
"""
)
WHERE = _phrases(
    """
in the garden | by the river | near the old church | behind the house | under the bridge | at the station | on the
hill | across the street | through the forest | around the corner | along the beach | in the middle of the night |
before the storm | after the meeting | during the war | at the end of the day | on a cold morning | in the year of
the flood | beside the fire | above the clouds | below the surface | between two tall trees | outside the city |
inside the castle | over the mountains | against the wind | without a word | with great pleasure | for the first
time | at half past nine | every single day | last summer | next week | yesterday evening | on Thursday | in January
| in the month of August | from morning until night | once again | toward the south | beyond the fence | among
strangers | at the top of the stairs | in front of the judge | on the other side | for several hours | as usual | by
mistake | in a hurry | on purpose | at the edge of the desert
"""
)
HOW = listed(
    """
slowly quickly quietly loudly carefully suddenly finally gently bravely foolishly rarely often always never usually
certainly probably perhaps already still almost hardly simply clearly strangely happily sadly angrily together alone
yesterday today tomorrow tonight soon later immediately occasionally exactly eventually twice everywhere
"""
)
OPENINGS = _phrases(
    """
i think that | she said that | he believes that | we know that | they told me that | it seems that | everybody hopes
that | you should know that | i was surprised that | nobody noticed that | the newspaper wrote that | my mother
always said that | there is no doubt that | i am not sure whether | it is possible that | perhaps | unfortunately |
of course | in the end | as you see | please remember that | i regret to say that | let us suppose that | i would be
glad if | what a pity that
"""
)
ORDERS = _phrases(
    """
please enter | please hold | press | dial | open | close | bring me | take | do not touch | look at | listen to |
forget | remember | keep | send | leave | give me | show me | choose | try | read | carry | find | wait for | ask
about | think about | clean | repair | move | please record | change
"""
)
SPECIALS = (
    "the number you have dialed is not in service",
    "all of our operators are busy, please stay on the line",
    "your call is important to us and will be answered in the order it was received",
    "please enter your password, followed by the pound key",
    "she sells sea shells by the sea shore",
    "the quick brown fox jumps over the lazy dog",
    "how much wood would a woodchuck chuck",
    "the birch canoe slid on the smooth planks of the pier",
)


def general_sentences(count: int, seed: int) -> list[str]:
    """Distinct plain sentences: tales, orders, questions, opinions, numbers."""
    source = random.Random(f"general {seed}")
    kinds = (_tale, _tale, _move, _opinion, _order, _question, _number, _comparison, _list)
    found = dict.fromkeys(_written(sentence) for sentence in SPECIALS[:count])
    while len(found) < count:
        found.setdefault(_written(source.choice(kinds)(source)))
    return list(found)


def _written(text: str) -> str:
    text = " ".join("I" if word == "i" else word for word in text.split())
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")


def _someone(source: random.Random) -> str:
    owner = source.choice(("the", "the", "a", "my", "your", "his", "her", "our", "their", "every", "this", "that"))
    quality = f"{source.choice(QUALITIES)} " if source.random() < 0.35 else ""
    return _noun(owner, quality + source.choice(PEOPLE))


def _something(source: random.Random) -> str:
    owner = source.choice(("the", "the", "a", "my", "your", "his", "her", "our", "their", "another", "no", "some"))
    quality = f"{source.choice(QUALITIES)} " if source.random() < 0.5 else ""
    return _noun(owner, quality + source.choice(THINGS))


def _noun(owner: str, rest: str) -> str:
    return f"{'an' if owner == 'a' and rest[0] in 'aeiou' else owner} {rest}"


def _tale(source: random.Random) -> str:
    ending = f" {source.choice(WHERE)}" if source.random() < 0.5 else ""
    how = f"{source.choice(HOW)} " if source.random() < 0.25 else ""
    return f"{_someone(source)} {how}{source.choice(DEEDS)} {_something(source)}{ending}"


def _move(source: random.Random) -> str:
    how = f" {source.choice(HOW)}" if source.random() < 0.6 else ""
    return f"{_someone(source)} {source.choice(MOVES)}{how} {source.choice(WHERE)}"


def _opinion(source: random.Random) -> str:
    matter = _tale(source) if source.random() < 0.5 else f"{_something(source)} is {source.choice(QUALITIES)}"
    return f"{source.choice(OPENINGS)} {matter}"


def _order(source: random.Random) -> str:
    ending = f" {source.choice(WHERE)}" if source.random() < 0.5 else ""
    return f"{source.choice(ORDERS)} {_something(source)}{ending}"


def _question(source: random.Random) -> str:
    opening = source.choice(("where is", "who has", "have you seen", "why do you want", "how old is", "what about"))
    if source.random() < 0.5:
        return f"{opening} {_something(source)}?"
    asked = source.choice(("did you hear that", "when did you learn that", "who told you that", "is it true that"))
    return f"{asked} {_someone(source)} {source.choice(MOVES)} {source.choice(WHERE)}?"


def _number(source: random.Random) -> str:
    number = number_words(source.choice((source.randrange(20), source.randrange(100), source.randrange(10_000))))
    return source.choice(
        (
            f"{_someone(source)} counted {number} {source.choice(THINGS)}s {source.choice(WHERE)}",
            f"you have {number} new messages in {_something(source)}",
            f"the answer to {_something(source)} is {number}",
            f"it costs {number} dollars to repair {_something(source)}",
            f"please call extension {' '.join(number_words(source.randrange(10)) for _ in range(4))}",
        )
    )


def _comparison(source: random.Random) -> str:
    pattern = source.choice(("is not as {} as", "looks more {} than", "was just as {} as", "became less {} than"))
    return f"{_something(source)} {pattern.format(source.choice(QUALITIES))} {_something(source)}"


def _list(source: random.Random) -> str:
    first, second, third = source.sample(THINGS, 3)
    return (
        f"{source.choice(('there was', 'i need', 'we found', 'she packed'))} {_noun('a', first)}, {second} and {third}"
    )


WORDS: dict[str, tuple[str, ...]] = {
    "city": listed("London Paris Berlin Rome Madrid Vienna Boston Chicago Tokyo Sydney Lisbon Dublin Moscow"),
    "country": listed("France Germany Italy Spain China Japan India Canada Brazil Mexico Egypt Norway"),
    "animal": listed("dog cat horse elephant tiger rabbit penguin spider eagle dolphin cow monkey snake"),
    "sport": listed("football tennis golf hockey cricket basketball rugby chess boxing baseball"),
    "science": listed("physics chemistry biology history algebra geometry medicine astronomy economics law"),
    "thing": listed(
        "bicycle ladder hammer mirror guitar laptop jacket blanket carpet window engine battery camera umbrella candle"
    ),
    "relative": listed("brother sister mother father uncle aunt cousin neighbor teacher boss friend"),
    "job": listed("doctor lawyer pilot farmer dentist plumber teacher soldier painter singer nurse"),
    "planet": listed("Mars Venus Jupiter Saturn Mercury Neptune"),
    "color": listed("red blue green yellow purple orange white black brown silver"),
    "season": listed("spring summer autumn winter"),
    "weather": listed("rain snow sunshine wind fog thunder storm frost"),
    "verb": listed("sing dance swim climb draw paint run fly drive write cook jump"),
    "big": ("two hundred", "five thousand", "a million", "sixty three", "nine hundred", "forty", "ninety nine"),
    "small": listed("three five seven nine eleven twelve twenty thirty"),
    "ware": (
        *("a pair of shoes", "a new phone", "some stamps", "a newspaper", "a winter coat", "a plane ticket"),
        *("some flowers", "a fishing rod", "a bag of cement", "two light bulbs", "a hat", "a used car"),
    ),
    "chore": (
        *("fix my car", "repair my phone", "cut my hair", "wash my windows", "do my homework"),
        *("water my plants", "paint my house", "translate this letter", "feed my cat", "carry my piano"),
        *("sew on a button", "charge my scooter", "check my blood pressure", "sell my house"),
    ),
}

OUTSIDE = """
what is the weather like[ today]? | will there be {weather} tomorrow? | is there {weather} in {city}?
| it never stops raining in {city} | how cold is it in {city}? | do you think there will be {weather} in {season}?
| the {weather} was terrible last {season} | who won the {sport} game? | who plays {sport} tonight?
| i like to play {sport} | do you like {sport}? | our team lost the {sport} match | how do you play {sport}?
| my {relative} is very good at {sport} | what is the capital of {country}? | how many people live in {country}?
| who is the president of {country}? | when did the war in {country} end? | i have never been to {country}
| the people of {country} voted for a new government | is {country} bigger than {country}?
| what language do they speak in {country}? | prices in {country} went up again | what do you think of the government?
| who will win the election? | taxes are too high these days | tell me a joke | tell me a story about a {animal}
| sing me a song about {season} | say something funny | what do {animal}s eat? | how long does a {animal} live?
| my {animal} is called Peanut | can a {animal} {verb}? | the {animal} chased the {animal} over the hill
| a {color} {animal} sat on the {thing} | we saw a {animal} in the forest | how far away is {planet}?
| how many moons does {planet} have? | is there water on {planet}? | {planet} is a cold planet
| what is {small} times {small}? | what is {small} plus {big}? | divide {big} by {small} | count to {big}
| what is the square root of {big}? | how many grams are in a pound? | how tall is the highest mountain?
| who invented the {thing}? | how does a {thing} work? | my {thing} is broken | where did you buy that {thing}?
| the {thing} fell on the floor | i left my {thing} on the bus | his {thing} is bigger than mine
| a {color} {thing} costs too much | my {relative} is a {job} | my {relative} works in {city}
| my {relative} wants to {verb} | i am a {job} from {city} | did you know that my {relative} can {verb}?
| when i was a child i wanted to be a {job} | the {job} told me to rest | i study {science} at the university
| explain {science} to me | what is the most important idea in {science}? | why is the sky {color}?
| my favorite color is {color} | she painted the door {color} | the {color} car is faster | who wrote that book?
| what is the meaning of life? | do you believe in ghosts? | have you read the news today?
| what did you do last {season}? | i will go to {city} next {season} | the train from {city} was late again
| can you {chore}? | could you {chore}[, please]? | i need someone to {chore} | how long does it take to {chore}?
| would you please {chore}? | i forgot to {chore} | who could {chore} for me? | my {relative} will {chore} next week
| do you sell {ware}? | i would like to buy {ware} | where can i buy {ware}? | i am looking for {ware}
| how much is {ware}? | i lost {ware} yesterday | can you order {ware} for me? | i want to return {ware}
| she gave me {ware} for my birthday | what does {ware} cost? | turn on the {thing} | turn off the radio
| play some music | play the song from last {season} | set the heating to {small} degrees | open the {thing}
| call my {relative} | send a message to my {relative} | what is my {relative} doing? | write a letter to the {job}
| i have a headache | my tooth hurts | i need a {job} | is there a {job} in the building? | i broke my arm
| what year is it? | what is the date today? | how old are you? | where were you born? | do you have children?
| are you married? | do you like {color} {thing}s? | can you {verb}? | let us {verb} together
| i cannot {verb} very well | where is {city}? | how far is it to {city}? | when does the next plane to {city} leave?
| book me a flight to {city} | i need a ticket to {city} | i would like to rent a car in {city}
| can i rent a {thing}? | how do i get to {city}? | i would like to book a haircut for {small} o'clock
| a ticket for the opera at {small} o'clock, please | do you have a table made of wood?
| i bought a {color} table for {big} euros | my table at home has {small} legs
| there is no room in my bag for a {thing} | how many rooms does the museum have? | the bill was passed by parliament
| my {relative} is called Bill | the chicken crossed the road | salmon swim up the river in {season}
| how do i grow tomatoes? | how do you bake bread? | what is cheese made of? | my {relative} cooks better than you
| the password of my computer is too long | can you change money? | can you exchange {big} dollars? | i need a tailor
| where can i wash my clothes? | do you clean suits? | the {relative} of my {relative} lives in {city}
| the train was full of {animal}s | nobody listens to the {job} | {big} people came to the concert
| the old {job} walked slowly home | we sold {big} {thing}s last {season} | it was a dark night in {city}
| once upon a time there was a {color} {animal} | stop the {thing} | i do not like {season}
| she reads about {science} | if i were a {job} i would {verb} all day | my phone number ends in {small}
| press the {color} button {small} times | the moon is full tonight | they built a bridge across the river
| the {animal} is sleeping under the {thing} | have you ever seen a {color} {animal}? | why do {animal}s {verb}?
| my shoes are wet | nothing ever happens in {city} | the stock market fell by {small} percent
| is the {job} coming today? | he has {big} {color} {thing}s in his shop | do you remember the {season} in {city}?
| two {animal}s and a {thing} | the lesson on {science} starts soon | i dreamed of a {color} {thing}
| what would you do with {big} dollars? | how much does a {animal} weigh? | the {weather} broke our {thing}
| i will teach you to {verb} | please {verb} for me | read me the news from {country} | blah blah blah
| one two three four five | la la la la | testing, one two three | no no no, not like that | i think therefore i am
| to be or not to be | the quick brown fox jumps over the lazy dog | my head is spinning | we are going to the movies
| the film was much too long | i would rather stay at home with my {animal} | that {job} charged me {big} euros
| the {country} team plays in {city} | learn {science} in {small} days | do you want to buy my {thing}?
| is it true that {animal}s can {verb}? | there is a {animal} in my {thing} | what is the best way to {verb}?
| can you lend me {big} euros? | i need a loan from the bank | where is my {relative}? | who is your favorite {job}?
| the {planet} mission was a success | a {job} and a {animal} walk into a house | how do you spell {city}?
| what rhymes with {color}? | i was in {city} when the {weather} came | is {science} difficult?
| how many {thing}s do you own? | what time is it in {city}? | it takes {small} hours to drive to {city}
"""
