"""User turns from templates for the five classes of `assets/chat_prompts.json`, and follow-up messages."""

from __future__ import annotations

import random

_SUBJECTS = (
    "bees,volcanoes,solar panels,the Silk Road,chess,coffee,glaciers,jazz,bridges,photography,the human heart,comets,"
    "sailing ships,tea,bicycles,rainforests,robots,the printing press,penguins,electric cars,mountain climbing,opera,"
    "migraine,medieval castles,data bases,tides,sourdough,origami,the Olympic Games,submarines,poetry,trees in a city,"
    "black holes,public libraries,bats,marathon training,clouds,the stock market,pottery,satellites,desert plants,"
    "learning a language,ancient Egypt,water pumps,fairy tales,wind power,whales,recycling,map projections,violins,"
    "the immune system,camping,typewriters,earthworms,time zones,ice cream,lighthouses,trains,spiders,sleep,budgeting,"
    "video games,owls,gardening,cryptography,pyramids,coral reefs,job interviews,glass,cheese,the Moon,knitting,"
    "rainbows,earthquakes,dinosaurs,gravity,magnets,atoms,the ocean floor,lightning,snow,fossils,deserts,rivers,soil,"
    "mushrooms,algae,butterflies,horses,dogs,cats,wolves,elephants,dolphins,sharks,parrots,frogs,turtles,bacteria,"
    "viruses,vitamins,sugar,salt,bread,rice,olive oil,chocolate,honey,soup,pasta,fruit,breakfast,fasting,headaches,"
    "allergies,teeth,eyesight,memory,dreams,stress,friendship,loneliness,public speaking,teamwork,leadership,"
    "negotiation,email,spreadsheets,passwords,search engines,machine learning,sorting algorithms,recursion,databases,"
    "web browsers,the internet,mobile phones,batteries,3D printing,telescopes,microscopes,rockets,aeroplanes,"
    "helicopters,ships,tunnels,dams,concrete,wood,steel,plastic,paper,ink,soap,perfume,clothes,shoes,carpets,"
    "furniture,houses,kitchens,cities,villages,traffic,buses,roads,taxes,inflation,insurance,banks,money,trade,"
    "democracy,elections,laws,human rights,museums,theatre,dance,painting,sculpture,film,novels,newspapers,"
    "dictionaries,grammar,handwriting,mathematics,statistics,fractions,geometry,probability,logic,philosophy,ethics,"
    "religion,festivals,birthdays,weddings,travel,hotels,beaches,mountains,forests,farms,tomatoes,roses,bamboo,"
    "football,tennis,swimming,running,yoga,skiing,cycling,card games,puzzles,magic tricks,guitars,drums,singing,"
    "choirs,orchestras,radio,television,photos,maps,calendars,clocks,the Roman Empire,the Vikings,the Renaissance,"
    "the Industrial Revolution,explorers,pirates,kings and queens,inventions,electricity,heat,sound,light,colours,"
    "acids,metals,gold,diamonds,oil,nuclear power,climate change,pollution,water,rain,wind,the seasons,planets,stars"
).split(",")
_NAMES = "Alma,Boris,Chiara,Dmitri,Esther,Farid,Gloria,Hugo,Irene,Jamal,Kenji,Leona,Marek,Nadia,Oskar,Petra".split(",")
_CITIES = "Lima,Prague,Nairobi,Quebec,Seville,Hanoi,Bergen,Dakar,Perth,Krakow,Cusco,Izmir,Leeds,Osaka,Turku".split(",")
_THINGS = "kettle,lamp,bicycle,notebook,umbrella,backpack,keyboard,blanket,teapot,camera,drill,wallet".split(",")
_WORKS = (
    "paint the fence,call the plumber,order new paper,translate the letter,repair the door,update the list,"
    "book a table,send the photos,check the figures,water the plants,print the posters,collect the keys"
).split(",")
_DAYS = "Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday".split(",")

_QUESTIONS = (
    "What are {subject} good for?|How would you explain {subject} to a child?|Why do people care about {subject}?|"
    "Tell me about the history of {subject}.|What should a beginner know about {subject}?|"
    "What is a common mistake when dealing with {subject}?|Describe {subject} in three sentences.|"
    "Compare {subject} and {other}.|Which problems are connected with {subject}?|What do experts say about {subject}?|"
    "Is it true that {subject} can be dangerous?|How did {subject} change in the last century?|"
    "Give me advice on {subject}.|Write an introduction to an article about {subject}.|Can you summarise {subject}?|"
    "Write a short Python function that is useful for {subject}.|What is the connection between {subject} and {other}?"
).split("|")
_LISTS = (
    "List {count} facts about {subject}.|Write {count} quiz questions on {subject}, with answers.|"
    "Make a Markdown table with {count} rows about {subject}.|Give me {count} titles for a book on {subject}.|"
    "Write a Python list of {count} dictionaries about {subject}.|"
    "Count from {number} upwards, {count} numbers, one per line.|"
    "Write {count} lines of a CSV file about {subject}, with a header.|"
    "Write an HTML page with {count} headings on {subject}.|"
    "Write a class {thing} in Python with {count} attributes and their getters.|"
    "Write a step-by-step plan in {count} steps for a project on {subject}."
).split("|")
_FREE = (
    "Write a poem about {subject} and a {thing}.|Invent a story in which {name} finds a {thing} in {city}.|"
    "Make up {count} funny names for a {thing}.|Write a dialogue between {name} and {other}.|"
    "Describe a dream about {subject} in strange words.|Invent a word for {subject} and define it.|"
    "Write a letter from {city} that mentions {subject}, a {thing} and {name}.|Write a riddle about a {thing}."
).split("|")
_REWRITING = (
    "Repeat the text and replace {name} by {second}.|Rewrite the text in the past tense.|Make the text more formal.|"
    "Repeat the text with each sentence on its own line.|Write the text in capital letters.|"
    "Repeat the text, but leave out the last sentence.|Turn the text into a list.|Shorten the text a little."
).split("|")
_FACTS = (
    "Convert to JSON|Write as a Markdown table|Write as CSV with a header|Extract the names as a list|Write as YAML|"
    "Answer in one line per person: who, what, when|Extract all places"
).split("|")
_FOLLOW = (
    "Can you explain that in more detail?|Make it shorter.|Give me an example.|Why?|Are you sure about that?|"
    "Write the same as a list.|Now write it for a child.|What else should I know?|"
    "Summarise your answer in one sentence.|Continue.|Rewrite your last answer in a friendlier tone.|"
    "What is the most important point?"
).split("|")


def _sentences(rng: random.Random) -> str:
    sentences = []
    for name in rng.sample(_NAMES, rng.randrange(3, 7)):
        city, day, count = rng.choice(_CITIES), rng.choice(_DAYS), rng.randrange(2, 99)
        choices = (
            f"{name} lives in {city} and is {count} years old.",
            f"On {day} {name} will {rng.choice(_WORKS)}.",
            f"{name} bought a {rng.choice(_THINGS)} for {count} euros in {city}.",
            f"{name} must {rng.choice(_WORKS)} before {day}.",
            f"The {rng.choice(_THINGS)} of {name} was made in {rng.randrange(1890, 2020)}.",
        )
        sentences.append(rng.choice(choices))
    return " ".join(sentences)


def _text_task(templates: list[str], rng: random.Random, separator: str) -> str:
    text = _sentences(rng)
    used = [name for name in _NAMES if name in text]
    unused = [name for name in _NAMES if name not in text]
    task = rng.choice(templates).format(name=rng.choice(used), second=rng.choice(unused))
    return f"{task}{separator}{text}"


def _topic(templates: list[str], rng: random.Random) -> str:
    subject, other = rng.sample(_SUBJECTS, 2)
    return rng.choice(templates).format(
        subject=subject,
        other=other,
        count=rng.randrange(4, 16),
        number=rng.randrange(1, 500),
        name=rng.choice(_NAMES),
        city=rng.choice(_CITIES),
        thing=rng.choice(_THINGS),
    )


_MAKERS = {
    "question": lambda rng: _topic(_QUESTIONS, rng),
    "rewriting": lambda rng: _text_task(_REWRITING, rng, "\n\n"),
    "list": lambda rng: _topic(_LISTS, rng),
    "facts": lambda rng: _text_task(_FACTS, rng, ": "),
    "free": lambda rng: _topic(_FREE, rng),
    "follow": lambda rng: rng.choice(_FOLLOW),
}
CLASSES = ("question", "rewriting", "list", "facts", "free")


def message(kind: str, rng: random.Random) -> str:
    """Return a user message of a class, or a follow-up (`follow`)."""
    return _MAKERS[kind](rng)
