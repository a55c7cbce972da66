"""A text world: two rooms, a wall with a locked door between them, a key on this side, a goal on the other.

    You 0,2. Key 1,4. Door 2,0. Goal 4,2.          column,row; 0,0 is in the north-west

The policy is told in which directions the next thing lies: the key, then the door (the field before it), then the goal.
It moves by calling ``north``, ``south``, ``west``, ``east``, ``take`` (the key it stands on) and ``unlock`` (the door
before it, with the key). Each answer is what it sees next:

    key east south    key here    door north    door locked    door open    goal east    goal here    wall goal east

`fewest_moves` is the oracle: no way to the goal is shorter.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from grpo_lab.data.made import different, split_of, take
from grpo_lab.rewards.turn_scores import by_call

WIDTH, HEIGHT, WALL = 5, 5, 2
STEPS = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}
MOVES = (*STEPS, "take", "unlock")
Place = tuple[int, int]


class World(NamedTuple):
    """Where everything is, and how far the player has come."""

    at: Place
    key: Place
    door: Place
    goal: Place
    has_key: bool = False
    is_open: bool = False

    @property
    def reached(self) -> bool:
        return self.at == self.goal

    def after(self, move: str) -> World:
        """Return the world after a move; the same world if nothing comes of it."""
        if move == "take":
            return self._replace(has_key=self.has_key or self.at == self.key)
        if move == "unlock":
            beside = (self.at[0] + 1, self.at[1]) == self.door
            return self._replace(is_open=self.is_open or (beside and self.has_key))
        column, row = (here + step for here, step in zip(self.at, STEPS[move]))
        inside = 0 <= column < WIDTH and 0 <= row < HEIGHT
        free = column != WALL or (self.is_open and (column, row) == self.door)
        if inside and free:
            return self._replace(at=(column, row))
        return self

    def text(self) -> str:
        """Return the world in words, which `of_text` reads."""
        places = zip(("You", "Key", "Door", "Goal"), (self.at, self.key, self.door, self.goal))
        return " ".join(f"{name} {column},{row}." for name, (column, row) in places)

    def sight(self) -> str:
        """Return the next thing, and in which directions it lies."""
        before_door = (self.door[0] - 1, self.door[1])
        if not self.has_key:
            name, there, found = "key", self.key, "here"
        elif self.at[0] < WALL:
            name, there, found = "door", before_door, "open" if self.is_open else "locked"
        else:
            name, there, found = "goal", self.goal, "here"
        columns, rows = there[0] - self.at[0], there[1] - self.at[1]
        directions = (
            ["east"] * (columns > 0) + ["west"] * (columns < 0) + ["south"] * (rows > 0) + ["north"] * (rows < 0)
        )
        return " ".join([name, *(directions or [found])])

    @staticmethod
    def of_text(text: str) -> World:
        """Read the world that ``text`` wrote."""
        numbers = [(int(column), int(row)) for column, row in re.findall(r"(\d),(\d)", text)]
        return World(*numbers)


def fewest_moves(world: World) -> dict[World, int]:
    """Return, for each state that can come of ``world``, how many moves it is from the goal: a breadth-first search
    over all of them, and one back from the goal."""
    earlier: dict[World, list[World]] = {world: []}
    found = [world]
    for here in found:
        for there in map(here.after, MOVES):
            if there not in earlier:
                earlier[there] = []
                found.append(there)
            earlier[there].append(here)
    left = {state: 0 for state in found if state.reached}
    nearest_first = list(left)
    for there in nearest_first:
        for here in earlier[there]:
            if here not in left:
                left[here] = left[there] + 1
                nearest_first.append(here)
    return left


class TextWorld:
    """The environment: TRL calls ``reset`` with the row's columns, the policy calls the moves."""

    deterministic = True

    def reset(self, question: str, **_: Any) -> None:
        self._world = World.of_text(question)
        self._scores: list[float] = []

    def north(self) -> str:
        """Go one field north."""
        return self._move("north")

    def south(self) -> str:
        """Go one field south."""
        return self._move("south")

    def west(self) -> str:
        """Go one field west."""
        return self._move("west")

    def east(self) -> str:
        """Go one field east."""
        return self._move("east")

    def take(self) -> str:
        """Take the key, if you stand on its field."""
        return self._move("take")

    def unlock(self) -> str:
        """Unlock the door, if you have the key and the door is on the next field to the east."""
        return self._move("unlock")

    def get_reward(self) -> float:
        return float(self._world.reached)

    def turn_rewards(self, turns: Sequence[Any]) -> list[float | None]:
        """Return each turn's score: 1 for the key, the door and the goal, -0.1 for a move of which nothing came."""
        return by_call(turns, self._scores)

    def _move(self, move: str) -> str:
        before = self._world
        after = before.after(move)
        self._world = after
        steps = (after.has_key, after.is_open, after.reached)
        earlier = (before.has_key, before.is_open, before.reached)
        self._scores.append(-0.1 if after == before else float(sum(steps) - sum(earlier)))
        return seen(before, after)


def seen(before: World, after: World) -> str:
    """Return what a move is answered with; ``wall`` if nothing came of it."""
    if after == before:
        return f"wall {after.sight()}"
    return after.sight()


def worlds(
    n: int,
    seed: int = 0,
    split: str = "train",
    moves: tuple[int, int] = (5, 9),
    noise: float = 0.0,
    longest: int = 12,
    walks: int = 1,
) -> list[dict[str, Any]]:
    """Return ``n`` rows of worlds whose shortest ways have between ``moves[0]`` and ``moves[1]`` moves.

    Args:
        noise: chance that a move of the worked solution is drawn at random, in place of a best one.
        longest: moves after which a worked solution ends, wherever it is.
        walks: worked solutions of each world; every one is a row.
    """
    rng = random.Random(f"text world/{seed}/{split}")

    def draw() -> tuple[str, World] | None:
        rows = [rng.randrange(HEIGHT) for _ in range(4)]
        columns = [rng.randrange(WALL), rng.randrange(WALL), WALL, rng.randrange(WALL + 1, WIDTH)]
        world = World(*zip(columns, rows))
        if world.at == world.key:
            return None
        return world.text(), world

    fitting = (
        world for world in different(draw, split, split_of) if moves[0] <= fewest_moves(world)[world] <= moves[1]
    )
    found = take(fitting, -(-n // walks), "worlds", "Raise walks, or widen moves", split=split, moves=moves)
    rows = [{**row_of(world), "worked_solution": list(walk(world, rng, noise, longest))} for world in found * walks]
    return rows[:n]


def row_of(world: World) -> dict[str, Any]:
    """Return the columns of a world."""
    text = world.text()
    prompt = [{"role": "user", "content": world.sight()}]
    return {"prompt": prompt, "question": text, "fewest_moves": fewest_moves(world)[world]}


def walk(world: World, rng: random.Random, noise: float, longest: int) -> Iterator[dict[str, Any]]:
    """Yield the messages of a walk by best moves, of which some are drawn at random instead."""
    left = fewest_moves(world)
    for _ in range(longest):
        if world.reached:
            break
        move = min(MOVES, key=lambda one: left[world.after(one)])
        if rng.random() < noise:
            move = rng.choice(MOVES)
        there = world.after(move)
        call = {"type": "function", "function": {"name": move, "arguments": {}}}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
        yield {"role": "tool", "name": move, "content": seen(world, there)}
        world = there
    yield {"role": "assistant", "content": "done"}
