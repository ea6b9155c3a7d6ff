"""The demo's questions, written for this project: four answer types, each from plain to hopeless for a small model.

Facts are timeless; arithmetic is checked by the tests. ``hard`` marks what a 135M model should not be trusted with.
Every third question of a type and difficulty is kept for calibration: a threshold may be picked on those only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..orchestrator.evaluation.grading import LETTERS, is_right

Kind = Literal["number", "yes/no", "word", "option"]
KINDS: tuple[Kind, ...] = ("number", "yes/no", "word", "option")
INSTRUCTIONS: dict[Kind, str] = {
    "number": "Answer each question with one number.",
    "yes/no": "Answer each question with yes or no.",
    "word": "Answer each question with one word or name.",
    "option": "Answer each question with the letter of the right choice.",
}


@dataclass(frozen=True)
class Question:
    """A question, its accepted answers, and for ``option`` its choices (the answer is then their letter)."""

    kind: Kind
    text: str
    answers: tuple[str, ...]
    hard: bool = False
    options: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        """What the model is asked: the text, and the choices with their letters."""
        choices = " ".join(f"({letter}) {option}" for letter, option in zip(LETTERS, self.options, strict=False))
        return f"{self.text} {choices}".rstrip()


    def is_right(self, reply: str) -> bool:
        """Whether the reply answers the question; an empty or ambiguous reply is wrong."""
        return is_right("text" if self.kind == "word" else self.kind, reply, self.answers, self.options)


def prompt_for(question: Question) -> str:
    """The question after solved examples of its type, to be continued on the same line."""
    shots = "".join(f"Question: {e.prompt}\nAnswer: {e.answers[0]}\n\n" for e in EXAMPLES[question.kind])
    return f"{INSTRUCTIONS[question.kind]}\n\n{shots}Question: {question.prompt}\nAnswer:"


def select(limit: int | None = None) -> list[Question]:
    """The first ``limit`` questions (default: all), taken in turn from every type and difficulty."""
    groups = _groups()
    longest = max(map(len, groups))
    turns = [group[i] for i in range(longest) for group in groups if i < len(group)]
    return turns[:limit]


def for_calibration() -> frozenset[Question]:
    """Every third question of a type and difficulty."""
    return frozenset(question for group in _groups() for question in group[::3])


def _groups() -> list[list[Question]]:
    return [[q for q in QUESTIONS if q.kind == kind and q.hard == hard] for hard in (False, True) for kind in KINDS]


def _rows(kind: Kind, hard: bool, table: str) -> list[Question]:
    questions = []
    for line in table.strip().splitlines():
        text, answers, *options = (part.strip() for part in line.split("|"))
        choices = tuple(option.strip() for option in options[0].split(";")) if options else ()
        questions.append(Question(kind, text, tuple(a.strip() for a in answers.split(";")), hard, choices))
    return questions


#: Solved examples shown to the model before every question of their type; none of them is a question of the demo.
EXAMPLES: dict[Kind, list[Question]] = {
    "number": _rows(
        "number",
        False,
        """
        How many wheels does a tricycle have? | 3
        What is 10 + 4? | 14
        How many seconds are there in a minute? | 60
        """,
    ),
    "yes/no": _rows(
        "yes/no",
        False,
        """
        Is a rose a flower? | Yes
        Is Italy in Africa? | No
        Can a stone swim? | No
        Do birds have wings? | Yes
        """,
    ),
    "word": _rows(
        "word",
        False,
        """
        What is the capital of Portugal? | Lisbon
        What colour is grass? | Green
        Which animal meows? | Cat
        """,
    ),
    "option": _rows(
        "option",
        False,
        """
        Which of these is a tool? | C | milk; sock; hammer; cloud
        Which of these is a drink? | A | juice; brick; shirt; moon
        Which of these is a vehicle? | D | spoon; grass; window; bicycle
        Which of these is a flower? | B | iron; tulip; bread; shoe
        """,
    ),
}

QUESTIONS: tuple[Question, ...] = tuple(
    _rows(
        "number",
        False,
        """
        How many days are there in a week? | 7
        How many months are there in a year? | 12
        How many hours are there in a day? | 24
        How many minutes are there in an hour? | 60
        How many legs does a spider have? | 8
        How many legs does a dog have? | 4
        How many sides does a triangle have? | 3
        How many letters are in the English alphabet? | 26
        How many years are there in a century? | 100
        How many days are there in a leap year? | 366
        How many planets are there in the solar system? | 8
        How many centimetres are there in a metre? | 100
        What is 2 + 3? | 5
        What is 6 + 2? | 8
        What is 5 + 5? | 10
        What is 9 - 4? | 5
        What is 3 * 3? | 9
        At how many degrees Celsius does water boil at sea level? | 100
        """,
    )
    + _rows(
        "number",
        True,
        """
        What is 487 * 36? | 17532
        What is 7569 / 87? | 87
        What is 918 - 459 + 37? | 496
        What is 23 * 17? | 391
        What is 144 + 377? | 521
        What is 2 to the power of 15? | 32768
        What is the atomic number of tungsten? | 74
        In which year did Magellan's ship Victoria return to Spain? | 1522
        How many edges does a dodecahedron have? | 30
        How many prime numbers are there below 100? | 25
        What is the sum of the whole numbers from 1 to 60? | 1830
        How many bones does an adult human have? | 206
        How many keys does a standard piano have? | 88
        How many minutes are there in a week? | 10080
        """,
    )
    + _rows(
        "yes/no",
        False,
        """
        Is Paris in France? | Yes
        Is fire cold? | No
        Is a dog an animal? | Yes
        Is the sun a planet? | No
        Can fish breathe under water? | Yes
        Is ice made of water? | Yes
        Is gold a metal? | Yes
        Is a banana a fruit? | Yes
        Can a table talk? | No
        Is Tokyo in Germany? | No
        Do cows give milk? | Yes
        Is a whale a plant? | No
        Is the Earth round? | Yes
        Do cars eat grass? | No
        Is snow black? | No
        Does a bicycle have two wheels? | Yes
        """,
    )
    + _rows(
        "yes/no",
        True,
        """
        Is 91 a prime number? | No
        Is 97 a prime number? | Yes
        Is a tomato botanically a fruit? | Yes
        Is Bratislava the capital of Slovenia? | No
        Is 17 * 19 larger than 320? | Yes
        Is the Volga longer than the Nile? | No
        Did Mozart outlive Beethoven? | No
        Is osmium denser than gold? | Yes
        Is a spider an insect? | No
        Is Canberra the capital of Australia? | Yes
        Is 1900 a leap year? | No
        Is the word 'level' a palindrome? | Yes
        Is Venus hotter than Mercury? | Yes
        Is 2 to the power of 10 less than 1000? | No
        Does Chile border Brazil? | No
        Is Reykjavik north of Helsinki? | Yes
        """,
    )
    + _rows(
        "word",
        False,
        """
        What is the capital of France? | Paris
        What is the capital of Italy? | Rome
        What is the capital of Japan? | Tokyo
        What is the capital of Germany? | Berlin
        What is the capital of Spain? | Madrid
        What is the capital of Russia? | Moscow
        What is the capital of Egypt? | Cairo
        What colour is the sky on a clear day? | Blue
        What colour is snow? | White
        What colour is a ripe banana? | Yellow
        Which animal barks? | Dog; a dog
        What is the opposite of hot? | Cold
        What is the opposite of big? | Small; little
        What is frozen water called? | Ice
        Which planet do we live on? | Earth; planet earth
        Who wrote Romeo and Juliet? | William Shakespeare; Shakespeare
        On which continent is China? | Asia
        What do bees make? | Honey
        """,
    )
    + _rows(
        "word",
        True,
        """
        What is the capital of Burkina Faso? | Ouagadougou
        What is the capital of Kyrgyzstan? | Bishkek
        What is the capital of Kazakhstan? | Astana; Nur-Sultan
        Which chemical element has the symbol W? | Tungsten; wolfram
        Who painted Las Meninas? | Diego Velázquez; Velázquez; Diego Velasquez; Velasquez
        Who composed the opera Fidelio? | Ludwig van Beethoven; Beethoven
        Spell the word 'planet' backwards. | tenalp
        What is the currency of Mongolia? | Tögrög; tugrik; togrog; Mongolian tögrög; Mongolian tugrik
        Which river flows through Vilnius? | Neris; Vilnia; the Neris
        Who proved the incompleteness theorems? | Kurt Gödel; Gödel; Kurt Goedel; Goedel
        What is the Latin word for bread? | Panis
        Which element is named after the Sun's Greek name? | Helium
        What is a group of lions called? | Pride; a pride
        Which day comes three days after Friday? | Monday
        """,
    )
    + _rows(
        "option",
        False,
        """
        Which of these is a fruit? | B | chair; apple; stone; car
        Which of these is an animal? | A | horse; table; river; book
        Which of these is a colour? | C | seven; dog; red; house
        Which of these is a number? | D | tree; water; happy; five
        Which of these is a city? | A | London; banana; spoon; cat
        Which of these is a country? | C | pencil; soup; France; shoe
        Which of these can fly? | D | fish; dog; stone; eagle
        Which of these is a metal? | B | wood; iron; paper; milk
        Which of these is a planet? | A | Mars; Madrid; carrot; piano
        Which of these is a musical instrument? | B | potato; guitar; cloud; sand
        Which of these is a vegetable? | D | chair; glass; mountain; carrot
        Which of these is a day of the week? | C | April; winter; Monday; seven
        Which of these is a month? | B | Sunday; July; noon; spring
        Which of these is a piece of furniture? | A | sofa; rain; bread; tiger
        Which of these lives in the sea? | C | camel; hen; shark; goat
        Which of these is a body part? | D | door; leaf; coin; hand
        """,
    )
    + _rows(
        "option",
        True,
        """
        Which of these numbers is prime? | C | 51; 57; 59; 63
        Which of these is the capital of Slovakia? | B | Ljubljana; Bratislava; Zagreb; Budapest
        Which of these is a noble gas? | D | chlorine; nitrogen; cobalt; krypton
        What is 14 * 16? | A | 224; 214; 234; 226
        Which of these was composed by Verdi? | C | Tosca; Carmen; Rigoletto; Fidelio
        Which of these planets has the shortest year? | B | Venus; Mercury; Mars; Earth
        Which of these is the largest number? | D | 2/3; 3/5; 5/8; 7/10
        Which of these rivers is in Asia? | A | Mekong; Loire; Orinoco; Zambezi
        Which of these words is an adverb? | B | friendly; quickly; lovely; silly
        Which of these is not a mammal? | C | bat; whale; penguin; otter
        Which of these comes first in the dictionary? | D | mango; lemon; melon; grape
        Which of these people was a mathematician? | B | Monet; Euler; Verdi; Cortez
        Which of these is a cube of a whole number? | A | 343; 300; 256; 400
        Which of these languages is written from right to left? | C | Greek; Hindi; Hebrew; Thai
        Which of these is the lightest? | D | oxygen; carbon; nitrogen; helium
        Which of these is an odd number? | B | 1248; 3571; 7790; 6424
        """,
    )
)
