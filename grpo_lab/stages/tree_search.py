"""Monte Carlo tree search by PUCT: which node comes next, what a visit changes. No model and no text.

A node is a state: a solution up to the end of one of its steps. An edge is a step, so a step's numbers stand in the
node that it leads to. One simulation is

    select    from the root, down to a node without children, each time to the child with the largest
              Q + c · P · √N(parent) / (1 + N)                                                          `puct_scores`
    expand    steps that a policy proposed become the node's children, with prior P = their share       `expand`
    back up   a value of the node is added to every node on the way to it                               `back_up`

N counts visits, and Q is the mean of the values that were backed up (0 before the first). Sources: PUCT and Q, AlphaGo
Zero (Silver et al., Nature 550, 2017, "Search algorithm"); √ of the parent's own visits, AlphaZero's pseudocode
(Silver et al., Science 362, 2018, supplement). There are two differences: values lie in [0, 1], where theirs lie in
[−1, 1], and there is one player.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Step = tuple[int, ...]
"""Tokens of a step."""


@dataclass(eq=False)
class Node:
    """A state of the search, with the numbers of the step that leads to it.

    Attributes:
        step: the step's tokens; empty at the root.
        prior: P, the share of the proposals that were this step.
        ended: whether the solution ends here.
        visits: N, the number of visits.
        total: sum of the values that were backed up through this node.
        value: value of this state, once a judge has given it one.
    """

    step: Step = ()
    prior: float = 1.0
    ended: bool = False
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    visits: int = 0
    total: float = 0.0
    value: float = 0.0

    @property
    def mean_value(self) -> float:
        """Q, the mean of the values that were backed up; 0 before the first."""
        if self.visits == 0:
            return 0.0
        return self.total / self.visits

    def path(self) -> list[Node]:
        """Return the nodes from the root to this one, both included."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def tokens(self) -> list[int]:
        """Return the tokens of the solution so far."""
        return [token for node in self.path() for token in node.step]


def puct_scores(node: Node, exploration: float) -> list[float]:
    """Score each child: Q + c · P · √N(parent) / (1 + N). ``exploration``: c."""
    root = math.sqrt(node.visits)
    return [child.mean_value + exploration * child.prior * root / (1 + child.visits) for child in node.children]


def select(root: Node, exploration: float) -> Node:
    """Return the node without children that a simulation reaches. Of equal scores the first child's counts."""
    node = root
    while node.children:
        scores = puct_scores(node, exploration)
        node = node.children[scores.index(max(scores))]
    return node


def expand(node: Node, proposals: Sequence[tuple[Step, bool]]) -> list[Node]:
    """Make a child of each different step among the proposals, in the order of their first occurrence.

    A child's prior is its share of the proposals: an estimate of its probability under the policy, which sampled them.

    Args:
        node: one without children.
        proposals: tokens of each sampled step, and whether the solution ends with it.

    Raises:
        ValueError: the node is expanded already, has ended, or there are no proposals.
    """
    if node.children or node.ended or not proposals:
        raise ValueError(
            f"a node is expanded once, with at least one proposal, unless its solution has ended; this one has "
            f"{len(node.children)} children and {len(proposals)} proposals, ended: {node.ended}"
        )
    for proposal in dict.fromkeys(proposals):
        step, ended = proposal
        prior = proposals.count(proposal) / len(proposals)
        node.children.append(Node(step, prior, ended, parent=node))
    return node.children


def back_up(node: Node, value: float) -> None:
    """Count a visit of every node from the root to ``node``, and add ``value`` to their totals."""
    for passed in node.path():
        passed.visits += 1
        passed.total += value


def revalue(root: Node, visited: Sequence[tuple[Node, float]]) -> None:
    """Compute every total anew from all nodes that were visited, with the value that each visit has now.

    Needed where a value changes as more is known, as the share of an answer among all answers so far does.
    """
    for node in nodes_below(root):
        node.total = 0.0
    for node, value in visited:
        for passed in node.path():
            passed.total += value


def nodes_below(root: Node) -> Iterator[Node]:
    """Iterate over the root and every node below it."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children
