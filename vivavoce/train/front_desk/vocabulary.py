"""Words of everyday English beyond those of the other sentences, strung together: for a voice that is to say anything.

Such strings mean nothing; they teach how letters sound, and how one word runs into the next.
"""

import random

from vivavoce.train.front_desk.questions import listed

WORDS = listed(
    """
about above accept according account across action active actual address admit adult advance advantage affair affect
afford agree ahead aim air alive allow almost although among amount amuse anchor angle animal announce annual anxious
anybody anyone anything anyway apart apology appeal appear apply appoint approach approve area argue arm arrange
arrest arrow aside asleep assist assume attach attend attract author average awake award aware awful awkward bake ball
band bank bare bark base basic battery beach beam beard beat because become before beg begin behave behind believe
bell belong below belt bench bend beneath berry beside best better between beyond bind birth bite blame blanket bleed
bless blind block blood blow board boil bold border bore boring borrow boss both bother bounce bow bowl brain brand
brass breeze brick bride brief broad broadcast bubble bucket bug bulb bullet bunch burn burst bury bush cabin cable
cage cake calm camel camp cancel candy canvas cap capable capital card care careful cargo carpet cart carve case cash
cast cattle cause cease celebrate cell certain chalk challenge champion chapel charge charm chart cheat cheek cheer
chest chew chief chimney chin chip chocolate chop chorus cigarette claim class claw clay clever click cliff climb
cling clinic coach coal coast coin collapse collar colony column combine come comment commit compare compete complain
complete complex compose concern conclude concrete conduct confess confirm confuse congratulate connect conscious
consider consist constant construct contact contain content contest continue control convenient convince copy cord
core corn correct cost cough could council count couple course court cover crack craft crash crawl crazy cream create
creature credit creep crew crime criminal crop cross crowd crown crush cry cube cure curl current curse curve cycle
daily damp dance dare data date dawn dead deaf deal dear death debt decade decay deceive decent decide declare decline
decorate decrease deer defeat defend define delay delicate delight deliver demand dense dentist deny depend deposit
depth desert deserve design desire desk despair despite detail detect determine develop devil diamond dictionary diet
differ dig dinner dip direct disagree disappear disappoint discount discuss dish dismiss display distant distinct
district disturb dive divide dock dominate donkey double doubt downstairs dozen drag drain draw drift drill drink
drive drop drown drug drum due dust duty dwell each eager ear earn ease east echo educate effect effort eight either
elastic elect element eleven else embarrass employ enable encourage end enemy enforce engage enough ensure enter
entertain enthusiasm entire envelope equal escape essential establish estimate even event ever everyone evil exact
example excellent except exchange excite excuse exist exit expand expense expert explode explore export expose express
extend extra extreme eye fabric face fact fade fail faint fair faith false familiar family fancy far farewell farm
fasten fat fate fault favor fear feast feed feel fellow female fever few fiber fiction fierce fifteen fifty fight
figure file final find fine firm first fit five flame flash flat flavor flee flesh flight float flood flour flow fluid
fly foam focus fog fold folk follow fond food fool foot forbid force forecast forever forgive form formal former forth
forty forward found four frame free freeze frequent friendly frighten frog front fruit fry full fun function fund
funny fur further gain game gang gap gas gather gaze general generate generous genius gentle genuine ghost giant gift
give glad glance glory glow glue goal god good goose gossip govern grab grace grade gradual grain grand grant graph
grateful grave great greedy greet grief grind grip groan ground group grow guard guess guide guilt gulf gum gun guy
hair half hall halt handle hang happen harm harsh hat hate hay head heal heap hear heart heat heaven height hell help
hence hero hesitate hide hint hire hit hobby hole holy home honor hook hope horn horror host hotel hour however hug
huge human humble hundred hurt ice ideal identify idle ignore ill illegal imagine imitate immense impact imply import
impress inch include income increase indeed index indicate individual infant infect inform inherit initial injure ink
inner innocent inquire insect insist inspect inspire install instance instead instinct instruct instrument insult
intelligent intend interest internal interpret interrupt introduce invade invent invest investigate invite involve
item itself jacket jail jam jar jaw jazz jealous jelly jewel job joke joy juice junior jury just keen kick kid kidney
kiss kite kneel knit knock knot know label labor lace lack lad lady lamb land lane laser last latter launch laundry
lawn lay lazy lead league leak lean leap learn least leather leave leg legal leisure lend length less let level liar
library lick lid lie life lift like limb limit line lion lip liquid list literature little liver living load loan
lobby locate log logic lonely loose lord lorry loss lot loud lover lower luck lump lung machinery mad magic magnet
mail main maintain major majority make male mankind manner map marble margin mark market mask mass master match mate
material math matter mature maximum maybe meal mean meanwhile medal media medium melt member mental mention mercy mere
merry mess method middle might mild mile military million mind mine minimum minor minister miracle miserable miss
mission mist mix mobile mock model modest moist monkey monster mood moon moral more mostly motion motor mount mud
multiply museum mushroom music must mutual myself naked name narrow nasty nation native naval near neat necessary neck
need negative neglect neither nephew nerve nest net neutral nevertheless news nice nightmare nine nobody nod none
nonsense noon nor normal north nose notice nowhere nuclear nuisance numb numerous nut oak obey object observe obtain
obvious occupy occur odd offend offer oil okay once one only onto opera operate oppose orange orbit order organ
organize origin other otherwise ought ourselves outcome outer outline output oval overall overcome owe own oxygen pace
pack paddle pain paint pair pale pan panic parade paragraph parcel pardon parent park parrot part participate
particular party pass passenger passive past paste patch patient pattern pause pay peach peak pear pearl peculiar peel
peer pen penalty people per percent perform perfume perhaps period persist person persuade pet phase phenomenon phone
phrase physical piano pick pie piece pile pill pillow pin pinch pine pink pint pipe pitch pity pizza place plain
planet plant plastic platform play plead pleasant plenty plot plow plug plunge plus poetry point pole police polish
polite pond pool pop popular porch port portion portrait position positive possess post pot pour powder practical
practice praise pray precise prefer pregnant prepare present preserve president press pretend pretty prevent previous
pride prince princess print prior prisoner private probable process produce product profession program prohibit
project promote prompt proof proper prospect proud prove provide province pub publish pull pulse pump punch punish
pupil puppy purchase pure pursue puzzle qualify quarter queen quick quit quite quiz quote rabbit race rack rage raid
rail rain raise range rank rapid rate rather raw ray razor reach react ready real realize rear rebel recall receive
recent reckon recover reduce refer reform refresh refugee regard register regret regular reject relate relative relax
release rely remain remark remind remote remove rent repeat reply report represent rescue resemble reserve resign
resist resolve respect respond rest restore restrict result retain retire reveal revenge reverse review revise
revolution rhyme rib ribbon rice ride ridiculous rifle right rigid riot ripe rise rival roar roast rob rocket role
roll romantic room rope rose rotten round row rub rubber rubbish rude rug rule rumor run rural rush rust sack
sacrifice saddle sail saint sake salad sale salmon salute same sand satisfy sauce sausage scale scandal scar scare
scarf scatter scene scent scheme scissors scold score scrap scratch scream screw script sea seal search season seat
second sector secure see seed seek seem seize seldom select self senior sense sensitive separate series serve session
set settle seven severe sew shade shallow shame share shave she shed sheet shelf shell shift shine shirt shock shoot
shop shore should shout shovel show shower shrink shrug shut side sigh sight sign silly similar sin since sing single
sink sip sir sister site six size skate sketch ski skill skin skip skirt sky slave sleeve slice slide slight slim slip
slope slot smart smash smell smile smoke snack snap snow soap soccer social sock soil solar sole solid solve somebody
someone something sometimes somewhere sore sorrow sorry sort soul source south space spare spark speak special
specific speed spell spend sphere spice spill spin spirit spit split spoil sponge sponsor sport spot spray spread
spring spy squad squirrel stab stable stadium staff stage stain stake stamp stand standard star stare state statement
statue status steady steal steam steel steep steer stem step stick stiff sting stir stitch stock store straight strain
strap straw stream street stress stretch strict strike string strip stripe stroke study stuff stumble stupid style
subject submit substance subtle suburb succeed such suck sudden suffer suggest suit sum summary summer sun super
supper supply support suppose supreme sure surgeon surrender surround survive suspect suspend sustain swallow swan
swear sweat sweep swell swift swing switch symbol symptom tackle tail talk tank tap tape target task taste tax taxi
tea team tear technique teen temper temple ten tend tender tennis tense term terror text than thank their theme then
there therefore these thick thin think third thirteen thirty thorough those though thought thousand threat three
thrill through throughout throw thus tickle tide tidy tie tiger tight till timber time tin tip tire tissue title toast
tobacco today toe together toilet tomato tomorrow ton tongue tonight tooth topic torch toss total tough tour tourist
toward towel town toy trace track trade trail trait transfer transform translate trap trash travel tray treat treaty
trend trial triangle tribe trick trigger trim trip tropical truck true trumpet trunk trust try tube tune turkey turn
twelve twenty twin twist two type typical ugly ultimate unable uncle under understand uniform union unique unit unite
universal university unless until up upon upper upset urban urge urgent usual utter vague vain value van vanish
various vary vast vegetable vein venture verb verdict very via victim video view violent virtue virus visit visual
vital vivid vote vowel voyage wage waist wake walk wander want ward warn warrior wash waste wave wax way wear weave
web weed week weigh weird well west whale what whatever wheat when whenever where whether which while whip white who
whoever why wicked widow wild will win wind wing winner winter wipe wire wish wit witch within without wolf wonder
wool work world worm worry worse worship worst worth would wound wrap wreck wrist write wrong yacht yawn year yell yes
yesterday yet yield you young your yourself zero
"""
)
ENDINGS = ("", "", "", "s", "ing", "ed", "er", "ly")
VOWELS = "aeiou"


def word_strings(count: int, seed: int, lengths: tuple[int, int] = (3, 9)) -> list[str]:
    """Distinct strings of words, many of them with an ending."""
    source = random.Random(f"word strings {seed}")
    found: dict[str, None] = {}
    while len(found) < count:
        words = [_with_ending(source.choice(WORDS), source.choice(ENDINGS)) for _ in range(source.randint(*lengths))]
        found.setdefault(" ".join(words).capitalize() + source.choice("...?"))
    return list(found)


def _with_ending(word: str, ending: str) -> str:
    """The word with an ending, spelled as is usual, whether or not anybody says so."""
    if ending == "s" and word.endswith(("s", "sh", "ch", "x", "z")):
        return word + "es"
    if ending and word.endswith("y") and word[-2] not in VOWELS and ending != "ing":
        return word[:-1] + ("ies" if ending == "s" else "i" + ending)
    if ending[:1] in ("i", "e") and word.endswith("e"):
        return word[:-1] + ending
    return word + ending
