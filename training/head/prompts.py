"""Prompts for training conversations: `python -m training.head.prompts --natural FILE --out FILE`.

Adds to natural prompts (lines of JSON with `text` and `kind`) templates for the classes of `assets/chat_prompts.json`,
and tasks on the texts that they contain or that the target wrote (`--answers`): summaries, translations, questions on
passages, rewriting. Prompts that share eight words with evaluation prompts are left out.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdemo.models.load import read_tokenizer
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.prompts import load_prompts
from training.head import conversations

SHARED_WORDS = 8
LONGEST = 5000  # characters of a prompt

_SUBJECTS = (
    "bees,volcanoes,solar panels,the Silk Road,chess,coffee,glaciers,jazz,bridges,photography,the human heart,comets,"
    "sailing ships,tea,bicycles,rainforests,robots,the printing press,penguins,electric cars,mountain climbing,opera,"
    "migraine,medieval castles,data bases,tides,sourdough,origami,the Olympic Games,submarines,poetry,trees in a city,"
    "black holes,public libraries,bats,marathon training,clouds,the stock market,pottery,satellites,desert plants,"
    "learning a language,ancient Egypt,water pumps,fairy tales,wind power,whales,recycling,map projections,violins,"
    "the immune system,camping,typewriters,earthworms,time zones,ice cream,lighthouses,trains,spiders,sleep,budgeting"
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
_REWRITING = (
    "Repeat the text and replace {name} by {second}.|Rewrite the text in the past tense.|Make the text more formal.|"
    "Repeat the text with each sentence on its own line.|Write the text in capital letters.|"
    "Repeat the text, but leave out the last sentence.|Turn the text into a list.|Shorten the text a little."
).split("|")
_FACTS = (
    "Convert to JSON|Write as a Markdown table|Write as CSV with a header|Extract the names as a list|Write as YAML|"
    "Answer in one line per person: who, what, when|Extract all places"
).split("|")
FOLLOWING = (
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


_SUMMARIES = (
    "Summarize the following text:|Summarize:|Summarise this text in two sentences:|Write a brief summary:|"
    "Give a short summary of this article:|What are the main points of this text?|Shorten this to a few sentences:"
).split("|")
_TRANSLATIONS = (
    "Translate to {language}:|Translate the following sentence into {language}:|Translate English to {language}:|"
    "How do you say this in {language}?|Please translate into {language}:"
).split("|")
_LANGUAGES = "Spanish,French,German,Italian,Portuguese".split(",")
_QUESTIONS_ON_TEXTS = (
    "Answer the question with the help of the passages.|Use the texts to answer the question.|"
    "Read the following and answer the question."
).split("|")
_TEXT_TASKS = (
    "Rewrite the following text in simpler words:|Proofread and improve this text:|Rewrite this text for a child:|"
    "Turn this text into a list of facts:|Extract the important names, places and dates:|Continue this text:|"
    "Write questions that this text answers:|Write a long article about {subject}.|Write a detailed essay on {subject}."
).split("|")

_TEMPLATES: dict[str, Callable[[random.Random], str]] = {
    "question": lambda rng: _topic(_QUESTIONS, rng),
    "rewriting": lambda rng: _text_task(_REWRITING, rng, "\n\n"),
    "list": lambda rng: _topic(_LISTS, rng),
    "facts": lambda rng: _text_task(_FACTS, rng, ": "),
}


@dataclass(frozen=True)
class Texts:
    """Sources of tasks."""

    passages: list[str]
    answers: list[tuple[str, str]]  # question and answer of the target
    translated: list[tuple[str, str]]  # language, and a translation by the target

    def long(self, rng: random.Random) -> str:
        if self.answers and rng.random() < 0.45:
            chosen = rng.choices(self.answers, k=rng.choice((1, 2)))
            return "\n\n".join(answer for _, answer in chosen)
        return " ".join(rng.choices(self.passages, k=rng.choice((1, 1, 2, 3))))


def _summary(texts: Texts, rng: random.Random) -> str:
    return f"{rng.choice(_SUMMARIES)}{rng.choice((' ', chr(10)))}{texts.long(rng)}"


def _translation(texts: Texts, rng: random.Random) -> str:
    if texts.translated and rng.random() < 0.4:
        language, text = rng.choice(texts.translated)
        return f"Translate {language} to English: {text}"
    sentence = rng.choice(re.split(r"(?<=[.!?])\s+", texts.long(rng)))
    return f"{rng.choice(_TRANSLATIONS).format(language=rng.choice(_LANGUAGES))} {sentence}"


def _retrieval(texts: Texts, rng: random.Random) -> str:
    question, answer = rng.choice(texts.answers)
    passages = [answer, *rng.choices(texts.passages, k=rng.choice((1, 2)))]
    rng.shuffle(passages)
    return "\n\n".join([rng.choice(_QUESTIONS_ON_TEXTS), *passages, f"Question: {question}"])


def _other_task(texts: Texts, rng: random.Random) -> str:
    task = rng.choice(_TEXT_TASKS)
    return _topic([task], rng) if "{" in task else f"{task}\n\n{texts.long(rng)}"


_TASKS = {"summary": _summary, "translation": _translation, "retrieval": _retrieval, "text task": _other_task}


def word_groups(text: str) -> set[tuple[str, ...]]:
    """Return all `SHARED_WORDS` consecutive words."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1)}


def without(prompts: Sequence[tuple[str, str]], evaluation: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the prompts (kind, text) that occur once, have at most `LONGEST` characters and share no words."""
    forbidden, seen = set[tuple[str, ...]]().union(*map(word_groups, evaluation)), set[str]()
    for kind, text in prompts:
        if text not in seen and len(text) <= LONGEST and forbidden.isdisjoint(word_groups(text)):
            seen.add(text)
            yield kind, text


def read_texts(natural: Sequence[tuple[str, str]], answers: Path | None, target: str) -> Texts:
    """Return the longest paragraphs of text tasks, and first turns of the conversations in `answers`."""
    passages = [max(text.split("\n\n"), key=len) for kind, text in natural if kind == "text task"]
    texts = Texts([text for text in passages if len(text) > 200], [], [])
    tokenizer = read_tokenizer(ModelSpec(target))
    for path in sorted(answers.glob("*.npz")) if answers else ():
        for item in conversations.read(path):
            turns = re.split(r"<\|im_start\|>\w+\n|<\|im_end\|>\n?", tokenizer.decode(item.tokens.tolist()))
            _system, question, answer = [turn for turn in turns if turn][:3]
            asked = re.search(rf"\b(?:to|in|into) ({'|'.join(_LANGUAGES)})\b", question[:80])
            if asked:
                texts.translated.append((asked[1], answer))
            elif item.setting != "one" and len(answer.split()) > 30 and len(question) < 200:
                texts.answers.append((question, answer))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.head.prompts", description=__doc__)
    parser.add_argument("--natural", type=Path, required=True, help="prompts, one line of JSON each")
    parser.add_argument("--answers", type=Path, help="directory of conversations with the target (*.npz)")
    parser.add_argument("--evaluation", type=Path, nargs="*", default=(), help="prompts never to be trained on")
    parser.add_argument("--target", default=PAIRS[CHAT_PAIR].target, help="GGUF file or directory of a chat model")
    parser.add_argument("--templates", type=int, default=9000)
    parser.add_argument("--tasks", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    natural, *evaluation = (
        [(line["kind"], line["text"]) for line in map(json.loads, filter(None, path.read_text("utf-8").split("\n")))]
        for path in (options.natural, *options.evaluation)
    )
    rng, texts = random.Random(options.seed), read_texts(natural, options.answers, options.target)
    kinds = [kind for kind in _TASKS if texts.answers or kind != "retrieval"]
    prompts = [(f"natural {kind}", text) for kind, text in natural]
    prompts += [(f"natural {kind}", _TASKS[kind](texts, rng)) for kind in rng.choices(kinds, k=options.tasks)]
    prompts += [(kind, _TEMPLATES[kind](rng)) for kind in rng.choices(list(_TEMPLATES), k=options.templates)]
    rng.shuffle(prompts)
    forbidden = [prompt.text for prompt in load_prompts(chat=True)]
    forbidden += [text for prompts_of_file in evaluation for _, text in prompts_of_file]
    kept = list(without(prompts, forbidden))
    lines = (json.dumps({"kind": kind, "text": text}) + "\n" for kind, text in kept)
    options.out.write_text("".join(lines), "utf-8")
    print(f"{len(kept):,} of {len(prompts):,} prompts")


if __name__ == "__main__":
    main()
