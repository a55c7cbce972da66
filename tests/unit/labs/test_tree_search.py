"""Tree search against a literal recursive one, in float64, on trees whose every probability and value is known."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import pytest

from grpo_lab.stages.tree_search import Node, back_up, expand, puct_scores, revalue, select

DEPTH = 4
State = tuple[int, ...]


class KnownTree:
    """A task that can be enumerated: 2 or 3 actions in each state down to ``DEPTH``, probabilities in tenths, and a
    value of every state."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.policy: dict[State, list[int]] = {}
        self.value: dict[State, float] = {}
        for depth in range(DEPTH + 1):
            for state in product(range(3), repeat=depth):
                self.value[state] = rng.random()
                shares = rng.choice([[6, 4], [9, 1], [5, 3, 2], [1, 1, 8], [4, 4, 2]])
                self.policy[state] = shares if depth < DEPTH else []

    def proposals(self, state: State) -> list[tuple[State, bool]]:
        """Ten proposals, each action as often as its probability has tenths."""
        shares = self.policy[state]
        return [((action,), len(state) + 1 == DEPTH) for action, tenths in enumerate(shares) for _ in range(tenths)]

    def best(self, state: State = ()) -> float:
        """The highest value of an end below ``state``."""
        if not self.policy[state]:
            return self.value[state]
        return max(self.best((*state, action)) for action in range(len(self.policy[state])))


def reachable(tree: KnownTree, state: State) -> bool:
    return all(action < len(tree.policy[state[:depth]]) for depth, action in enumerate(state))


def searched(tree: KnownTree, simulations: int, exploration: float) -> Node:
    """Our search, with the value of each visited state known."""
    root = Node()
    for _ in range(simulations):
        node = select(root, exploration)
        state = tuple(node.tokens())
        if not node.ended:
            expand(node, tree.proposals(state))
        back_up(node, tree.value[state])
    return root


def literal(tree: KnownTree, simulations: int, c: float) -> dict[str, dict[State, float]]:
    """MCTS written from the formula, recursively, with tables by state: N and W."""
    n: dict[State, float] = {}
    w: dict[State, float] = {}
    known: set[State] = set()

    def score(state: State, action: int) -> float:
        child = (*state, action)
        visits = n.get(child, 0)
        q = w[child] / visits if visits else 0.0
        p = tree.policy[state][action] / 10
        return q + c * p * math.sqrt(n.get(state, 0)) / (1 + visits)

    def simulate(state: State) -> float:
        if state in known and tree.policy[state]:
            actions = range(len(tree.policy[state]))
            best = max(actions, key=lambda action: score(state, action))
            value = simulate((*state, best))
        else:
            known.add(state)
            value = tree.value[state]
        n[state] = n.get(state, 0) + 1
        w[state] = w.get(state, 0.0) + value
        return value

    for _ in range(simulations):
        simulate(())
    puct = {(*state, action): score(state, action) for state in known for action in range(len(tree.policy[state]))}
    return {"n": n, "w": w, "puct": puct}


def tables(root: Node, c: float) -> dict[str, dict[State, float]]:
    """The same tables of our tree."""
    found: dict[str, dict[State, float]] = {"n": {}, "w": {}, "puct": {}}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        state = tuple(node.tokens())
        if node.visits:
            found["n"][state] = node.visits
            found["w"][state] = node.total
        for child, score in zip(node.children, puct_scores(node, c), strict=True):
            found["puct"][tuple(child.tokens())] = score
        waiting += node.children
    return found


@pytest.mark.parametrize("exploration", [0.3, 1.25, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_visits_values_and_scores_are_those_of_the_formula(seed: int, exploration: float) -> None:
    tree = KnownTree(seed)
    for simulations in (1, 2, 7, 60, 400):
        ours = tables(searched(tree, simulations, exploration), exploration)
        theirs = literal(tree, simulations, exploration)
        assert ours["n"] == theirs["n"]
        assert ours["w"] == theirs["w"]
        assert ours["puct"] == theirs["puct"]


def test_nine_simulations_on_paper() -> None:
    """Root → a (P 0.6) or b (P 0.4); a → c, b → d or e (P ½ each), which are ends; c of PUCT is 1.

    Simulation 4: a has 0.5/2 + 0.6·√3/3 = 0.60, b has 0 + 0.4·√3 = 0.69. Simulation 9: d has 0.8 + ½·√5/5 = 1.02, e
    has ½·√5 = 1.12.
    """
    values = {"": 0.5, "a": 0.2, "b": 0.9, "ac": 0.3, "bd": 0.8, "be": 0.1}
    children = {"": "aaabb", "a": "c", "b": "de"}
    root = Node()
    visited = []
    for _ in range(9):
        node = select(root, 1.0)
        state = "".join(map(chr, node.tokens()))
        visited.append(state)
        if not node.ended:
            expand(node, [((ord(step),), bool(state)) for step in children[state]])
        back_up(node, values[state])
    assert visited == ["", "a", "ac", "b", "bd", "bd", "bd", "bd", "be"]
    assert [child.visits for child in root.children] == [2, 6]
    assert [child.total for child in root.children] == pytest.approx([0.5, 4.2])


@pytest.mark.parametrize("seed", range(6))
def test_after_many_simulations_the_most_visited_action_is_the_best(seed: int) -> None:
    tree = KnownTree(seed)
    for state, value in tree.value.items():
        if not tree.policy[state]:
            tree.value[state] = 0.8 * value
    ends = [state for state in tree.value if len(state) == DEPTH and reachable(tree, state)]
    tree.value[random.Random(seed).choice(ends)] = 1.0
    for state in tree.value:
        if tree.policy[state]:
            tree.value[state] = tree.best(state)  # the exact value
    root = searched(tree, 3000, 1.25)
    most = max(root.children, key=lambda child: child.visits)
    exact = [tree.best((action,)) for action in range(len(tree.policy[()]))]
    assert exact[most.step[0]] == max(exact)


def test_a_value_that_changes_replaces_the_old_one_on_its_path() -> None:
    tree = KnownTree(0)
    root = searched(tree, 50, 1.25)
    fresh = Node()
    visited: list[tuple[Node, float]] = []
    for _ in range(50):
        node = select(fresh, 1.25)
        state = tuple(node.tokens())
        if not node.ended:
            expand(node, tree.proposals(state))
        back_up(node, 0.25)  # not known yet
        visited.append((node, 0.25))
        visited = [(node, tree.value[tuple(node.tokens())]) for node, _ in visited]
        revalue(fresh, visited)
    ours: Any = tables(fresh, 1.25)
    theirs: Any = tables(root, 1.25)
    assert ours["n"] == theirs["n"]
    assert ours["w"] == theirs["w"]


def test_equal_proposals_are_one_child_with_their_share_as_prior() -> None:
    root = Node()
    children = expand(root, [((5, 1), False), ((7, 1), True), ((5, 1), False), ((8, 1), False)])
    assert [(child.step, child.prior, child.ended) for child in children] == [
        ((5, 1), 0.5, False),
        ((7, 1), 0.25, True),
        ((8, 1), 0.25, False),
    ]
    with pytest.raises(ValueError, match="expanded once"):
        expand(root, [((5, 1), False)])
    with pytest.raises(ValueError, match="ended: True"):
        expand(children[1], [((5, 1), False)])
