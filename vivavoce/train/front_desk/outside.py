"""What people may say that a front desk does not answer: other subjects, other shops, and asks just beside its work.

One template between bars. `(a/b)` is a choice, `[a]` may be left out, `{word}` is filled from WORDS below.
"""

from vivavoce.train.front_desk.words import listed

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
