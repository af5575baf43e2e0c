"""What guests ask a front desk, in the words that openings go before: `composing` says which."""

QUESTION_CORES: dict[str, dict[str, str]] = {
    "greeting": {
        "whole": """
(hello/hi/hey/good morning/good evening/good afternoon)(, front desk/, reception/, is this the reception?/, is this
the hotel?)
| (hello/hi/good morning/good evening/good afternoon)(, i need help/, i have something to ask/, could somebody help
me?/, i hope you can help me)
| (hello/hi/hey)(, we have just checked in/, we are guests here/, i am a guest here/, i am new here/, i am calling
from my room)
| (hello/hi/good day/good evening)(, nice to see you/, nice to hear you/, who can help me?/, is anyone at the
desk?/, anyone at the front desk?) | (could/would) somebody help me? | are you listening? | is the desk open?
| hey, are you there? | (oh/well) hello | a good day to you""",
    },
    "how_are_you": {
        "whole": """
(hello/hi/good morning/good evening), how are (things/things today/you today/you tonight)?
| (how are/how's) things (going/with you/at the desk/over there)? | how have you been (today/lately/so far)?
| how is (work/your night/your morning/your shift) (going/today)?
| are you (fine/okay/good/well today/feeling well/feeling good)?
| everything (fine/okay/all right/well) (with you/over there)?
| (i am/we are) (good/well/great), (and you/how about you/what about you)?
| is your day (good/nice/busy/going well)? | did you (sleep well/have a nice day/have a good morning)?
| hope (all is well/your day is good/everything is fine)""",
    },
    "identity": {
        "clause": """
who you are | what you are | what your name is | what you are called | who i am talking with | who is speaking
| if you are human | if you are a robot | whether you are a machine""",
        "whole": """
are you (an actual person/a living person/a human being/a program/some kind of computer/artificial/alive)?
| am i (talking with/talking to/speaking to) (a human being/a program/an actual person/the reception/somebody real)?
| is (that/this) (the receptionist/a robot/a living person/an actual human/a human voice)?
| who (have i got/do i have) on the line? | (what/who) (is it/exactly are you)?
| do i speak (to/with) a (machine/person/robot)? | say your name[, please] | you are not human, are you?
| what (type of machine/kind of assistant/sort of computer) (are you/is this)?
| what am i (talking/speaking) to here? | what is this thing?""",
    },
    "help": {
        "clause": """
what you can do | what i can ask you | how you can help me | what you can help with | what you know about
| what this desk can do | what i can do here | how this thing works | how i use you | what i can say to you""",
        "whole": """
what (all can you do/are you for/are you here for/is your task/is your purpose)? | in what way can you help[ me]?
| (what/which) (things/services/tasks) (can you/could you) (do/offer/handle/manage)?
| what (else may i ask/else can i ask/can one ask)?
| how (do i use you/does it work/does this service work/do you work/does all this work)?
| what sort of help (is there/do you give/can i get)? | what is it that you (do/know/offer)?
| i need (help/some help/to know what you do) | (explain/show me/list) (what you do/what you can do/how you work)
| what can the (front desk/desk) do[ for me]? | what (would/could) i (ask/say) (here/now)?
| what subjects do you know? | help me[, please]""",
    },
    "restaurant_hours": {
        "clause": """
when the restaurant opens | when the restaurant closes | when you open | when you close | how late you are open
| how late the kitchen is open | until when you serve dinner | what time dinner is | what time lunch is
| when dinner starts | when lunch starts | if you are open on {weekday} | if the restaurant is open on {weekday}
| what your hours are | how long you are open | when we can eat | if you are still open
| if the kitchen is still open""",
        "subject": """
the opening hours | your opening times | the restaurant hours | the hours of the restaurant | dinner time
| the closing time""",
        "whole": """
(when/what time/at what time) (do you close/do you shut/do you stop serving/does the kitchen shut/does the
restaurant shut)[ (today/tonight)]?
| (are you/is the restaurant/is the kitchen) (open/closed/already closed/already open/still open)
(today/tonight/now/on {weekday}/at this hour/this evening)?
| (when/what time/from when) (is dinner/is lunch/do you serve dinner/do you serve lunch/do you do dinner/can i get
dinner/can i get lunch)?
| (until when/how late/till when) (is the kitchen open/do you serve/do you serve food/can we order food/can i get
food/are you serving)? | do you (open/close) (late/early/daily/every evening/at the weekend/on {weekday})?
| which days are you open? | is (lunch/dinner) (over/on/still on)?""",
    },
    "breakfast": {
        "clause": """
when breakfast is | what time breakfast starts | when breakfast begins | when breakfast ends
| how late breakfast goes | how long breakfast goes on | when i can get breakfast | when you serve breakfast
| if there is still breakfast | how early breakfast is | if i can still have breakfast""",
        "subject": """
breakfast | the breakfast time | the breakfast hours | breakfast in the morning |
breakfast tomorrow""",
        "whole": """
(when/what time/from what time/at what time) (does breakfast open/do you start breakfast/can we eat breakfast/can
one have breakfast/will breakfast be)?
| (until when/till when/how late/how long) (do you serve breakfast/is there breakfast/can we get breakfast/does
breakfast last/is breakfast on)? | (am i/are we) (too late/too early/in time/still in time) for breakfast?
| is breakfast (ready/over/finished/already over/already on/served now)?
| (what time/when) (is breakfast tomorrow/do we have breakfast/is the breakfast buffet open/does the buffet open)?
| breakfast, what time? | breakfast is at what time?""",
    },
    "menu": {
        "clause": """
what is on the menu | what you have to eat | what there is for dinner | what there is to eat tonight
| which dishes you have | what you serve | what you cook | what the kitchen has | what we can eat
| what food there is""",
        "thing": "a menu | the menu card | the dinner menu | the list of dishes | the food menu",
        "deed": """
see a menu | look at the menu | hear the menu | know the menu | see the dinner menu | take a look at the menu""",
        "favour": """
tell us the menu | bring a menu | show us the menu | list your dishes | tell me what there is
| say what is on the menu""",
        "subject": "the menu | the food | the dishes | your food",
        "whole": """
what (is being served/are you serving/is served/is there/do we get/is cooking) (tonight/today/for dinner/for
lunch/this evening)?
| which (dishes/meals/main dishes/foods) (are there/do you serve/are on the menu/can i have/do you make)?
| what (could i eat/can we get to eat/do you have for dinner/have you got for lunch/have you got tonight/is on
offer/is on the card)?""",
    },
    "recommend": {
        "clause": """
what is good | what you would recommend | what is best | what i should eat | what i should order
| which dish is good | what the special is | what people like here | what to order | what to choose""",
        "favour": """
recommend a meal | recommend us something | suggest a dish | suggest something good | help me choose
| choose a dish for me | give me a tip | pick something for me | help me decide""",
        "thing": "a recommendation | a suggestion | your advice on the food | a tip | something really good",
        "whole": """
what (would you pick/would you order/would you choose/do you like/should we get/should i get/should i have/should i
go for/should we order) (here/tonight/for dinner/today)?
| (what is/what's) (nice/tasty/the best here/the best thing here/the best meal/special/special today/your
favorite/the best on the menu)?
| which (dish/meal/one) (would you take/do you recommend/should i choose/would you choose/is your favorite/is the
most popular/do people like)? | i (do not know/have no idea/am not sure) what to (choose/take/have/get/order)
| (we/i) cannot (choose/make up my mind/decide) | any (suggestions/suggestion/tips/ideas/special dishes)?
| is there (a special dish/a house specialty/something special/anything special) (today/tonight)?""",
    },
    "vegetarian": {
        "thing": """
something vegetarian | a vegetarian meal | a dish without meat | food without meat | a meatless dish
| something with no meat | vegetarian food""",
        "clause": """
what is vegetarian | which dishes are without meat | if you have something vegetarian
| what vegetarians can eat here | if there is a dish without meat | what has no meat in it""",
        "deed": "eat vegetarian | eat without meat | have something without meat | order something vegetarian",
        "subject": "vegetarian food | vegetarian dishes | something vegetarian | vegetarians | food with no meat",
        "whole": """
do you (have/serve/offer/cook/make) (anything meatless/vegetarian meals/a vegetarian dish/dishes without meat/food
with no meat/something for vegetarians)?
| (is there/are there/have you got/got) (any vegetarian food/vegetarian meals/meatless dishes/a vegetarian
choice/something meatless/anything with no meat)?
| (my son/my friend/my wife/my daughter/my husband/my mother) (is vegetarian/eats vegetarian/does not eat meat/never
eats meat) | (i am/we are/i'm) (vegetarian/strictly vegetarian/not eating meat/eating no meat/both vegetarians)
| (which/what) (meals/dishes/food) (come without meat/are meatless/have no meat in them)?
| (no meat/nothing with meat/without meat) (for me/for us), please
| what (can you give/is there for/do you have for) (a vegetarian/vegetarians/someone who eats no meat)?""",
    },
    "price": {
        "clause": """
how much the {dish} is | what the {dish} costs | the price of the {dish} | how much you charge for the {dish}
| what you charge for the {dish} | how much the {dish} costs | how expensive the {dish} is | how much a {dish} is
| what a {dish} costs | what i have to pay for the {dish}""",
        "subject": """
the price of the {dish} | the price for the {dish} | the cost of the {dish} | the price
for a {dish}""",
        "whole": """
(how much is/what is the price for/what does it cost to have/how much would it be for/how much have i to pay for)
(a/one/your) {dish}?
| the {dish}, (how much/what is the price/what is it/how expensive is that/how much would it be/how many euros/what
price)?
| (how much/how many euros/what) (do i owe for/must i pay for/will i pay for/do you get for/does it cost for)
(the/a/one) {dish}? | is (the/a) {dish} (very expensive/costly/dear/more than ten euros/cheap here)?
| (i like/about) the {dish}, how much is that? | {dish}, how much? | and what about the price of the {dish}?""",
    },
    "room_price": {
        "clause": """
how much a room is | what a room costs | what a night costs | how much one night costs | what you charge for a room
| what your rates are | how expensive a room is | how much a double room is | what a single room costs
| how much you take for a night | if breakfast comes with the room | what it costs to sleep here""",
        "subject": """
the price of a room | the room price | the room rates | the price for one night | the price of a double room
| the cost of a room | the nightly price""",
        "whole": """
(how much/what) (does a night cost/does it cost per night/does it cost for a night/does a double cost/does a single
room cost/does it cost to sleep here)?
| (how much/what) (are your rooms/are the rooms/are rooms here/is the room/is a night/is a night here/is a night in
the hotel/is the room per night)?
| (what is/what's) the (price for a night/rate per night/rate for one night/room price/cost per night/cost of a
night/price of one night)?
| (how much do i/what do i/what would i) (pay for a night/pay per night/pay for one night/have to pay for a room)?
| (is/are) (a room/your rooms/the rooms/a night) (expensive/cheap/very expensive/costly)?
| does (a room/the room/the price/that) (include/come with) (breakfast/the breakfast)?
| (do i get/is there/do we have) breakfast (with the room/in the price/for that price)?
| what will a room (cost/cost me/cost us)?""",
    },
    "bill": {
        "thing": "the bill | the check | my bill | our bill | the tab | our check | the final bill",
        "deed": """
pay now | pay the bill | settle the bill | settle up | have the bill now | pay our bill | get the bill
| close the tab | pay for dinner | pay for our food""",
        "favour": """
bring the bill | bring the check | get us the check | bring our bill | make the bill | bring me the check
| get me the check | prepare my bill | bring us the tab""",
        "clause": """
how much i owe you | what we owe you | how much it is all together | what it all comes to | what the total is""",
        "whole": """
(bill/check/tab)(/, please/ please/ for us, please)
| (we are/i am/i'm/we're) (done/finished/done eating/ready to go), (the check please/can we settle up?/the bill/we
will pay now)
| (how much/what) (does it come to/does that come to/is the total/is our total/is the damage/do we have to pay/must
i pay) (in all/all together/now)?
| (what is/how much is) (my bill/our bill/the bill/the total/it in total/all that)? | time for the (bill/check)""",
    },
    "pay_card": {
        "deed": """
pay by credit card | pay with cash | pay in cash | pay with a card | use a credit card | use my card
| pay with the phone | pay with my watch | pay by debit card | pay cash here | use a debit card
| pay with a bank card""",
        "clause": """
how i can pay | if you take cards | if you take cash | which cards you take | if i can use my card
| whether i can pay cash | if you accept credit cards | how we can pay here | if cards are okay""",
        "subject": "paying by card | paying in cash | credit cards | card payment | cash",
        "whole": """
do you (take/accept/allow/want/prefer) (plastic/credit/bank cards/debit/a credit card/a debit card/card payment/my
bank card/only cash/cash only/cash here/foreign cards)?
| (is/are) (cash/a card/cards/card payment/credit/paying by card/paying cash)
(fine/okay/accepted/possible/allowed/good) (here/for you/with you)?
| (must it be/does it have to be/is it) (cash/cash only/card only/only cash)?
| (can/may/could) (i/we) (pay electronically/use cash/use my phone to pay/pay with plastic/put it on my card)?
| i (have/only have/only carry) (a credit card/no cash/a bank card/my phone/no card)[ with me]
| what (payments/cards/ways of payment) do you (take/accept)? | in what way can i pay?""",
    },
    "directions": {
        "clause": """
where the {place} is | where to find the {place} | how to get to the {place} | how i get to the {place}
| how i find the {place} | the way to the {place} | which way the {place} is | where i can find the {place}
| how far the {place} is | if there is a {place} | if you have a {place} | where your {place} is""",
        "favour": """
tell me the way to the {place} | show me where the {place} is | explain the way to the {place}
| direct us to the {place} | help me find the {place} | take me to the {place} | point us to the {place}
| guide me to the {place}""",
        "deed": """
go to the {place} | get to the {place} | find the {place} | see the {place} | use the {place} | visit the {place}""",
        "subject": "the {place} | the way to the {place} | your {place}",
        "whole": """
(where is/where's/where do you have/where have you got) (your {place}/a {place}/the {place} here/the {place} in this
hotel/the {place} located/the {place} please)?
| (how do i/how does one/how would i/how can one) (get to/reach/come to/go to/walk to/find) the {place}[ (from
here/from the desk/please)]?
| (does the hotel have/does this hotel have/have you got/is there/is there by chance/are we near) a {place}[
(around/in the house/in the hotel/around here/close by/near here)]?
| (in which direction/which direction/which floor/on which floor) is the {place}?
| (i am/we are/i'm/we're) (searching for/trying to get to/trying to find/going to/lost, where is/on the way to) the
{place}
| (i/we) (need to go to/have to find/want to see/must find/would like to go to/want to use/don't see/could not
find/still cannot find) the {place} | the {place}, where (is it/is that/do i find it/would that be)?""",
    },
    "wifi": {
        "clause": """
what the wifi password is | if you have wifi | if there is wifi | how i get on the wifi
| how to connect to the internet | how i get online | the password of the wifi | if the wifi is free
| what the password is | whether the rooms have wifi | how to use the wireless""",
        "thing": """
the wifi password | the internet password | the wifi code | the password for the internet | wifi | internet access
| the network password | the wireless password | the key for the wifi""",
        "deed": """
use the internet | get on the wifi | connect to the wifi | connect to the internet | get online | go online
| log in to the wifi | use your wireless | check my mail online | connect my phone""",
        "subject": """
the wifi | the internet | the wifi password | wireless internet | the password | internet in the room""",
        "whole": """
(is/do you have/does the hotel have/have you got/is there/have we) (free wifi/free internet/wireless/wireless
internet/wifi in the room/a wifi/an internet connection/internet access)[ (here/in the hotel)]?
| (what's/what is) (the code/your wifi password/the wireless password/the network password/the wifi code/your wifi
called/the network called/the password of the internet)?
| (my phone/my laptop/my computer) (cannot connect/does not connect/is not online/needs internet/needs the wifi)
| (the wifi/the internet/the wireless/my internet) (is down/is not working/is broken/does not connect/asks for a
password)
| (i/we) (cannot/can't/could not) (get online/connect/get on the wifi/connect to the internet/use the wifi/log in to
the internet) | (i/we) (forgot/lost/do not know/don't have) the (password/code/wifi code/internet password)
| (does/do) (the wifi/the internet/wireless/internet) (cost anything/cost extra/cost money)?
| (wifi/internet)(?/ please/ password/ password?/ password please/ code?)""",
    },
    "check_in": {
        "clause": """
when i can check in | when we can check in | what time check in is | when check in starts | if i can check in early
| when my room is ready | when our room will be ready | when i can have my key | if my room is ready
| how early we can check in | from when i can have the room | when i can get into the room""",
        "deed": """
check in | check in now | check in early | check in already | have my room now | have my key | get into my room
| go up to my room | move in now | get my room key""",
        "thing": "my room key | the key to my room | my key | our key | an early check in",
        "subject": "check in | the check in time | checking in | early check in",
        "whole": """
(when/what time/from when/from what time/at what time/how early/how soon) (can one check in/does check in begin/does
check in open/is the room free/do i get the key/may i move in/is our room ready/could we check in/will our room be
ready)?
| (is/are) (my room/our room/the room/the rooms) (ready/ready now/free yet/free now/clean yet/done yet/available
now)? | (we/i) (have arrived/just arrived/am here), (can we check in/when can we check in/is our room ready)?
| (what is/what's) the (earliest time to check in/earliest i can come/first time i can check in/time for check in)
| can (i/we) (come early/arrive early/get in early/already go to the room/go in before three)?""",
    },
    "check_out": {
        "clause": """
when i have to check out | when we have to leave | what time check out is | how late i can check out
| until when i can stay in the room | when i have to leave the room | by when we must be out
| how long we can keep the room | when the room must be empty | if i can check out later
| when i have to give the key back | until when the room is ours""",
        "deed": """
check out late | check out later | leave later | keep the room longer | stay longer in the room
| stay in the room until noon | have a late check out | leave the room at noon | keep my room a little longer""",
        "thing": "a late check out | a later check out",
        "subject": "check out | the check out time | checking out | late check out | the time to leave",
        "whole": """
(when/what time/by when/by what time/at what time) (do i leave/must i check out/must we leave/should i be out/do you
want me out/do we check out/is check out tomorrow/have we to check out/do i vacate the room/must the room be free/do
we return the key)?
| (until when/till when/how late/until what time) (is the room ours/can we keep the room/may i keep the room/can we
stay in our room/may we stay/can we check out/do i have the room/is the room mine)?
| (when/what time) (do you need us out/do i need to vacate/do i have to hand in the key/do you want the key back/is
the latest check out/does the room have to be empty/do we need to go)?
| (what is/what's) the (latest i can leave/latest time to leave/last moment to check out/time for check out/deadline
for check out)? | (do i/do we/must i) have to (leave early/be out early/go early in the morning)?""",
    },
    "taxi": {
        "thing": """
a taxi | a cab | a taxi to the airport | a cab to the station | a taxi to the center | a ride to the airport
| a taxi right now | a car to the airport | a taxi, quickly""",
        "favour": """
call me a cab | call us a taxi | get me a cab | get us a taxi | order a cab | order me a taxi | call a cab for me
| find us a taxi | send for a taxi | ring for a taxi | call a taxi for us""",
        "deed": """
take a cab | order a taxi | get a taxi | get a cab | have a taxi called | go to the airport by taxi
| go to the station by cab | book a taxi""",
        "clause": """
how i get a taxi | where i get a cab | if you can call a taxi | where the taxis are | if i can get a taxi here""",
        "whole": """
(taxi/cab)(/, please/ please/ for me/ for us, please/ to the airport)
| (is/are) there (any taxis/a taxi/taxis/a cab/any cabs)[ (here/outside/nearby/around)]?
| (i/we) (have to get/need to get/must get/have to go/am going) to the (airport/center/city) by (taxi/cab)""",
    },
    "thanks": {
        "whole": """
(great/good/perfect/wonderful/lovely/excellent/fine/super/nice/okay/all right/very good/brilliant/fantastic),
(thanks/thanks a lot/thank you/thank you so much/many thanks/thank you very much/thanks so much)
| (thanks/thank you/many thanks) (for that/for the help/for your kindness/for the information/for telling me/for all
your help/for your time)
| (thanks/thank you) (again/once again/once more/a million/a thousand times/indeed/so very much/dear/my friend)
| (that is/that's/that was/it was) (kind/very kind/nice/nice of you/good of you/so kind of you/really helpful/a big
help/very nice of you)[, (thanks/thank you)]
| (i am/we are/i'm) (very grateful/grateful/so grateful/much obliged/thankful)
| you (helped me a lot/have been kind/have been a great help/are so helpful/are too kind)
| (cheers, thank you/cheers for that/cheers, mate/cheers then/big thanks/much appreciated/i really appreciate
that/ta/ta very much/bless you, thank you)""",
    },
    "goodbye": {
        "whole": """
(goodbye/bye/bye bye/see you/so long)(, see you/, see you soon/, see you tomorrow/, see you later/, have a nice
day/, good night/, take good care/, until later/, until tomorrow/, have a nice evening)
| (okay/well/all right/fine/good/great/thanks/thank you/thank you very much/thanks a lot)(, goodbye/, bye bye/, see
you/, bye then/, goodbye then/, see you later/, good night)
| (that is/that's/that was) (all/everything/it/all i need/all i wanted/all for now/all for today)(/, bye/, goodbye/,
thanks/, thank you)
| (no/no thanks/no thank you), (that is all/i am fine/i have everything/we have everything/that's it/i need nothing
else/nothing more/i am done)
| (nothing more/nothing further/nothing else/no more)(/, thanks/ for now/ for today/, goodbye/ today, thanks/, that
was it) | have a (good/nice/great/pleasant/lovely) (day/evening/night/afternoon/time/one/weekend)
| (i am/i'm/we are) (off/leaving now/going now/going to bed/done, goodbye/finished, bye/off to bed, good night)
| (i/we) (must go/have to leave/must leave now/should go/have to run/need to go), (bye/goodbye/see you)
| (sleep well/good night then/good night, sleep well/a good night to you all/have a good night, bye/take good
care/take care of yourself/take care, bye) | (until/till) (later/then/next week/we meet again/soon)
| catch you later | end the call[, please] | (you can hang up/i am hanging up now)""",
    },
}
