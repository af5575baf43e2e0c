"""Plain English sentences of many subjects, for breadth of sounds and words beyond the desk."""

import random

from vivavoce.train.front_desk.normalising import number_words
from vivavoce.train.front_desk.words import listed


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
