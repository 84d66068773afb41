"""Prompt generators for self-distillation: one pure function of (seed, index), eight categories.

Templates and fillers are this project's own and are kept apart from the workloads that measure;
`ngram_overlap` says how far apart.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spectune.train.slots import SLOTS

TEMPLATES: dict[str, tuple[str, ...]] = {
    "chat": (
        "Explain {topic} to {audience}.",
        "What are the three most important things to know about {topic}?",
        "I want to get better at {habit}. Where should I start?",
        "Give me advice: {dilemma}. What should I do?",
        "Plan a {n}-day trip to {place} for a family with two children.",
        "Compare {pair}. Which one would you choose and why?",
        "Write a polite email to {company} because {product} arrived damaged.",
        "How does one become {job}?",
        "List {n} common mistakes people make with {topic} and how to avoid them.",
        "What questions should I ask before buying {product}?",
        "Why do people care about {topic}?",
        "Draft a short speech for the opening of {event} in {place}.",
        "How do I cook {dish} for {n} people? Give me the ingredients and the steps.",
        "What are the advantages and disadvantages of {habit}?",
        "Give me {n} interview questions for {job}, with a good answer for each.",
        "Tell me an interesting fact about {topic} and one about {place}.",
    ),
    "code": (
        "Write a {language_code} function that {function}.",
        "Write a {language_code} function that {function}, with a docstring and an example call.",
        "Implement a {class_name} class in {language_code} with the most useful methods.",
        "Explain {code_concept} with a short {language_code} example.",
        "Write unit tests for a {language_code} function that {function}.",
        "Write a SQL query that returns {sql}.",
        "Complete this code:\n\ndef solve(items):\n    # {function}\n",
        "Show me how to use {code_concept} in {language_code}, step by step.",
        "Write a small command-line program in {language_code} that {function}.",
        "What is wrong with a function that {function} but fails on empty input? Show a fixed version in "
        "{language_code}.",
    ),
    "json_extraction": (
        "Extract name, city and date as JSON from this text: {person} moved to {place} on {day} {month} "
        "{year} to work as {job}.",
        "Return a JSON object with the keys company, product, price and month.\n\n{company} announced "
        "{product} for {price} euros. Sales begin in {month}.",
        "Turn the order into JSON with a list of items, each with name and quantity: {person} ordered {n} "
        "{item} and {m} {item2} from {company}.",
        "Read the notice and answer only with JSON {{\"event\", \"place\", \"date\", \"contact\"}}: "
        "{event} takes place in {place} on {day} {month}. Please write to {person} for details.",
        "Convert this list to a JSON array of objects with the fields name, job and city:\n- {person}, {job}, "
        "{place}\n- {person2}, {job2}, {place2}\n- {person3}, {job3}, {place3}",
        "Extract all numbers with their meaning as JSON from this report.\n\n{passage}",
        "Give the sentiment, the product and the main complaint as JSON: \"I bought {product} from {company} "
        "in {month}. {quote}, but after {n} weeks it stopped working.\"",
    ),
    "summarization": (
        "Summarize the following text in two sentences.\n\n{passage}\n\n{passage2}",
        "Write a one-paragraph summary of this article:\n\n{passage} {passage2} {passage3}",
        "Give the three key points of the text as a bulleted list.\n\n{passage} {passage2}",
        "Write a headline and a short summary.\n\n{passage}\n{passage2}",
        "Summarize for {audience}:\n\n{passage} {passage2}",
        "TL;DR of this news item, please: {passage} {passage2} {passage3}",
    ),
    "translation": (
        "Translate into {tongue}: {sentence}",
        "Translate the following sentences from English into {tongue}.\n\n{sentence} {sentence2}",
        "How do you say \"{sentence}\" in {tongue}? Explain the difficult words.",
        "Translate this paragraph into {tongue}.\n\n{sentence} {sentence2} {sentence3}",
        "Give a {tongue} and a {tongue2} translation of: {sentence}",
    ),
    "math": (
        "{person} has {a} {item} and buys {b} more. Then {c} are given away. How many {item} are left?",
        "A shop sells {item} for {n} euros each. {person} buys {m} and pays with a {p}-euro note. How much "
        "change is due?",
        "A train travels {p} kilometres in {n} hours. How far does it get in {m} hours at the same speed?",
        "Solve for x: {n}x + {a} = {b2}. Show every step.",
        "What is {p} percent of {q}? Explain how you get the answer.",
        "A rectangle is {n} metres long and {m} metres wide. What are its area and perimeter?",
        "{person} reads {a} pages a day. How many days does a book of {q} pages take?",
        "The sum of two numbers is {q} and their difference is {n}. Find both numbers.",
        "A recipe for {n} people needs {a} grams of flour. How much is needed for {m} people?",
        "{person} saves {a} euros in the first month and {n} euros more each month than the month before. "
        "How much is saved after {m} months?",
        "Compute ({a} + {b}) * {n} - {m} step by step.",
        "In a box of {q} {item}, one in {n} is broken. How many are whole?",
    ),
    "rag": (
        "Use only the context to answer.\n\nContext:\n{passage}\n{passage2}\n\nQuestion: Who is quoted and what "
        "did they say?",
        "Context: {passage}\n\nQuestion: What was the cause and what was the effect?\nAnswer:",
        "Answer the question from the documents and name the document you used.\n\n[1] {passage}\n\n[2] "
        "{passage2}\n\n[3] {passage3}\n\nQuestion: What happened in {month}?",
        "Read the passages.\n\n{passage}\n\n{passage2}\n\nWhich organisations are mentioned, and what did each "
        "of them do?",
        "According to the text below, what will happen next? If the text does not say it, say so.\n\n{passage} "
        "{passage2}",
    ),
    "creative": (
        "Write {form} about {animal} that finds {object}.",
        "Write {form} set in {place}. The mood is {mood}.",
        "Write {form} about {job} who discovers {object} on a rainy evening.",
        "Invent a dialogue between {job} and {animal} about {topic}.",
        "Write {form} that begins with the words: \"{quote}\".",
        "Describe {place} in {month} in a {mood} tone, without naming the city.",
        "Create a character who is {job}, afraid of {topic}, and owns {object}. Write the first scene.",
        "Write a product slogan and a short advertisement for {product}.",
    ),
}  # fmt: skip

PASSAGE = (
    "{company} said in {month} that {effect} in {place} after {cause}. \"{quote},\" said {person}, who has been "
    "{job} for {n} years. The plan costs about {price} thousand euros and should be finished by {month2} {year}.",
    "In {place}, {event} drew {q} visitors in {month}. Because of {cause}, {effect}. {person}, {job}, called it a "
    "turning point: \"{quote}.\" The organisers from {company} want to repeat it next year.",
    "{person} started with {n} {item} and an idea about {topic}. Today {company} employs {p} people in {place} and "
    "{place2}. After {cause} last {month}, {effect}. Critics point out that {product} is still too expensive.",
    "A new study about {topic} was presented in {place} on {day} {month}. It followed {q} people over {n} years. "
    "The authors, led by {person}, found that {habit} helped most participants. {company} paid for the work; "
    "{effect}.",
)  # fmt: skip

_NUMBERS = {
    "n": (2, 12), "m": (3, 9), "a": (12, 95), "b": (10, 80), "c": (2, 11), "p": (15, 90), "q": (120, 900),
    "day": (1, 28), "year": (1995, 2031), "price": (20, 980), "b2": (100, 400),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPrompt:
    category: str
    text: str


def template_prompt(seed: int, index: int) -> TrainingPrompt:
    """The index-th generated prompt: categories take turns, template and fillers are drawn."""
    rng = random.Random(f"{seed}:{index}")
    category = tuple(TEMPLATES)[index % len(TEMPLATES)]
    return TrainingPrompt(category=category, text=_fill(rng.choice(TEMPLATES[category]), rng))


def _fill(template: str, rng: random.Random) -> str:
    """Replace every {slot}; a digit at the end of a name draws a second, independent filler."""
    text = template.replace("{{", "\0").replace("}}", "\1")

    def filler(match: re.Match[str]) -> str:
        name = match.group(1)
        base = name if name in _NUMBERS else name.rstrip("0123456789")
        if base in _NUMBERS:
            return str(rng.randint(*_NUMBERS[base]))
        if base == "passage":
            return _fill(rng.choice(PASSAGE), rng)
        return rng.choice(SLOTS[base])

    text = re.sub(r"\{(\w+)\}", filler, text)
    text = text.replace("\0", "{").replace("\1", "}")
    return re.sub(r"([.\n] ?|^)(an?|the) ", lambda m: m.group(1) + m.group(2).capitalize() + " ", text)


def ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    """Word n-grams of a text, lower case, punctuation dropped."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def ngram_overlap(texts: Iterable[str], reference: Sequence[str], *, n: int = 8) -> float:
    """Share of `texts` that have at least one word n-gram in common with the reference texts."""
    known: set[tuple[str, ...]] = set().union(*(ngrams(text, n) for text in reference))
    hits = [bool(ngrams(text, n) & known) for text in texts]
    return sum(hits) / len(hits) if hits else 0.0
