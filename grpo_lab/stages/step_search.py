"""Search over the steps of a solution: a policy proposes next steps, and something says what a state is worth.

A step is a line with its end of line; a state is a solution up to the end of a step. Every method returns, for each
problem, the whole solutions that it found (`FoundSolution`), each with the number of tokens generated for the problem
until then. So what the method would answer with a smaller budget can be read off (`within`):

    method                     what generates                                        its answer
    `sampled`                  whole solutions, independently                        `voted`, or `best` by a judge
    `beam_search`              the best b states × w next steps, step by step        `best`
    `tree_search`, `Judging`   w next steps of the node that PUCT chose              `best`
    `tree_search`, `Voting`    the same, and a solution's rest from that node        `voted`

**No method sees whether an answer is right.** A node's value is a judge's (a token classifier: a value model or a
process reward model), or, in `Voting`, the share of the problem's solutions so far that end in the same answer.

All problems advance side by side: a round of all trees, or beams, is one call of the generator. Widths are R1's
"maximum extension limit for each node" (arXiv 2501.12948, §4.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from grpo_lab.engines.generators import Completion
from grpo_lab.evaluation.votes import ReadAnswer, vote_key
from grpo_lab.rewards.steps import by_line
from grpo_lab.rewards.token_classification import TokenClassificationSteps
from grpo_lab.stages.sample import LoadedGenerator
from grpo_lab.stages.tree_search import Node, Step, back_up, expand, revalue, select


@dataclass(frozen=True)
class Question:
    """A problem as the judge reads it (``prompt``, a text or messages) and as the policy does (``ids``)."""

    prompt: Any
    ids: list[int]


@dataclass(frozen=True)
class FoundSolution:
    """A whole solution, the number of tokens generated for its problem until it was found, and the value that a judge
    gives it (0 without a judge)."""

    text: str
    tokens: int
    value: float = 0.0


def within(found: Sequence[FoundSolution], tokens: int) -> list[FoundSolution]:
    """Return the solutions found with at most ``tokens`` generated tokens; the first one if even that took more."""
    return [one for one in found if one.tokens <= tokens] or [*found[:1]]


def best(found: Sequence[FoundSolution]) -> str:
    """Return the solution with the highest value, the first of equals."""
    return max(found, key=lambda one: one.value).text


def voted(found: Sequence[FoundSolution], read: ReadAnswer) -> str:
    """Return the first solution with the most frequent answer; of equally frequent answers the earlier one counts.
    Solutions in which ``read`` finds no answer do not vote; if there is no vote, the first solution is returned."""
    votes = Counter(key for one in found if (key := answer_key(one.text, read)) is not None)
    if not votes:
        return found[0].text
    [(winner, _)] = votes.most_common(1)
    return next(one.text for one in found if answer_key(one.text, read) == winner)


def answer_key(text: str, read: ReadAnswer) -> str | None:
    """Return the key of a solution's answer, equal for equal answers as in maj@k; None if it has no answer."""
    answer = read(text)
    if answer is None:
        return None
    return vote_key(answer)


class StateJudge(Protocol):
    """Returns the value in [0, 1] of each state: a question and the solution's text so far. Without a step it is 0."""

    def __call__(self, questions: Sequence[Question], texts: Sequence[str]) -> list[float]: ...


@dataclass(frozen=True)
class StepJudge:
    """A ``StateJudge`` that values a state by a token classifier, which scores each step of it.

    Args:
        scores: the classifier. It gives p(good) at the end of each step.
        of: which score is the state's value. ``last``: the last step's, as for a value model; ``least``: the lowest
            one, by which Math-Shepherd (arXiv 2312.08935, §3.4) ranks solutions.
    """

    scores: TokenClassificationSteps
    of: Literal["last", "least"] = "last"

    def __call__(self, questions: Sequence[Question], texts: Sequence[str]) -> list[float]:
        steps = [steps_in(text) for text in texts]
        scored = self.scores.score_all([one.prompt for one in questions], steps, {})
        return [self._value([score for score in scores if score is not None]) for scores in scored]

    def _value(self, scores: Sequence[float]) -> float:
        if not scores:
            return 0.0
        if self.of == "last":
            return scores[-1]
        return min(scores)


def steps_in(text: str) -> list[str]:
    """Return the lines of a text that are not blank."""
    ends = by_line(text)
    return [text[start:end].strip() for start, end in zip([0, *ends], ends, strict=False)]


class StepWriter:
    """The policy: it writes next steps, rests of solutions, and whole solutions.

    Args:
        loaded: the model.
        most_tokens: most tokens of a solution. A solution without room for another step of the most tokens ends.
        most_of_a_step: most tokens of a step. A step that reaches them without an end of line ends its solution.
        temperature: sampling temperature.
        seed: the same seed and the same calls give the same tokens.
    """

    def __init__(
        self, loaded: LoadedGenerator, most_tokens: int, most_of_a_step: int, temperature: float = 1.0, seed: int = 0
    ) -> None:
        self.loaded = loaded
        self.most_tokens = most_tokens
        self.most_of_a_step = most_of_a_step
        self.temperature = temperature
        self.seed = seed
        self.calls = 0
        generate: Any = loaded.generate
        self._by_step = replace(generate, more_stops=line_ends(loaded.tokenizer))

    def solutions(self, questions: Sequence[Question], n: int, temperature: float) -> list[list[Completion]]:
        """Write n whole solutions of each problem at a temperature, 0 for greedy ones."""
        how: Any = {"n": n, "temperature": temperature, "max_new_tokens": self.most_tokens, "seed": self._next_seed()}
        return self.loaded.generate([one.ids for one in questions], **how)

    def steps(
        self, questions: Sequence[Question], states: Sequence[list[int]], n: int
    ) -> list[list[tuple[Step, bool]]]:
        """Sample n next steps of each state (the solution's tokens so far), each with whether the solution ends."""
        asked = [[*one.ids, *state] for one, state in zip(questions, states, strict=True)]
        how: Any = {"n": n, "temperature": self.temperature, "max_new_tokens": self.most_of_a_step}
        groups = self._by_step(asked, **how, seed=self._next_seed())
        pairs = zip(states, groups, strict=True)
        return [[(tuple(one.ids), self._ends(len(state), one)) for one in group] for state, group in pairs]

    def rests(self, questions: Sequence[Question], states: Sequence[list[int]]) -> list[list[int]]:
        """Sample the rest of one solution from each state, step by step, and return its tokens."""
        rests: list[list[int]] = [[] for _ in states]
        open_ones = list(range(len(states)))
        while open_ones:
            begun = [[*states[place], *rests[place]] for place in open_ones]
            written = self.steps([questions[place] for place in open_ones], begun, 1)
            goes_on = []
            for place, [(step, ended)] in zip(open_ones, written, strict=True):
                rests[place] += step
                if not ended:
                    goes_on.append(place)
            open_ones = goes_on
        return rests

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.loaded.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _ends(self, before: int, step: Completion) -> bool:
        no_room = before + len(step.ids) + self.most_of_a_step > self.most_tokens
        return no_room or not step.ended or step.ids[-1] in self.loaded.stops

    def _next_seed(self) -> int:
        self.calls += 1
        return self.seed * 100_003 + self.calls


def line_ends(tokenizer: Any) -> list[int]:
    """Return the id of every token whose text has an end of line in it: a step ends with the first of them."""
    return [token for token in range(len(tokenizer)) if "\n" in tokenizer.decode([token])]


def first_solutions(
    writer: StepWriter, questions: Sequence[Question], judge: StateJudge | None
) -> list[list[FoundSolution]]:
    """Return a list for each problem with its greedy solution, with which every method begins."""
    written = [one.ids for [one] in writer.solutions(questions, 1, 0.0)]
    texts = [writer.text(tokens) for tokens in written]
    values = judged(judge, questions, texts)
    return [[FoundSolution(text, len(ids), value)] for ids, text, value in zip(written, texts, values, strict=True)]


def judged(judge: StateJudge | None, questions: Sequence[Question], texts: Sequence[str]) -> list[float]:
    """Return the judge's values; zeros without a judge."""
    if judge is None:
        return [0.0] * len(texts)
    return judge(questions, texts)


def sampled(
    writer: StepWriter, questions: Sequence[Question], n: int, judge: StateJudge | None = None
) -> list[list[FoundSolution]]:
    """Return the greedy solution of each problem and n sampled ones, valued by ``judge`` if there is one."""
    found = first_solutions(writer, questions, judge)
    groups = writer.solutions(questions, n, writer.temperature)
    for question, group, own in zip(questions, groups, found, strict=True):
        texts = [writer.text(one.ids) for one in group]
        for text, one, value in zip(texts, group, judged(judge, [question] * n, texts), strict=True):
            own.append(FoundSolution(text, own[-1].tokens + len(one.ids), value))
    return found


@dataclass
class Beam:
    """The beam search of one problem: the solutions found, the number of tokens generated, and the states that are
    still open, each a value and the solution's tokens so far."""

    found: list[FoundSolution]
    spent: int
    states: list[tuple[float, Step]] = field(default_factory=lambda: [(0.0, ())])


def beam_search(
    writer: StepWriter, questions: Sequence[Question], judge: StateJudge, beam: int, width: int
) -> list[list[FoundSolution]]:
    """Sample ``width`` next steps of each open state, keep the ``beam`` states with the best values of each problem,
    and repeat until no state is open. Returns the solutions of each problem."""
    beams = [Beam(found, found[0].tokens) for found in first_solutions(writer, questions, judge)]
    while any(own.states for own in beams):
        asked = [(place, tokens) for place, own in enumerate(beams) for _, tokens in own.states]
        groups = writer.steps([questions[place] for place, _ in asked], [[*tokens] for _, tokens in asked], width)
        new: dict[tuple[int, Step], bool] = {}  # state → whether it has ended; equal states are one
        for (place, tokens), group in zip(asked, groups, strict=True):
            for step, ended in group:
                beams[place].spent += len(step)
                new[place, (*tokens, *step)] = ended
        texts = [writer.text(tokens) for _, tokens in new]
        values = judge([questions[place] for place, _ in new], texts)
        for own in beams:
            own.states = []
        for ((place, tokens), ended), text, value in zip(new.items(), texts, values, strict=True):
            own = beams[place]
            if ended:
                own.found.append(FoundSolution(text, own.spent, value))
            else:
                own.states.append((value, tokens))
        for own in beams:
            own.states = sorted(own.states, reverse=True)[:beam]
    return [own.found for own in beams]


@dataclass
class SearchTree:
    """The tree search of one problem.

    Attributes:
        found: the whole solutions, in the order in which they were found.
        spent: number of tokens generated so far.
        rounds: number of simulations so far.
        votes: key of an answer → number of solutions in ``found`` with it (only `Voting` counts them).
        visited: the node of each visit, with the key of the answer that the visit led to (only `Voting`).
    """

    question: Question
    found: list[FoundSolution]
    root: Node = field(default_factory=Node)
    spent: int = 0
    rounds: int = 0
    votes: Counter[str | None] = field(default_factory=Counter)
    visited: list[tuple[Node, str | None]] = field(default_factory=list)


class Judging:
    """Node values by a judge. A node's value is backed up when the node is expanded, an end's at each visit."""

    def __init__(self, writer: StepWriter, judge: StateJudge) -> None:
        self.writer = writer
        self.judge: StateJudge | None = judge

    def expanded(self, trees: Sequence[SearchTree], nodes: Sequence[Node]) -> None:
        """Judge the node just expanded in each tree and its children that are ends; back up the node's value."""
        asked = []
        for tree, node in zip(trees, nodes, strict=True):
            asked += [(tree, one) for one in (node, *node.children) if one is node or one.ended]
        texts = [self.writer.text(one.tokens()) for _, one in asked]
        values = judged(self.judge, [tree.question for tree, _ in asked], texts)
        for (tree, node), text, value in zip(asked, texts, values, strict=True):
            node.value = value
            if node.ended:
                tree.found.append(FoundSolution(text, tree.spent, value))
        for node in nodes:
            back_up(node, node.value)

    def revisited(self, tree: SearchTree, end: Node) -> None:
        back_up(end, end.value)


class Voting:
    """Node values without a judge: the rest of the solution is sampled once from each new node. A visit is worth the
    share of the problem's solutions with the same answer as its own, so its value changes as solutions are found."""

    judge: StateJudge | None = None

    def __init__(self, writer: StepWriter, read: ReadAnswer) -> None:
        self.writer = writer
        self.read = read

    def expanded(self, trees: Sequence[SearchTree], nodes: Sequence[Node]) -> None:
        """Sample the rest of the solution from the node just expanded in each tree, count its answer and those of the
        node's ends, and compute the values of all visits anew."""
        states = [node.tokens() for node in nodes]
        rests = self.writer.rests([tree.question for tree in trees], states)
        for tree, node, state, rest in zip(trees, nodes, states, rests, strict=True):
            for child in node.children:
                if child.ended:
                    self._add(tree, self.writer.text(child.tokens()))
            tree.spent += len(rest)
            text = self.writer.text([*state, *rest])
            self._add(tree, text)
            self._visit(tree, node, answer_key(text, self.read))

    def revisited(self, tree: SearchTree, end: Node) -> None:
        self._visit(tree, end, answer_key(self.writer.text(end.tokens()), self.read))

    def _add(self, tree: SearchTree, text: str) -> None:
        """Add a solution to those found, and count its answer."""
        if not tree.votes:
            tree.votes[answer_key(tree.found[0].text, self.read)] += 1  # the greedy one, not counted yet
        tree.votes[answer_key(text, self.read)] += 1
        tree.found.append(FoundSolution(text, tree.spent))

    def _visit(self, tree: SearchTree, node: Node, answer: str | None) -> None:
        """Count a visit of ``node`` that led to ``answer``, and compute the values of all visits anew."""
        back_up(node, 0.0)
        tree.visited.append((node, answer))
        shares = {key: count / len(tree.found) for key, count in tree.votes.items()}
        shares[None] = 0.0
        revalue(tree.root, [(visited, shares[key]) for visited, key in tree.visited])


def tree_search(
    writer: StepWriter,
    questions: Sequence[Question],
    values: Judging | Voting,
    *,
    width: int,
    tokens: int,
    exploration: float = 1.25,
    most_simulations: int = 300,
) -> list[SearchTree]:
    """Search every problem's tree until ``tokens`` tokens have been generated for it; return the trees.

    Args:
        writer: the policy.
        questions: the problems, whose trees grow side by side.
        values: where a node's value comes from.
        width: number of proposals for a node's next step; equal ones are one child.
        tokens: the budget of a problem, its greedy solution included. The last round may exceed it.
        exploration: c of PUCT.
        most_simulations: limit for a tree whose simulations reach the same ends again, which generates no tokens.
    """
    greedy = first_solutions(writer, questions, values.judge)
    trees = [
        SearchTree(question, found, spent=found[0].tokens) for question, found in zip(questions, greedy, strict=True)
    ]
    while True:
        reached = []
        for tree in trees:
            node = None
            if tree.spent < tokens:
                node = _next_node(tree, values, exploration, most_simulations)
            if node is not None:
                reached.append((tree, node))
        if not reached:
            return trees
        active = [tree for tree, _ in reached]
        nodes = [node for _, node in reached]
        proposals = writer.steps([tree.question for tree in active], [node.tokens() for node in nodes], width)
        for tree, node, steps in zip(active, nodes, proposals, strict=True):
            tree.spent += sum(len(step) for step, _ in steps)
            expand(node, steps)
        values.expanded(active, nodes)


def _next_node(tree: SearchTree, values: Judging | Voting, exploration: float, most: int) -> Node | None:
    """Return the node to expand next; None after ``most`` simulations. A simulation that reaches an end needs no new
    step: it is counted here, and the next one begins."""
    while tree.rounds < most:
        tree.rounds += 1
        node = select(tree.root, exploration)
        if not node.ended:
            return node
        values.revisited(tree, node)
    return None
