"""What the callers of the duplex lab say, in English and Mandarin.

`|` marks a place inside a sentence where a speaker may pause.
"""

QUESTIONS = {
    "en": (
        "What time is breakfast served in the morning?",
        "Could you tell me what there is for dinner tonight?",
        "How much do I pay for a room with a view of the garden?",
        "Please wake us tomorrow at half past six.",
        "Where can I leave my car over the weekend?",
        "Is there a swimming pool that children may use?",
        "What would you recommend to see in the old town?",
        "How do I get from the airport to the hotel?",
    ),
    "zh": (
        "请问早餐是几点开始的？",
        "今天晚上有什么好吃的吗？",
        "从机场到酒店怎么走？",
        "明天早上六点半请叫我起床。",
        "这附近有什么好玩的地方？",
        "带花园的房间一个晚上多少钱？",
    ),
}
HESITATIONS = {
    "en": (
        "I would like a table for | four people at eight, please.",
        "Can you tell me if | the train to the airport runs on Sunday?",
        "I am looking for a room with | two beds and a bath.",
        "We are going to arrive on | Friday evening after ten.",
        "My phone number is six one five | two two nine, did you get that?",
        "Could you send the bill to | my office in the city?",
    ),
    "zh": (
        "我想订一张 | 四个人的桌子，今天晚上八点。",
        "请问去机场的火车 | 星期天有没有？",
        "我们大概在 | 星期五晚上十点以后到。",
        "麻烦你把账单寄到 | 我在市中心的办公室。",
    ),
}
MONOLOGUES = {
    "en": (
        "So yesterday we drove all the way up to the lake, and on the way my brother noticed that he had left the keys "
        "of the house on the kitchen table, so we had to turn round, and of course by then the traffic was terrible.",
        "I have been thinking about the garden for a while, because the old trees take so much light, and my neighbour "
        "says that they must be cut before the winter, but I like them, so I am not sure what we should do about it.",
    ),
    "zh": (
        "昨天我们开车去湖边玩，走到半路我弟弟发现把家里的钥匙忘在厨房的桌子上了，所以我们只好掉头回去，结果路上堵车堵得特别厉害。",
    ),
}
INTERRUPTIONS = {
    "en": (
        "Wait, stop, I meant something else.",
        "Sorry, can you say that for Saturday?",
        "No, no, that is not what I asked.",
        "Hold on, what does it cost?",
        "Actually, never mind the price, where is it?",
    ),
    "zh": (
        "等一下，我不是这个意思。",
        "不对，我问的是星期六。",
        "先停一下，那个多少钱？",
        "不好意思，我想换一个问题。",
    ),
}
BACKCHANNELS = {
    "en": ("mm-hm.", "Yeah.", "Okay.", "Right.", "Uh huh.", "I see."),
    "zh": ("嗯。", "对。", "好。", "是。", "嗯嗯。"),
}
TICS = {"en": ("Um.", "Uh."), "zh": ("呃。",)}
SIDE_TALK = {
    "en": (
        "Honey, did you close the window in the kitchen?",
        "No, put it over there next to the door, thanks.",
        "One moment, I am on the phone.",
        "Have you seen my glasses anywhere?",
        "Put your shoes on, we are leaving in a minute.",
        "Can you turn that down a little, please?",
        "I will be right there, just let me finish this.",
        "The dog wants to go out again.",
    ),
    "zh": (
        "你把厨房的窗户关上了吗？",
        "放在门旁边就好，谢谢。",
        "等会儿再说，我在打电话呢。",
        "你看见我的眼镜了吗？",
        "快把鞋穿上，我们马上就走。",
        "帮我把电视关小一点。",
    ),
}
BROADCAST = {
    "en": (
        "And now the weather. Rain will move in from the west during the night, with strong winds along the coast.",
        "The match ended in a draw after a late goal in the second half, and the fans were delighted.",
        "Good evening. The parliament has voted for the new law on housing after a debate of nine hours.",
        "Stay with us, because after the break our guest will explain how bees find their way home.",
        "The museum has bought a painting that nobody had seen in public for almost a hundred years.",
        "In today's recipe we need three eggs, a little butter, and the juice of half a lemon.",
    ),
    "zh": (
        "下面是天气预报。今天夜里有小雨，沿海地区风力较大，请注意安全。",
        "各位观众晚上好，今天的主要新闻有：新地铁线路将于下个月正式开通。",
        "欢迎收看本期节目，我们请来了一位有名的厨师，教大家做一道家常菜。",
        "比赛进行到最后一分钟，主队终于踢进了关键的一个球。",
        "专家提醒大家，换季的时候要多喝水，早睡早起，适当运动。",
        "这座桥全长两公里，每天有超过五万辆汽车从上面经过。",
    ),
}
