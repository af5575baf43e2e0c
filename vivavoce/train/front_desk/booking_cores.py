"""What guests book, order, answer and ask back, and what is not for the desk, in the words that openings go before."""

BOOKING_CORES: dict[str, dict[str, str]] = {
    "table": {
        "thing": """
a table | a table {day} | a table for {people} {day} | a table for {people} tonight at {time}
| a table at {time} {day} | a table for {people} at {time} | a table for {time} | a table for {people} around {time}
| a table {day} for {people} | a table {day} at {time} | dinner for {people} at {time}
| seats for {people} at {time} | seats for {people} | a reservation for {people} | a reservation {day} at {time}
| a reservation at {time} | a reservation for {people} {day} at {time} | a booking for {people} at {time}
| a place for {people} at {time} | a dinner table for {people}
| a table for {people} at {time} under the name {name} | a table for {people} at {time}, my name is {name}
| a table for {people} at {time}, name {name} | a table at {time} for {people}, the name is {name}
| a table for {people} {day} at {time}, the name is {name} | a table for {people} {day} at {time} under {name}
| a reservation for {people} at {time}, name is {name}""",
        "deed": """
book a table | reserve a table | reserve a table {day} | book a table for {people} {day}
| reserve a table for {people} at {time} | book a table at {time} | book a table {day} at {time} for {people}
| make a booking for {people} | make a booking for {people} at {time} | make a reservation at {time}
| make a reservation for {people} {day} | come for dinner at {time} | have dinner {day} at {time}
| eat here at {time} | have dinner at {time}, we are {number} | book for {people} at {time}
| book for {people} {day} at {time} | reserve for {people} | book dinner for {people} | come and eat {day}
| reserve seats for {people} at {time} | book a table for {people} at {time} in the name of {name}
| reserve a table for {people} at {time}, the name is {name}
| reserve a table for {people} {day} at {time} for {name}""",
        "favour": """
book us a table | book me a table for {people} | book a table for {people} {day} at {time}
| reserve us a table at {time} | reserve a table for {people} {day} | keep a table for {people} at {time}
| keep a table free at {time} | put us down for {people} at {time} | hold a table for {people}
| find us a table for {people} at {time} | reserve a table for {name}, {people} at {time}
| save a table for {people} at {time} | squeeze us in at {time}""",
        "clause": """
if you have a table {day} | if there is a table free at {time} | if you have a table for {people}
| if we can have a table at {time} | whether you have a table for {people} at {time} | if we could eat at {time}""",
        "whole": """
(is there/have you got/would there be/do you still have/do you have/would you have) (a table/any table/a free table)
(for {people}/at {time}/{day}/{day} at {time}/for {people} {day}/for {people} at {time}/around {time})?
| (we are/we will be/there are/there will be) {number} (of us, can we come at {time}?/of us, is there a
table?/people, is there a table at {time}?/for dinner, please/and need a table at {time})
| (this is/my name is/i am/it's) {name}(, can i have/, i need/, we need/, i want/ and i'd like/ and we would like/,
please book) a table (for {people} at {time}/for {people} {day} at {time}/at {time} for {people})
| (table/dinner/reservation) (for {people} {day}/for {people} {day} at {time}/at {time} for {people}/at {time}/{day}
at {time}, {people}/{day} at {time})(/, please)""",
    },
    "room": {
        "thing": """
a room | a room for {nights} | a double room for {nights} | a double room | a single room | a bed for {nights}
| a quiet room for {nights} | a room from today for {nights} | a reservation for {nights}
| a room for {nights} under {name} | a room for {nights}, the name is {name}
| a double room for {nights}, my name is {name} | a booking for {nights}""",
        "deed": """
book a room | reserve a room for {nights} | stay here for {nights} | stay for {nights} | rent a room for {nights}
| sleep here for {nights} | take a room for {nights} | book {nights} | spend {nights} here
| stay at the hotel for {nights} | reserve {nights} | reserve a room for {nights}, the name is {name}""",
        "favour": """
book us a room | reserve me a room for {nights} | give us a room for {nights} | find me a room for {nights}
| book me in for {nights} | put me up for {nights} | keep a room for us for {nights}""",
        "clause": """
if you have a room | if you have a room for {nights} | if there are rooms free | whether i can stay for {nights}
| if there is a room for {nights} | if you have rooms left""",
        "whole": """
(is there/do you still have/would you have/are there/have you) (a free room/any room left/rooms left/any free
rooms/a room available/rooms available)[ for {nights}]?
| (this is/my name is/i am) {name}(, i need/, i want/, we need/ and i'd like) a room for {nights}
| room for {nights}[, please]
| (we are/i am) (staying/here) for {nights} and (need a room/need a bed/have no room yet)
| {nights} (in a double room/in a single room/in your hotel), please
| (any vacancies/are you full/do you have space/is the hotel full)[ for {nights}]?""",
    },
    "give_people": {
        "whole": """
(we are/we will be/we're/there will be/there are/it is/that is/it will be) (a party of {number}/{number}
adults/{number} guests/{number} in total/{number} persons/{number} all together/{number} people)
| (for/table for/it's for/just for/only for) ({people}/{number} guests/{number} persons/{people} in all)
| (about/around/maybe/probably/i believe/i guess/i think/let us say/say) ({number}/{number} guests/{number} persons)
| {number}(, i think/, i guess/ in all/ all together/ of us/ of us, please/ guests/ guests, please/ persons/ seats/,
thank you) | a (party/group/table) of {number} | {number} people(/, i think/ all together/, thanks)
| (us/we are) {number} | make that {number}""",
    },
    "give_time": {
        "whole": """
(at/around/at around/about/say/for/maybe at/perhaps/perhaps at/let us say at/i think at/probably/towards) {time}(/,
thanks/, thank you/, if you can/ would be fine/ would be great/, if that is okay/ or so)
| {time} (please/would be perfect/works/works for us/sounds good/is good/is okay/would suit us/is best/, thank you/,
i think) | (can/could/may/shall/would) (we come around/i come at/we say/we make it/it be) {time}?
| (we'd like/we want/i would like/i'd like/we plan/we will try) to (come at/be there at/eat at/arrive at/be there
around) {time}
| (we/i) (arrive at/can come at/will be there at/will arrive at/come at/would come at/could be there at) {time}
| is {time} (okay/possible/free/fine/still free/good)?
| (make that/book it for/put it at/the time is/it is/that would be at) {time}""",
    },
    "give_nights": {
        "whole": """
(for/just/only/it is/it's/about/maybe/i think/probably/that would be/make that/let us say/we need/i need/we want/i
want) ({nights}/{nights} please/{nights}, thank you)
| (we/i) (stay/will be here for/would like to stay/want to stay for/plan to stay/are staying/need it for/am here
for/would stay) {nights}
| {nights}(, thanks/, i think/ all together/ please/ is enough/ is fine/, that is all/, maybe)
| {number}(, thanks/ please/, i think/ of them)""",
    },
    "give_name": {
        "whole": """
(it's/it is/that's/that is/this is/i am/i'm/my name is/my name's/the name is) ({name} please/{name}, thank
you/{name}, thanks) | {name}(, thank you/, thanks/, that is my name/, as always)
| (name/last name/surname/family name)(/ is) {name}
| (put it/put it down/write it/book it/put me down/write it down/make it/please book it) (under {name}/as {name}/for
{name}/on {name}/under the name {name}/in the name of {name})
| (put down/write down/please write/write/take/use/you can use) {name}(/, please)
| (i am called/they call me/people call me/you may call me/you can call me/my surname is/our name is/we are) {name}
| (on/in) the name {name} | mister {name} | the booking is for {name} | for the name {name}""",
    },
    "cancel": {
        "deed": """
cancel | cancel my table | cancel my room | cancel our booking | cancel our reservation | cancel what i booked
| call off the booking | take back my booking | drop the reservation | cancel the room | cancel the table""",
        "favour": """
cancel my table | cancel the room | cancel our booking | delete the reservation | call off my reservation
| take our booking off | cancel everything | remove my booking | undo the booking | cancel what i booked""",
        "clause": "if i can cancel | how i cancel my booking | if we can cancel the table",
        "whole": """
(we/i) (cannot come after all/will not come/won't come/can't make it/cannot make it/have changed our plans/do not
want the table/no longer want it/don't need it any more), (cancel it/please cancel/so please cancel/cancel please)
| (forget/never mind/skip/scrap/no) (my booking/the reservation/the table/my reservation/that booking)
| (i/we) (do not want/don't need/no longer need/no longer want) (the table/the room/our booking/the reservation)[
any more]""",
    },
    "order": {
        "thing": """
the {dish} | a {dish} | one {dish} | your {dish} | the {dish} for me | some {dish} | the {dish} tonight
| the {dish}, thank you""",
        "deed": """
order the {dish} | have the {dish} | try the {dish} | eat the {dish} | order one {dish} | take the {dish}
| get one {dish} | start with the {dish} | order a {dish} | go for the {dish}""",
        "favour": """
bring us the {dish} | bring me one {dish} | bring a {dish} | serve me the {dish} | make me a {dish}
| put me down for the {dish} | get me the {dish} | add one {dish} | add a {dish}""",
        "whole": """
(i'll/i will/we'll/we will/i think i will/i guess i'll/then i'll/i believe i'll) (have/take/try/get/go for/order/go
with) (the/a/one/your) {dish}(/, please/, thank you/ for dinner)
| (for me/for my wife/for my husband/for us/to eat/for dinner) (the {dish}/one {dish}/a {dish})(/, please)
| (i am/i'm/we are) (having/taking/going for/in the mood for/going to take/going to try) the {dish}
| {dish}(, please/ please/ for me/ for me, please/, that is my order) | my order is (the/one/a) {dish}
| (the/a) {dish} (would be nice/would be good/sounds good/it is/for me then)""",
    },
    "wake_up": {
        "favour": """
wake me at {time} tomorrow | wake us up at {time} | wake me up at {time} | ring me at {time}
| ring my room at {time} | call my room at {time} in the morning | call us at {time} | set an alarm at {time}
| give us a wake up call at {time} | get me up at {time} | get us out of bed at {time}
| make a wake up call at {time} | wake my wife and me at {time}""",
        "thing": """
a wake up call at {time} | a wake up call tomorrow at {time} | a wake up call for {time} tomorrow
| a call at {time} in the morning | an alarm at {time} | a morning call at {time} | an alarm call at {time}
| a wake up at {time}""",
        "deed": """
be woken at {time} | get a wake up call at {time} | be woken up at {time} | get up at {time} | be up by {time}
| order a wake up call for {time} | have a wake up call at {time} | be awake at {time}
| book a wake up call for {time} | set an alarm for {time}""",
        "clause": """
if you can wake me at {time} | whether you could wake us at {time} | if i can get a wake up call at {time}""",
        "whole": """
wake up call(/ please)(, {time}/ at {time}/ for {time}/ tomorrow at {time})
| (don't let me/do not let me/i must not) sleep (past/after/longer than) {time}
| (i/we) (have to be up/must get up/must be awake/should be up/want to be up) (at/by) {time}(/ tomorrow/, can you
wake me?/, please wake us)""",
    },
    "repeat": {
        "favour": """
repeat it | say that again slowly | say it again | repeat the last thing | say that one more time | repeat yourself
| tell me that again | tell me once more | say it louder | speak up | repeat what you just said | say that slower
| go over that again""",
        "deed": """
hear it once more | hear it again | have that again | ask you to repeat that | ask you to say it again
| hear that one more time""",
        "thing": "that again | that once more | that one more time",
        "clause": "what you said | what you just said | what that was",
        "whole": """
(sorry/excuse me/pardon/i'm sorry/i am sorry), (what/what was it/could you repeat/i missed that/i didn't get that/i
did not hear/again please/one more time/you said what/what were you saying)?
| (i/we) (did not understand you/couldn't hear you/could not understand/missed what you said/was not listening/did
not get it/did not quite catch it/can't hear you well/didn't understand)
| (what/how) (was it/did you say there/was that please/did you say again/please)?
| (once more/one more time/again/another time)(/, slowly/, a bit louder/ for me/, i did not hear)
| do you mind (repeating/repeating that/repeating it/saying that once more)?
| would you mind (repeating it/telling me again/saying it louder/repeating what you said)? | mind repeating that?
| huh?""",
    },
    "memory_people": {
        "clause": """
how many people i booked for | how many we are | how many people my table is for | for how many people i booked
| how many guests i told you | how many people i mentioned | how many persons i gave you | how many seats we have""",
        "whole": """
(how many people/how many guests/how many persons/how many) (did i mention/have i said/did i book a table for/have i
booked for/will come/are coming/did i want a table for/have you written down/is the table for/is our table for/is
the booking for)?
| for how many (people/guests/persons) (is the table/is our table/is the reservation/have i booked/did we book/was
it)? | (remind me/say again), (how many people/how many of us/how many guests) (did i say/are we/is it/was it)?
| (do you/can you) (recall/remember) (how many we are/the number of people/how many guests i said)?
| what (is the number/was the number) of (people/guests)[ i told you]?""",
    },
    "memory_time": {
        "clause": """
what time i booked | what time i gave you | when my table is | when our table is | for what time i booked
| when i said we would come | what time i told you | at what time my booking is | when we are expected""",
        "whole": """
(what time/which time/when) (did i mention/have i told you/did i ask for/have you got/did you write down/is my
dinner/is our booking/is our dinner/are we expected/should i come/do i have to come/do we eat/am i coming/have we
booked)?
| (for what time/at what time/for when) (is my reservation/is our reservation/is the booking/have i booked/did we
book/do we have the table/is my dinner/are we coming)?
| (remind me/say again), (what time/when) (was it/is it/is my table/did i say/did we book)?
| (do you/can you) (recall/remember) (what time i booked/when i am coming/the time of my booking)?""",
    },
    "memory_name": {
        "clause": """
what name i gave | what name i booked under | which name i gave you | what my name is | what name you have
| under which name the booking is | what i am called | who i am""",
        "whole": """
(what name/which name/whose name) (did i mention/have i told you/did i use/is on my booking/have you written
down/did you note down/is the table under/is the room under/is on the reservation/did we book under/do you have for
me)?
| (under what name/under which name/in what name/in which name) (is my booking/is my reservation/is the booking/have
i booked/did we book/is the room/is our table)?
| (remind me/say again), (what is my name/which name/what name) (did i give/is it under/was it/did i say)?
| (do you/can you) (recall/still remember/remember) (who i am/what i am called/the name i gave/which name i gave)?
| (how do you call me/what am i called/what do you call me/can you say my name)?""",
    },
    "memory_nights": {
        "clause": """
how many nights i booked | how long i am staying | how many nights i said | for how many nights i booked
| how long my stay is | how many nights we stay | how long i have the room | how many nights my room is booked""",
        "whole": """
(how many nights/how long) (did i mention/have i told you/did i ask for/will we stay/do we have the room/are we
here/is our stay/is my room booked/am i here for/did we book for/is my reservation/have you got me down for)?
| (for how many nights/for how long) (have i booked/did we book/is the room/is our room/am i staying/is my
reservation/are we staying/do i stay)?
| (remind me/say again), (how many nights/how long) (was it/is it/did i say/am i staying/did i book)?
| (do you/can you) (recall/remember) (how long i am staying/how many nights i booked/the number of nights)?
| what (is/was) the number of nights[ i told you]?""",
    },
    "memory_order": {
        "clause": """
what i ordered | what my order is | what my order was | which dish i ordered | what i asked for | what i chose
| what i am going to eat | what we ordered""",
        "whole": """
(what/which dish/which meal/what food) (did i want/have i asked for/did i say i wanted/have i chosen/did i take/am i
going to eat/will i get/did you write down for me/do you have for me/are you bringing me/did i tell you to
bring/have i got coming/comes for me)?
| (remind me/say again), (what/which dish) (did i order/was it/did i want/did i choose)?
| (do you/can you) (recall/remember/repeat) (what i ordered/my dish/what i wanted/which dish i took/my order)?
| (what is/what was) (my dish/the dish i ordered/my meal/it i ordered/my choice/coming for me)?""",
    },
    "decline": {
        "clause": """
who won the {sport} game | when the next train to {city} leaves | how far {city} is
| what the weather is like in {city} | how old the {job} is | what {animal}s eat | where my {relative} is
| if it will rain | why {animal}s {verb} | how to {chore} | how a {thing} works | who can {chore}
| where they sell {ware} | how big {planet} is | what {small} times {small} is | if the {job} is here
| how to cook {animal} | where one can {verb} | when the shops open""",
        "thing": """
{ware} | a {color} {thing} | a new {thing} | a {job} | a {animal} | more towels | a hair dryer | an extra pillow
| an iron | some soap | a map of the city | a ticket to {city} | a seat on the plane to {city} | a glass of beer
| a bottle of wine | two pizzas | a baby bed | a {sport} lesson | tickets for the {sport} game
| a song about a {animal} | a massage at {small} o'clock | a rental car | a newspaper""",
        "favour": """
{chore} | call my {relative} in {city} | sing a song | tell me about {science} | turn on the {thing}
| turn down the heating | open a window | clean the {thing} | wash my shirt | carry my bags to {city}
| find my {relative} | buy me {ware} | write to my {relative} | play a song | read me a story about a {animal}
| translate something | count to {small} | teach me to {verb} | call the {job} | lend me a {thing}
| change {big} dollars | book me a flight | send up a {job}""",
        "deed": """
{verb} with my {relative} | buy {ware} | {chore} | learn {science} | go to {city} | fly to {country}
| rent a {thing} | see a {job} | talk to my {relative} | bring my {animal} | smoke in my room
| keep a {animal} in the room | watch {sport} | change my dollars | book a {sport} lesson
| reserve a seat in the theater | listen to the news | pay my taxes | order {ware} | play {sport} here
| cook in my room""",
        "subject": """
{science} | the weather | my {relative} | the {sport} game | {city} | the election in {country} | the {animal}s
| the price of {ware} | my {thing} | the train to {city} | the concert tonight | {planet}""",
        "whole": """
(my/his/her/our) (room/table/key/lamp/shower/toilet/television) (is too small/is broken/is {color}/is dirty/was very
nice/makes a noise/smells strange)
| (is there/do you have/have you) (a laundry/a hair dryer/a doctor/a casino/a tennis court/a swimming teacher/an
iron/a safe/a balcony/a zoo/a church)(/ here/ nearby)?
| (how much/what) (is/does) (the museum/the opera/a haircut/a bus ticket/a flight to {city}/parking in {city}/a
bottle of wine/{ware}) (cost/again)?
| (when/what time) (does/is) (the museum/the bank/the post office/the cinema/the concert/the {sport} game/the shop)
(open/over/starting/closed)?
| (he/she/my {relative}/the {job}) (lives in {city}/wants {ware}/cannot {verb}/has a {color} {thing}/never went to
{country}/likes {science}/was late again)""",
    },
}
