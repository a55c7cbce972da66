"""The stories behind ``word_problems``: what can happen in each family, and how its worked solution says so.

A family is an opening move, further moves, and a question. A move is one arithmetic event on a running value ``v``:

* ``+ - * /``: ``v op k``. The opening has its own left operand ``a``: ``a op k``.
* ``+*`` and ``-*``: a product on the side first, then ``v + a*k`` or ``v - a*k``: two steps of the solution.

Slots of a text: ``{a}`` and ``{k}`` the numbers, ``{name}`` the main person, ``{before}`` and ``{other}`` the previous
and the new person of this move, ``{item}`` the thing counted. A solution line has ``{calc}``, such as ``3*4=12``.
A move with ``fixed`` always uses that ``k`` ("half", "twice").
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """One arithmetic event: its operation, how it is told, how a solution line (and a line for the side product) says
    it."""

    op: str
    text: str
    line: str
    side_line: str = ""
    fixed: int | None = None

    @property
    def steps(self) -> int:
        """Calculations that it takes."""
        return len(self.op)


@dataclass(frozen=True)
class Family:
    """A kind of story: the things counted, how it may begin and go on, what is asked at its end."""

    name: str
    items: tuple[str, ...]
    openings: tuple[Move, ...]
    moves: tuple[Move, ...]
    question: str


_NAMES = "Ann Ben Carla David Emma Felix Grace Henry Ivy James Kim Liam Maria Noah Olga Peter Rosa Sam Tina Victor"
NAMES = tuple(_NAMES.split())

_HAS = "{name} has {calc} {item}."

COLLECTION = Family(
    name="collection",
    items=("marbles", "stickers", "stamps", "coins", "shells", "cards"),
    openings=(
        Move("+", "{name} has {a} {item} and finds {k} more.", _HAS),
        Move("-", "{name} has {a} {item} and gives {k} of them to {other}.", _HAS),
        Move("*", "{name} buys {a} packs of {k} {item}.", _HAS),
        Move("*", "{name} has {a} albums with {k} {item} in each.", _HAS),
    ),
    moves=(
        Move("+", "{other} gives {name} {k} more.", _HAS),
        Move("-", "{name} loses {k} of the {item}.", _HAS),
        Move("*", "Then the collection grows to {k} times its size.", _HAS),
        Move("/", "{name} keeps half of the {item} and gives away the rest.", _HAS, fixed=2),
        Move("+*", "{name} also buys {a} packs of {k} {item}.", _HAS, "The packs hold {calc} {item}."),
    ),
    question="How many {item} does {name} have now?",
)

_LEFT = "There are {calc} {item}."

BAKERY = Family(
    name="bakery",
    items=("cookies", "muffins", "rolls", "pies", "donuts"),
    openings=(
        Move("*", "{name} bakes {a} trays of {k} {item}.", _LEFT),
        Move("*", "{name} fills {a} boxes with {k} {item} each.", _LEFT),
        Move("+", "{name} bakes {a} {item} in the morning and {k} in the evening.", _LEFT),
    ),
    moves=(
        Move("-", "{name} sells {k} of them.", _LEFT),
        Move("+", "{other} brings {k} more {item}.", _LEFT),
        Move("/", "{name} packs them equally into {k} boxes and keeps one box.", _LEFT),
        Move("-*", "{a} guests eat {k} {item} each.", _LEFT, "The guests eat {calc} {item}."),
    ),
    question="How many {item} are left for {name}?",
)

_SAVED = "{name} has {calc} dollars."

SAVINGS = Family(
    name="savings",
    items=("dollars",),
    openings=(
        Move("*", "{name} earns {a} dollars an hour and works {k} hours.", _SAVED),
        Move("*", "{name} sells {a} cakes for {k} dollars each.", _SAVED),
        Move("+", "{name} saved {a} dollars and gets {k} dollars from {other}.", _SAVED),
        Move("-", "{name} had {a} dollars and paid {k} dollars for a book.", _SAVED),
    ),
    moves=(
        Move("+", "{name} finds {k} dollars in an old coat.", _SAVED),
        Move("-", "Lunch costs {name} {k} dollars.", _SAVED),
        Move("*", "A lucky bet makes the money {k} times as much.", _SAVED),
        Move("/", "{name} spends half of the money on a gift.", _SAVED, fixed=2),
        Move("-*", "{name} buys {a} tickets for {k} dollars each.", _SAVED, "The tickets cost {calc} dollars."),
        Move(
            "+*", "{name} walks dogs for {a} days and gets {k} dollars a day.", _SAVED, "The dogs bring {calc} dollars."
        ),
    ),
    question="How many dollars does {name} have in the end?",
)

_TRIP = "The trip is {calc} miles."

TRAVEL = Family(
    name="travel",
    items=("miles",),
    openings=(
        Move("*", "A bus drives {a} miles an hour for {k} hours.", _TRIP),
        Move("*", "{name} walks {a} miles a day for {k} days.", _TRIP),
        Move("+", "A train goes {a} miles before noon and {k} miles after noon.", _TRIP),
    ),
    moves=(
        Move("+", "Then it goes {k} miles further.", _TRIP),
        Move("*", "It makes this whole way {k} times.", _TRIP),
        Move("-", "A new road makes the trip {k} miles shorter.", _TRIP),
        Move("+*", "Then come {a} more days with {k} miles a day.", _TRIP, "The days add {calc} miles."),
    ),
    question="How many miles is the trip?",
)

_AGE = "{other} is {calc} years old."

AGES = Family(
    name="ages",
    items=("years",),
    openings=(
        Move("+", "{name} is {a} years old. {other} is {k} years older than {name}.", _AGE),
        Move("-", "{name} is {a} years old. {other} is {k} years younger than {name}.", _AGE),
        Move("*", "{name} is {a} years old. {other} is {k} times as old as {name}.", _AGE),
        Move("/", "{name} is {a} years old. {other} is half as old as {name}.", _AGE, fixed=2),
    ),
    moves=(
        Move("+", "{other} is {k} years older than {before}.", _AGE),
        Move("-", "{other} is {k} years younger than {before}.", _AGE),
        Move("*", "{other} is twice as old as {before}.", _AGE, fixed=2),
        Move("/", "{other} is half as old as {before}.", _AGE, fixed=2),
    ),
    question="How old is {last}?",
)

_GROWS = "The garden has {calc} {item}."

GARDEN = Family(
    name="garden",
    items=("tulips", "roses", "beans", "carrots", "trees"),
    openings=(
        Move("*", "A garden has {a} rows of {k} {item}.", _GROWS),
        Move("-", "{name} plants {a} {item} and {k} of them dry up.", _GROWS),
    ),
    moves=(
        Move("+", "{name} plants {k} more.", _GROWS),
        Move("-", "A storm breaks {k} of the {item}.", _GROWS),
        Move("*", "Next year there are {k} times as many.", _GROWS),
        Move("+*", "{other} adds {a} rows of {k} {item}.", _GROWS, "The new rows have {calc} {item}."),
    ),
    question="How many {item} are in the garden?",
)

_RIDERS = "The bus has {calc} people."

BUS = Family(
    name="bus",
    items=("people",),
    openings=(
        Move("+", "A bus leaves with {a} people and {k} get on at the first stop.", _RIDERS),
        Move("-", "A bus leaves with {a} people and {k} get off at the first stop.", _RIDERS),
        Move("*", "A bus leaves with {a} groups of {k} people.", _RIDERS),
    ),
    moves=(
        Move("+", "Then {k} people get on.", _RIDERS),
        Move("-", "Then {k} people get off.", _RIDERS),
        Move("/", "At the market half of the people get off.", _RIDERS, fixed=2),
        Move("+*", "{a} families of {k} people get on.", _RIDERS, "The families are {calc} people."),
    ),
    question="How many people are on the bus?",
)

_SHARE = "Each child has {calc} {item}."

SHARING = Family(
    name="sharing",
    items=("apples", "plums", "nuts", "candies", "pencils"),
    openings=(
        Move("/", "{name} shares {a} {item} equally among {k} children.", _SHARE),
        Move("/", "{name} has {a} {item} and gives {k} children the same number.", _SHARE),
        Move("+", "Each child gets {a} {item} from {name} and {k} from {other}.", _SHARE),
    ),
    moves=(
        Move("+", "Each child then gets {k} more.", _SHARE),
        Move("-", "Each child eats {k} of the {item}.", _SHARE),
        Move("*", "A game gives each child {k} times as many.", _SHARE),
        Move("/", "Each child keeps half of the {item}.", _SHARE, fixed=2),
    ),
    question="How many {item} does each child have now?",
)

FAMILIES: dict[str, Family] = {
    family.name: family for family in (COLLECTION, BAKERY, SAVINGS, TRAVEL, AGES, GARDEN, BUS, SHARING)
}


def all_phrases() -> list[str]:
    """Every text that a problem can be made of, slots and all: what a vocabulary for these problems must cover."""
    phrases: list[str] = [*NAMES]
    for family in FAMILIES.values():
        phrases += [*family.items, family.question]
        phrases += [text for move in family.openings + family.moves for text in (move.text, move.line, move.side_line)]
    return phrases
