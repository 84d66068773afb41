"""Invented passages that prompts quote: news, meetings, manuals, code. Sentences vary one by one."""

from __future__ import annotations

PASSAGES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (
        ("{company:x} said in {month} that {effect} in {place:p}.", "After {cause}, {effect}, {company:x} reports.",
         "{effect_cap}: this is what {company:x} announced on {weekday} in {place:p}."),
        ("The reason was {cause}.", "It blamed {cause}.", "", "Officials pointed to {cause}."),
        ("\"{quote},\" said {person:q}, who has been {job} for {n} years.", "{person:q}, {job}, was surprised.",
         "According to {person:q}, {job}, {effect}."),
        ("The plan costs about {price} thousand euros and should be finished by {month} {year}.",
         "About {q} people are affected.", "The city will pay {p} percent of the cost.", ""),
    ),
    (
        ("In {place:p}, {event} drew {q} visitors in {month}.", "{event_cap} in {place:p} was sold out in {m} hours.",
         "Only {p} people came to {event} in {place:p}."),
        ("Because of {cause}, {effect}.", "{sentence}", "The programme began at {hour} and ended after midnight."),
        ("{person}, {job}, called it a turning point: \"{quote}.\"", "{person} won the first prize, {product}.",
         "Some guests complained that {effect}."),
        ("The organisers from {company} want to repeat it next year.", "The next one is planned for {month} {year}.",
         "Tickets cost {n2} euros.", ""),
    ),
    (
        ("{person:q} started with {n} {item} and an idea about {topic}.", "{person:q} was born in {place} in {oldyear}.",
         "For {n2} years {person:q} worked as {job}."),
        ("Today {company:x} employs {p} people in {place} and {place}.", "In {year} {person:q} founded {company:x}.",
         "Then a meeting with {job} changed everything."),
        ("After {cause}, {effect}.", "{person:q} never liked {topic}, but loved {topic}.",
         "The first product was {product}."),
        ("Critics point out that {product} is still too expensive.", "\"{quote},\" {person:q} likes to say.",
         "{person:q} now lives in {place} with {animal}.", ""),
    ),
    (
        ("A new study about {topic:t} was presented in {place} on {day} {month}.",
         "Researchers from {place} have looked at {science:t} for {n} years.",
         "Why do some people prefer {habit}? {person:q} has an answer."),
        ("It followed {q} people over {n} years.", "They compared {a} groups and measured {quantity}.",
         "The team collected data in {place} and {place}."),
        ("The authors, led by {person:q}, found that {habit} helped {p} percent of them.",
         "In {p} percent of the cases, {effect}.", "The effect was smaller than expected."),
        ("{company} paid for the work.", "Other experts are careful: {cause} may explain the result.",
         "The next step is a test with {product}.", "\"{quote},\" said {person:q}."),
    ),
    (
        ("{science_cap} is one of the basic ideas of modern science.", "{topic_cap} has a long history.",
         "{history_cap} left traces in many countries.", "Few things are as common as {topic}."),
        ("It plays a role in {process} and in {machine}.", "It was first described in {oldyear} by {person}.",
         "In {country} it is taught from the age of {n}."),
        ("Many people confuse it with {topic}.", "Its importance grew after {history}.",
         "It depends on {quantity} and {quantity}.", "{sentence}"),
        ("Today it is used by {job} as well as by {job}.", "A museum in {place} is devoted to it.",
         "Nobody knows how it will develop.", ""),
    ),
    (
        ("On {weekday} I woke up at {hour} and heard {animal} in the kitchen.",
         "My {relative:r} gave me {object} when I was {n}.", "We arrived in {place} late in the evening."),
        ("{sentence}", "The {household} {fault}, as always.", "My {relative:r} was {feeling} and said nothing."),
        ("{sentence}", "Then we ate {dish} and talked about {topic}.", "It was a {mood} day."),
        ("\"{quote},\" my {relative:r} said.", "I still think of it when I see {object}.", "{sentence}"),
    ),
)  # fmt: skip

MEETING = (
    "Present: {person:a}, {person:b}, {person:c}. ",
    ("{person:a} reports that {effect}. ", "{person:a} shows the figures: {q} orders in {month}, {p} percent more. ",
     "{person:a} explains that the {household} {fault}. "),
    ("{person:b} suggests to buy {product} for {price} euros. ", "{person:b} warns of {cause}. ",
     "{person:b} asks for {n} more weeks. "),
    ("{person:c} disagrees, because {effect}. ", "{person:c} will write to {company} by {weekday}. ",
     "{person:c} has talked to {job} about it. "),
    ("Decision: {person:a} orders {n} {item} until {day} {month}.", "The next meeting is on {weekday} at {hour}.",
     "It was agreed that {effect}."),
)  # fmt: skip

MANUAL = (
    ("Before first use, remove all packing and {item}. ", "Thank you for choosing {product} by {company}. "),
    ("Press the left button for {n} seconds until the light is green. ", "Turn the dial to position {m}. "),
    ("If the device {fault}, switch it off and wait {p} minutes. ", "If it {fault}, clean the filter with water. "),
    ("Never open the lid while it is running. ", "Keep away from children under {n} years. ", ""),
    ("The guarantee is valid for {few} years.", "For spare parts write to {company}.",
     "Do not throw it into the household waste."),
)  # fmt: skip

SNIPPETS = (
    "def {identifier:f}(n):\n    if n <= 1:\n        return {small_number}\n    return n * {identifier:f}(n - 1)\n\n"
    "print({identifier:f}({m}))",
    "total = 0\nfor i in range({m}, {p}):\n    if i % {m} == 0:\n        total += i\nprint(total)",
    'names = ["{person}", "{person}", "{person}"]\nfor i, name in enumerate(names):\n'
    "    print(i, name.upper())",
    '{table:t} = {{"{food}": {n}, "{food}": {a} }}\nfor key in {table:t}:\n    if {table:t}[key] > {m}:\n'
    "        del {table:t}[key]",
    "class {class_name:c}:\n    def __init__(self, value):\n        self.value = value\n\n    def __add__(self, other):\n"
    "        return {class_name:c}(self.value + other.value)\n\nprint(({class_name:c}({a}) + {class_name:c}({b})).value)",
    "def {identifier:f}(values):\n    values.sort()\n    middle = len(values) // 2\n    return values[middle]\n\n"
    "print({identifier:f}([{a}, {n}, {m}, {b}]))",
    "x = [{n}, {m}, {a}]\ny = x\ny.append({b})\nprint(x, len(x))",
    'def {identifier:f}(text):\n    result = ""\n    for c in text:\n        result = c + result\n    return result\n\n'
    'print({identifier:f}("{word}"))',
    'import json\n\nwith open("{table}.json") as f:\n    data = json.load(f)\nprint(sum(row["price"] for row in data))',
    "numbers = [{a}, {b}, {c}, {n}]\nsquares = [x ** 2 for x in numbers if x % 2]\nprint(max(squares))",
    'i = {m}\nwhile i > 0:\n    print(i)\n    i = i - 2\nelse:\n    print("{word}")',
    "def {identifier:f}(a, b=[]):\n    b.append(a)\n    return b\n\nprint({identifier:f}({n}))\nprint({identifier:f}({m}))",
)
