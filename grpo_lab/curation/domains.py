"""Assign a question to a domain, one of the seven subjects of the MATH data set (arXiv 2103.03874), by rules.

Kimi k1.5 (section 2.1) tags its prompts by domain and keeps the domains balanced, with a tagger that it does not
describe. Ours looks for words. Every rule that matches adds its weight to one subject, twice if it matches different
words, and the heaviest subject wins; on a tie, the first one in `DOMAINS`. If no rule matches, a question with an
unknown is `algebra`, any other `prealgebra`. English and LaTeX are understood. `docs/choosing_the_data.md` says how
often it is right on MATH: well enough for balancing, not for grading.
"""

from __future__ import annotations

import re
from typing import Final

from grpo_lab.curation.question_kinds import DRAWING, READ_AT_MOST

_UNKNOWN = re.compile(r"\$[^$]{0,60}\b[a-z]\b|\\\[|\b[fgx]\(")

#: Subject → weight → pattern of the words that have this weight.
_WORDS: Final[dict[str, dict[int, str]]] = {
    "counting_and_probability": {
        12: r"probability|expected (?:value|number)|how many (?:\S+ ){0,2}ways|number of ways|\\[dt]?binom"
        r"|pascal'?s triangle|\d! ?ways",
        4: r"committees?|permutations?|combinations?|arrange(?:d|ments?)?|license plates?|random(?:ly)?|dice|die"
        r"|tossed|round table|indistinguishable|factorials?|\d!",
        2: r"how many (?:different|distinct|possible|squares|triangles|points|paths)|cards?|deck|marbles|selected"
        r"|chosen|each other|don't|both|subsets?|in a row|choose",
    },
    "number_theory": {
        12: r"\\pmod|mod|modulo|\\equiv|(?:base|bases) ?\$?\w{1,5}(?:\$|[.,?])|\d_\{?\d+\}?|binary|divisors?"
        r"|greatest common|relatively prime|units digit|tens digit|hexadecimal|repeating|palindromes?",
        4: r"least common|gcd|lcm|residues?|ones digit|divisible|primes?|remainders?|digits?|terminating|leap year"
        r"|consecutive (?:\w+ ){0,3}integers|perfect (?:\S+ )?(?:square|cube|power)s?|factors of|proper factors?",
        2: r"(?<!are )(?:positive|two-digit|three-digit|four-digit|whole|natural) (?:\S+ )?(?:integers?|numbers?)"
        r"|multiples?|is divided by \$?\d|factors?",
    },
    "precalculus": {
        12: r"matri(?:x|ces)|\\mathbf|\\begin\{[pv]matrix\}|vectors?|polar|(?:spheric|cylindric)al coordinates|\\cis"
        r"|parameteri[sz]ed|dot product|cross product|e\^\{[^}]{0,40}i|\w+ roots? of unity|\\arc(?:sin|cos|tan)|planes"
        r"|the plane (?:containing|through|passing)|\\(?:cot|sec|csc)|\\theta|\\det|determinant"
        r"|\(-?\d+,-?\d+,-?\d+\)",
        5: r"\\(?:sin|cos|tan)|rotat\w+ (?:\S+ ){0,2}(?:around|about)|complex plane|z-axis|\(x,y,z\)|in space"
        r"|octahedron",
    },
    "geometry": {
        4: r"triangles?|\\triangle|circumference|inscribed|circumscribed|chord|quadrilateral|trapezoid|parallelogram"
        r"|rhombus|cones?|cylind\w+|spheres?|prism|pyramid|tetrahedron|hypotenuse|\\angle|\\overline\{(?-i:[A-Z]+)\}"
        r"|centroid|altitude|semicircles?|arc|dilation|perpendicular|congruent|rectangular box",
        2: r"circles?|radi(?:us|i)|diameters?|pentagon|hexagon|polygon|area|perimeter|volume|rectang\w+|bisect\w*"
        r"|squares? \$?(?-i:[A-Z]{4})|(?:square|cubic) (?:units?|feet|inch\w*|cm|centimeters|meters)|parallel|tangent"
        r"|side length|sides|similar|reflected|angles?|medians",
    },
    "intermediate_algebra": {
        5: r"complex|for all real numbers|ellipse|hyperbola|foc(?:us|i)|\\sum|\\prod|\\infty|real roots?|conjugate"
        r"|imaginary|monic|(?:minimum|maximum) value|nonreal|\\omega|positive real numbers|directrix|telescop\w+"
        r"|polynomial with",
        3: r"asymptotes?|polynomials?|roots|for all (?:real|positive|integers?|\$)|coefficients?|degree \$?[2-9n]|\|z"
        r"|\\log|real numbers? (?:\$\w\$|such)|sequence|odd function|inequality|recursive\w*|partial fraction"
        r"|\^[36-9]|\^\{\d\d\}|\\begin\{align\*?\}|(?:complex|real) solutions?|the set of",
        2: r"is divided by \$?x|\^4|all real|ordered triples?|real values|\\frac\{x[^}]{0,40}\}\{[^}]{0,40}x|\\sqrt\{x"
        r"|\$?x,\$? \$?y,\$? (?:and )?\$?z|\\le|\\ge",
    },
    "algebra": {
        5: r"slope|intercepts?|interest|\\l(?:floor|ceil)|f\^\{-1\}|inverse|midpoint|proportional"
        r"|(?:arithmetic|geometric) (?:sequence|series)|complet\w+ the square|rationali[sz]e|system of equations"
        r"|distance between|endpoints?|interval notation|denominator|annual\w*|invest\w*|compounded",
        3: r"lines?|function|[fgh]\(|domain|range|graph\w*|expand|quadratic|vertex|solve|equations?|operation|define"
        r"|defined (?:by|as|for)|in terms of|values of \$|term|factor the|\\log_|nickels|dimes|integer values",
        2: r"x\^2|y ?=|simplify|evaluate|sum of (?:two|the) \w+|per (?:hour|day|pound)|product of|simplest radical form"
        r"|\d\^2|what is the value of|more than",
    },
    "prealgebra": {
        5: r"as a (?:decimal|percent|mixed number)|percent\w*|round\w*|nearest|\\div|mean|median|mode|average"
        r"|estimate|regular|interior angles?|supplementary|complementary|shaded",
        3: r"how (?:many|much|long) (?:\w+ ){0,3}(?:did|does|do|are|will|would|is|was|were|can|more|fewer)|each|total"
        r"|cost\w*|\\\$\d|ratio|\\%|table|cents|feet|inch\w*|students|minutes|dollars|pounds?|gallons?|school|bought"
        r"|times as|half|one-\w+|two-\w+|as an integer|^\s*(?:compute|simplify|what is) \$[^a-z$]+\$",
        2: r"miles|hours?|speed|people|common fraction|square root of|degrees?|diagram|figure|what is (?:one|the sum)",
    },
}
DOMAINS: Final = tuple(_WORDS)
_RULES: Final = [
    (domain, weight, re.compile(rf"(?:(?<![a-zA-Z\\])|(?=\\))(?:{words})(?![a-zA-Z])", re.IGNORECASE))
    for domain, by_weight in _WORDS.items()
    for weight, words in by_weight.items()
]


def question_domain(text: str) -> str:
    """Return the subject of a mathematical question, one of `DOMAINS`, from its text alone. Raises ValueError if `text`
    is not a string."""
    if not isinstance(text, str):
        raise ValueError(f"question_domain reads one question as a str; got {type(text).__name__}")
    read = text[:READ_AT_MOST]
    said = DRAWING.sub(" ", read)
    weights: dict[str, int] = dict.fromkeys(DOMAINS, 0)
    for domain, weight, rule in _RULES:
        weights[domain] += weight * min(2, len({found.casefold() for found in rule.findall(said)}))
    if said != read:
        weights["geometry"] += 2
    if not any(weights.values()):
        if _UNKNOWN.search(said):
            return "algebra"
        return "prealgebra"
    return max(DOMAINS, key=lambda domain: weights[domain])
