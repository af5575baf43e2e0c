"""More ways to ask, for training alone: words that a guest may choose and the other templates do not have.

Written as the other templates are; none of them is ever used to judge.
"""

MORE: dict[str, str] = {
    "greeting": """
hello, nice evening | hello everybody | hi desk | good evening, i have a small question | hello, anyone here?
| good morning, do you have a minute? | hi, are you there? | i have a question for you | may i ask you something?
| hello, could you give me a hand? | hi, i could use some help | is somebody there? | hello, do you hear me?
| good afternoon to you | hello, is that the hotel? | is this the hotel reception? | am i through to the front desk?""",
    "how_are_you": """
how are you tonight? | everything good? | is everything okay? | are you good today? | how do you do today?
| hello there, how are you? | how is life? | how is your evening? | how are you getting on? | you all right?
| i am well, and you? | fine, and you? | did you have a good day? | has your day been good?""",
    "identity": """
what are you exactly? | who is there? | who is talking? | what sort of machine is this? | is this a machine?
| is this a computer? | are you a computer program? | am i speaking to a computer? | is there a person there?
| which machine am i talking to? | what kind of thing are you? | what is this voice? | whose voice is this?
| what is that voice? | what am i talking to? | tell me your name | is anybody real there?
| what kind of robot are you? | please say who you are | could you say your name? | so who are you then?""",
    "help": """
what do you know about? | what are you good at? | what do you know how to do? | tell me what you know
| which things do you know? | what would you be able to do for us? | how could you help us?
| i need to know what you can do | what can we ask you? | what may i say? | list what you can do
| what is possible here? | what do i say now? | is there anything you can do? | what does this desk do?
| what could i ask you about? | please explain how this works""",
    "restaurant_hours": """
when are you closing? | when are you opening? | what hours are you open? | what hours is the restaurant open?
| do you close early on {weekday}? | how long can we eat tonight? | is dinner still served?
| can i still have dinner? | until what time do you serve food? | how late do you serve dinner?
| how late does the kitchen cook? | at what time does the restaurant open? | at what time can we have lunch?
| is the restaurant closed {weekday}? | tell me when you open | tell me your hours | do you serve food on {weekday}?
| is it too late to eat? | at what hour do you open? | is the restaurant closed now? | when is lunch?
| when is lunch served?""",
    "breakfast": """
at what hour is breakfast? | is breakfast served early? | how long can i have breakfast? | breakfast is when?
| what time do you serve breakfast? | what time does breakfast end? | what time is breakfast over?
| is there still breakfast? | are we too late for breakfast? | how early is breakfast?
| when do you stop serving breakfast? | i would like to know when breakfast is | can you tell me when breakfast is?
| until when can we have breakfast? | what hours is breakfast? | when can i come down for breakfast?
| is breakfast early? | when do people have breakfast here?""",
    "menu": """
what is there for dinner? | what do you cook? | what does the kitchen make? | tell me what there is to eat
| which food is there? | what can we have to eat? | what can one eat here? | what are my choices for dinner?
| i'd like the menu[, please] | could you read me the menu? | what is the kitchen serving? | what do you offer?
| what courses do you have? | which meals do you serve? | we are hungry, what do you have? | i am hungry
| may we have the menu? | bring the menu[, please] | what could i have for dinner? | list the dishes[, please]""",
    "recommend": """
what should we have? | what would be good? | which meal is the best? | which one is the best? | what do guests like?
| what do you like best? | what is your best dish? | what is nice today? | is there a special[ today]?
| tell me the special | what does the chef recommend? | what would you take? | what do you advise?
| i do not know what to eat | choose something for me | give me a recommendation | what should one try here?
| what tastes good? | what is really good? | do you have a tip for dinner?""",
    "vegetarian": """
is there food without meat? | i eat no meat | my husband eats no meat | we eat no meat | my daughter is a vegetarian
| can you make something without meat? | could i have something without meat? | i never eat meat
| what is there for vegetarians? | is there anything for a vegetarian? | which meal is without meat?
| do you serve vegetarians? | are any dishes without meat? | what vegetarian food is there? | no meat for me, please
| i would rather have no meat | what would a vegetarian have? | do you have a vegetarian menu?""",
    "price": """
the {dish}, how much does that cost? | and the {dish}, how much would that be? | how much is one {dish}?
| what does one {dish} cost? | what does a {dish} cost here? | the price of the {dish}, please
| for the {dish}, how much do you take? | how much do you want for the {dish}? | how much do you ask for the {dish}?
| do you know the price of the {dish}? | i want to know how much the {dish} is | how many euros for the {dish}?
| is the {dish} cheap? | what will the {dish} cost? | what is the {dish}? how much? | the {dish} costs how much?
| what would i pay for the {dish}? | say the price of the {dish} | and how much is the {dish}?""",
    "room_price": """
how much do you charge for one night? | what do you charge per night? | what do you charge a night?
| what is the charge for a night? | how much do you take for a room? | how much per night? | what is it per night?
| what does a room cost per night? | what is the cost of a room? | does the room price include breakfast?
| is breakfast included with the room? | is breakfast included? | do i pay extra for breakfast?
| does the price of the room include breakfast? | how much would one night be? | how much for a night?
| how much for one night in a double room? | what would a single room cost? | tell me the price of a room
| what is the price per night? | how much money is a night here? | are rooms cheap here? | what is the room rate?""",
    "bill": """
i want the bill | we want the bill | i'd like to pay[, please] | i'd like the bill[, please]
| i would like the check | may i pay[, please]? | can we pay[, please]? | could i pay now? | can i pay now?
| please bring us the bill | please let me pay | i am ready to pay | time to pay | how much do i owe?
| what do we have to pay? | how much is it all together? | how much is everything? | could you prepare the bill?
| i need to pay | we are finished, can we pay? | check, please | bill, please | get us the bill[, please]""",
    "pay_card": """
can we pay in cash? | may we pay cash? | is it okay to pay by card? | could we pay with a credit card?
| do you take my card? | will you take a credit card? | can i pay with my watch? | can i pay by phone?
| do you accept phone payment? | may i pay with my phone? | does paying by phone work here?
| can i pay with a debit card? | what can i pay with? | which ways to pay do you have? | do i need cash?
| is cash okay? | do you want cash or a card? | is it cash only? | can i use a card? | is my card accepted here?
| i would like to pay by card""",
    "directions": """
where do i find the {place}? | where do we find the {place}? | we can't find the {place}
| we cannot find the {place} | we are trying to find the {place} | i'm trying to find the {place}
| we're looking for the {place} | can you tell us where the {place} is? | could you tell me where the {place} is?
| how do you get to the {place}? | how can we get to the {place}? | we want to go to the {place}
| we need the {place} | where would the {place} be? | where might i find the {place}? | please show me the {place}
| what's the way to the {place}? | is the {place} near here? | is the {place} upstairs?
| i was looking for the {place} | and where is the {place}? | do you know the way to the {place}?
| point me to the {place} | i have to go to the {place} | is there any {place} here?""",
    "wifi": """
does the hotel have internet? | is the internet free? | can i use the internet? | do the rooms have internet?
| is there internet in my room? | does my room have internet? | can i get internet in the room?
| have you got internet? | have you got wifi? | is there wifi in the rooms? | is there wifi here? | i need internet
| i need to go online | can i go online here? | how do i get internet? | how do i log on to the internet?
| my internet does not work | the internet is not working | the wifi does not work | i can't get online
| could i have the internet password? | tell me the wifi password | what do i type for the wifi?
| what is the code for the wifi? | may i use your wifi? | we need the wifi | is there a wifi network?
| which wifi is yours? | i would like to go on the internet""",
    "check_in": """
when can i go to my room? | when can we have the room? | can i have my room now? | may we check in now?
| could i check in early? | what is the earliest i can check in? | when do you let guests in? | is our room ready?
| is the room ready yet? | when are the rooms ready? | when can i have the room? | can i get my key now?
| when can we get the key? | how soon can i check in? | what time may i check in? | i want to check in, when can i?
| when does the room become free? | from what time is the room ready? | at what time is check in?""",
    "check_out": """
when do you want the room back? | by when do you need the room? | do you need the room back early?
| when do i have to give the room back? | what time do you want us out? | when do you want us to leave?
| when must we be out? | when must we check out? | how long may we stay in the room? | till when can we stay?
| until when is the room mine? | until what time can i stay in my room? | when do i need to be out?
| at what time is check out? | at what time do we have to leave? | when does my room have to be empty?
| when do you clean my room to give it to others? | what time do i hand back the key? | can i leave later?
| can we check out later? | what is the last time to check out? | may i stay in my room until noon?
| is there a late check out?""",
    "taxi": """
i would like a cab | can i have a taxi? | could we have a taxi? | could you get me a taxi? | get me a taxi[, please]
| can somebody call a taxi? | we need a cab | we need a taxi | can you find me a taxi?
| i want to go to the airport by taxi | i need a ride to the airport | please order a taxi | order us a cab
| may i have a taxi? | please call a cab | would you get us a taxi? | would you order me a taxi?
| do you call taxis? | i'd like you to call a taxi""",
    "thanks": """
thank you for everything | thanks for that | thank you, that was kind | very kind, thank you | okay thanks
| that's great, thanks | that's perfect, thank you | good, thank you | that helps a lot | you are very kind
| thank you, that is all i wanted to know | i thank you | fine, thank you | super, thanks | nice, thank you""",
    "goodbye": """
bye now | goodbye for now | so long | see you tomorrow | have a good night | have a nice evening | i am leaving, bye
| that was it, bye | that was all, goodbye | that's it, thank you | i am done, thank you | we are done, goodbye
| nothing more, thanks | no more questions | okay goodbye | good night to you | see you then | all done, bye""",
    "table": """
i need a table | i need a table {day} | we need a table | can we get a table? | can we get a table for {people}?
| can we get a table at {time}? | could i get a table at {time}? | could we get a table {day} at {time}?
| may i have a table at {time}? | may we have a table for {people} at {time}? | do you have a table at {time}?
| have you got a table at {time}? | have you got a table for {people} at {time}? | is a table free at {time}?
| we want a table at {time} | i want a table for {people} at {time} | i want a table at {time}
| a table at {time}[, please] | could you reserve a table at {time}? | please book a table at {time}
| we want to eat at {time} | dinner for {people}, please | dinner for {people} at {time}
| we would like to eat at {time} | book us in for {people} at {time} | can {people} eat at {time}?
| my name is {name}, a table for {people}, please | i am {name}, we need a table for {people}
| a table for {people} at {time}, my name is {name} | a table for {people} at {time}, the name is {name}
| a table for {people} at {time} in the name of {name} | for {name}, a table for {people} at {time}
| book a table for {people} at {time} for {name}[, please] | we need a table for {people} at {time} for {name}
| i'd like a table for {people} at {time} for {name}[, please] | reserve a table for {people} at {time} under {name}
| may i reserve a table for {people}? | would you have a table {day}? | would you reserve a table for {people}?""",
    "room": """
do you have rooms? | are there any rooms free? | are there rooms for {nights}? | have you got a room?
| can we get a room? | can i get a room for {nights}? | could i get a room for {nights}?
| may i book a room for {nights}? | we want a room for {nights} | i want a room for {nights}
| we want to stay {nights} | could we stay {nights}? | is a room free for {nights}? | i need to stay {nights}
| i need somewhere to sleep for {nights} | we need a double room | a single room, please | a double room, please
| my name is {name}, a room for {nights}, please | a room for {nights} for {name}, please
| please reserve a room for {nights} | would you have a room for {nights}?""",
    "cancel": """
cancel everything | cancel the booking, please | i want to cancel it | please take my booking off
| we have to cancel it | i cannot come, cancel please | we are not coming | i am not coming
| i changed my mind, cancel it | can we cancel? | could we cancel the booking? | please drop the booking
| i no longer need the reservation | delete my booking""",
    "order": """
one {dish} | one {dish} for us | a {dish}, please | i would like one {dish} | i'd like one {dish}[, please]
| i'll have one {dish} | can i have one {dish}[, please]? | could we have one {dish}? | we would like one {dish}
| we'll take the {dish} | we will have the {dish} | may i get the {dish}? | may i order the {dish}?
| i choose the {dish} | i take the {dish} | i'll try the {dish} | let us have the {dish} | make it the {dish}
| could i order the {dish}[, please]? | please bring the {dish} | please bring me one {dish}
| i feel like the {dish}""",
    "wake_up": """
wake us at {time} | wake us up at {time}[, please] | please wake us at {time} | please wake me up at {time}
| can you wake us at {time}? | could you wake us up at {time}? | would you wake me at {time}?
| i want a wake up call at {time} | we need a wake up call at {time} | we have to get up at {time}
| i have to be up at {time} | please ring me at {time} | call us at {time} in the morning
| could you ring my room at {time}? | i would like to be woken at {time} | set an alarm for {time}[, please]
| please wake me tomorrow at {time} | get me up at {time}""",
    "repeat": """
would you say that again? | would you mind repeating that? | do you mind saying it again?
| could you please say that again? | please say it again | please say that once more | can you say it again?
| could you repeat it? | repeat, please | sorry, say that again | sorry, again? | what did you just say?
| i could not hear you | i couldn't hear that | i did not catch it | i did not get that | please tell me again
| would you say it once more? | what was that again? | say again, please | mind saying that again?
| may i hear it again? | let me hear that again | excuse me?""",
    "memory_people": """
for how many is my booking? | how many people am i coming with? | how many people did you note?
| how many people is it for? | what did i say, how many people? | how many did we say? | how many did i tell you?
| how many people have i booked for? | how many of us are there? | do you know how many we are?""",
    "memory_time": """
what time have i booked? | when is it? | when is my booking? | at what time is my table?
| at what time is my booking? | for what time is my table? | do you remember what time i said? | when do we come?
| when should we be there? | when is our table? | what time is our reservation? | which time did i say?
| tell me what time i said""",
    "memory_name": """
what name have you got? | what name have i given? | tell me my name | do you remember what my name is?
| what did i say my name is? | which name did i say? | which name did i book under? | who am i?
| do you know who i am? | what name did you note? | whose table is it? | under which name did i book?
| the booking is under what name?""",
    "memory_nights": """
how long am i here? | how many nights will i stay? | how many nights am i staying? | for how many nights is it?
| how many nights have we booked? | how long do i stay? | how many nights is my room for?
| tell me how many nights i said | do you remember how long i stay? | how long did i say?""",
    "memory_order": """
what did i want to eat? | what do i get? | what did i say i wanted? | which food did i order?
| what have we ordered? | which meal did i order? | what am i going to get? | do you know what i ordered?
| what dish did i choose? | what will i be eating? | tell me my order""",
    "decline": """
where can i get {ware}? | where would i find {ware}? | what is the news? | did you see the news?
| have you heard the news? | we are going to the theater | we are going home | we are going to {city}
| they are going to the cinema | a ticket for the concert, please | two tickets for the theater, please
| a seat at the opera for {small} o'clock | i need a ticket for the museum
| when does the next train to {city} leave? | when does the plane land? | when does the ship to {country} leave?
| start the {thing} | close the {thing} | stop the music | na na na na | do re mi fa so | ha ha ha
| what is your favorite {sport}? | what is a {animal}? | what do you know about {country}?
| what is the price of gold? | how much is a {thing}? | how much is a house in {city}? | i want to buy a {thing}
| i would like {ware} | is my {relative} here? | can i pay a visit to my {relative}? | can i park my {animal} here?
| my room at home is {color} | my table is {color} | the bus was late | what is on television? | turn the volume up
| who is that {job}? | where does the {animal} live? | i have a ticket to {city} | he is waiting for the {job}
| it is {small} degrees outside | the {thing} is {color} | nobody knows the {job} | we met a {job} in {city}
| please help me to {chore} | is there anyone who can {chore}? | you should {verb} more
| why did the {animal} {verb}?""",
}
