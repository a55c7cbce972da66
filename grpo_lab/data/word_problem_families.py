"""The stories behind ``word_problems``: what can happen in each family, and the lines of its worked solution.

A story is an opening move, further moves, and a question. A family holds those that may follow each other. A move is
one arithmetic event on a running value ``v``, with an operation ``op``:

* ``+ - * /``: ``v op k``. The opening has its own left operand ``a``: ``a op k``.
* ``+*`` and ``-*``: a separate product first, then ``v + a*k`` or ``v - a*k``: two steps of the solution.

Texts have slots: ``{a}`` and ``{k}`` are the numbers, ``{name}`` is the main person, ``{before}`` and ``{other}`` are
the previous and the new person of this move, ``{last}`` is the last person of the story, ``{item}`` is the thing
counted. A line of the solution has ``{calc}``, such as ``3*4=12``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """An arithmetic event of a story.

    Attributes:
        op: its operation, as the module's docstring lists them.
        text: its sentence in the story.
        side_line: for ``+*`` and ``-*``, the line of the solution with the separate product.
        fixed: the only number ``k`` that fits the sentence ("half", "twice"); None: any.
    """

    op: str
    text: str
    side_line: str = ""
    fixed: int | None = None

    @property
    def steps(self) -> int:
        """Number of calculations that the move takes."""
        return len(self.op)


@dataclass(frozen=True)
class Family:
    """A kind of story.

    Attributes:
        name: the family's name.
        items: the things that may be counted; a story has one of them.
        line: the line of the solution for each move.
        openings: moves with which a story may begin.
        moves: moves that may follow.
        question: the sentence at the end.
    """

    name: str
    items: tuple[str, ...]
    line: str
    openings: tuple[Move, ...]
    moves: tuple[Move, ...]
    question: str


_NAMES = "Ann Ben Carla David Emma Felix Grace Henry Ivy James Kim Liam Maria Noah Olga Peter Rosa Sam Tina Victor"
NAMES = tuple(_NAMES.split())

_ALL = (
    Family(
        name="collection",
        items=("marbles", "stickers", "stamps", "coins", "shells", "cards"),
        line="{name} has {calc} {item}.",
        openings=(
            Move("+", "{name} has {a} {item} and finds {k} more."),
            Move("-", "{name} has {a} {item} and gives {k} of them to {other}."),
            Move("*", "{name} buys {a} packs of {k} {item}."),
            Move("*", "{name} has {a} albums with {k} {item} in each."),
        ),
        moves=(
            Move("+", "{other} gives {name} {k} more."),
            Move("-", "{name} loses {k} of the {item}."),
            Move("*", "Then the collection grows to {k} times its size."),
            Move("/", "{name} keeps half of the {item} and gives away the rest.", fixed=2),
            Move("+*", "{name} also buys {a} packs of {k} {item}.", "The packs hold {calc} {item}."),
        ),
        question="How many {item} does {name} have now?",
    ),
    Family(
        name="bakery",
        items=("cookies", "muffins", "rolls", "pies", "donuts"),
        line="There are {calc} {item}.",
        openings=(
            Move("*", "{name} bakes {a} trays of {k} {item}."),
            Move("*", "{name} fills {a} boxes with {k} {item} each."),
            Move("+", "{name} bakes {a} {item} in the morning and {k} in the evening."),
        ),
        moves=(
            Move("-", "{name} sells {k} of them."),
            Move("+", "{other} brings {k} more {item}."),
            Move("/", "{name} packs them equally into {k} boxes and keeps one box."),
            Move("-*", "{a} guests eat {k} {item} each.", "The guests eat {calc} {item}."),
        ),
        question="How many {item} are left for {name}?",
    ),
    Family(
        name="savings",
        items=("dollars",),
        line="{name} has {calc} dollars.",
        openings=(
            Move("*", "{name} earns {a} dollars an hour and works {k} hours."),
            Move("*", "{name} sells {a} cakes for {k} dollars each."),
            Move("+", "{name} saved {a} dollars and gets {k} dollars from {other}."),
            Move("-", "{name} had {a} dollars and paid {k} dollars for a book."),
        ),
        moves=(
            Move("+", "{name} finds {k} dollars in an old coat."),
            Move("-", "Lunch costs {name} {k} dollars."),
            Move("*", "A lucky bet makes the money {k} times as much."),
            Move("/", "{name} spends half of the money on a gift.", fixed=2),
            Move("-*", "{name} buys {a} tickets for {k} dollars each.", "The tickets cost {calc} dollars."),
            Move("+*", "{name} walks dogs for {a} days and gets {k} dollars a day.", "The dogs bring {calc} dollars."),
        ),
        question="How many dollars does {name} have in the end?",
    ),
    Family(
        name="travel",
        items=("miles",),
        line="The trip is {calc} miles.",
        openings=(
            Move("*", "A bus drives {a} miles an hour for {k} hours."),
            Move("*", "{name} walks {a} miles a day for {k} days."),
            Move("+", "A train goes {a} miles before noon and {k} miles after noon."),
        ),
        moves=(
            Move("+", "Then it goes {k} miles further."),
            Move("*", "It makes this whole way {k} times."),
            Move("-", "A new road makes the trip {k} miles shorter."),
            Move("+*", "Then come {a} more days with {k} miles a day.", "The days add {calc} miles."),
        ),
        question="How many miles is the trip?",
    ),
    Family(
        name="ages",
        items=("years",),
        line="{other} is {calc} years old.",
        openings=(
            Move("+", "{name} is {a} years old. {other} is {k} years older than {name}."),
            Move("-", "{name} is {a} years old. {other} is {k} years younger than {name}."),
            Move("*", "{name} is {a} years old. {other} is {k} times as old as {name}."),
            Move("/", "{name} is {a} years old. {other} is half as old as {name}.", fixed=2),
        ),
        moves=(
            Move("+", "{other} is {k} years older than {before}."),
            Move("-", "{other} is {k} years younger than {before}."),
            Move("*", "{other} is twice as old as {before}.", fixed=2),
            Move("/", "{other} is half as old as {before}.", fixed=2),
        ),
        question="How old is {last}?",
    ),
    Family(
        name="garden",
        items=("tulips", "roses", "beans", "carrots", "trees"),
        line="The garden has {calc} {item}.",
        openings=(
            Move("*", "A garden has {a} rows of {k} {item}."),
            Move("-", "{name} plants {a} {item} and {k} of them dry up."),
        ),
        moves=(
            Move("+", "{name} plants {k} more."),
            Move("-", "A storm breaks {k} of the {item}."),
            Move("*", "Next year there are {k} times as many."),
            Move("+*", "{other} adds {a} rows of {k} {item}.", "The new rows have {calc} {item}."),
        ),
        question="How many {item} are in the garden?",
    ),
    Family(
        name="bus",
        items=("people",),
        line="The bus has {calc} people.",
        openings=(
            Move("+", "A bus leaves with {a} people and {k} get on at the first stop."),
            Move("-", "A bus leaves with {a} people and {k} get off at the first stop."),
            Move("*", "A bus leaves with {a} groups of {k} people."),
        ),
        moves=(
            Move("+", "Then {k} people get on."),
            Move("-", "Then {k} people get off."),
            Move("/", "At the market half of the people get off.", fixed=2),
            Move("+*", "{a} families of {k} people get on.", "The families are {calc} people."),
        ),
        question="How many people are on the bus?",
    ),
    Family(
        name="sharing",
        items=("apples", "plums", "nuts", "candies", "pencils"),
        line="Each child has {calc} {item}.",
        openings=(
            Move("/", "{name} shares {a} {item} equally among {k} children."),
            Move("/", "{name} has {a} {item} and gives {k} children the same number."),
            Move("+", "Each child gets {a} {item} from {name} and {k} from {other}."),
        ),
        moves=(
            Move("+", "Each child then gets {k} more."),
            Move("-", "Each child eats {k} of the {item}."),
            Move("*", "A game gives each child {k} times as many."),
            Move("/", "Each child keeps half of the {item}.", fixed=2),
        ),
        question="How many {item} does each child have now?",
    ),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def all_phrases() -> list[str]:
    """Return every text, slots included, that a problem or its solution can be made of. A vocabulary for these problems
    must cover them."""
    phrases: list[str] = [*NAMES]
    for family in FAMILIES.values():
        phrases += [*family.items, family.question]
        for move in family.openings + family.moves:
            phrases += [move.text, family.line, move.side_line]
    return phrases
