r"""Completions that are out to hurt whoever reads them: families of texts, seeded. Used by ``hostile_text.py`` and its
test.

``hostile(count, seed)`` gives ``(family, completion)``, the families in turn, so that any beginning has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from random import Random

Make = Callable[[Random], str]
CANARY = "/tmp/grpo_lab_hostile_canary"
"""Written by any text that somebody runs as a program."""

_WRAPPINGS = (
    "\\boxed{{{}}}", "The answer is \\boxed{{{}}}.", "#### {}", "<answer>{}</answer>",
    "<think>hm</think>\n<answer>${}$</answer>", "The answer is ${}$.", "A: {}", "{}",
)  # fmt: skip


def nested_powers(rng: Random) -> str:
    base, depth = rng.randint(2, 99), rng.randint(2, 6)
    braced = f"{base}^{{" * depth + str(base) + "}" * depth
    return rng.choice([braced, "**".join([str(base)] * depth), f"({braced}) \\bmod 7", f"\\sqrt{{{braced}}}"])


def factorials(rng: Random) -> str:
    n = rng.randint(3, 10**9)
    return rng.choice([f"{n}!", f"({n % 99}!)!", f"{n % 999}" + "!" * rng.randint(2, 9), f"\\binom{{{n}}}{{{n // 2}}}"])


def determinants(rng: Random) -> str:
    size = rng.randint(4, 14)
    entry = rng.choice([lambda: str(rng.randint(-(10**9), 10**9)), lambda: rng.choice("abcdxyz"), lambda: "x^{9}+1"])
    rows = " \\\\ ".join(" & ".join(entry() for _ in range(size)) for _ in range(size))
    name = rng.choice(["pmatrix", "vmatrix", "bmatrix"])
    power = rng.choice(["", "^{50}", "^{-1}"])
    front = rng.choice(["", "\\det "])
    return f"{front}\\begin{{{name}}}{rows}\\end{{{name}}}{power}"


def calculus(rng: Random) -> str:
    n = rng.randint(2, 10**6)
    return rng.choice(
        [
            f"\\int_0^{{\\infty}} \\frac{{\\sin^{{{n}}} x}}{{x^{{{n}}}+e^x}} dx",
            f"\\sum_{{k=1}}^{{{n * n}}} k^k",
            f"\\prod_{{k=1}}^{{{n}}} \\Gamma(k)",
            f"\\lim_{{x \\to 0}} \\frac{{\\sin(x^{{{n}}})}}{{\\tan x}}",
            "\\int " * (n % 200) + "x",
            f"\\frac{{d^{{{n}}}}}{{dx^{{{n}}}}} e^{{x^2}}",
        ]
    )


def polynomials(rng: Random) -> str:
    n = rng.randint(20, 10**5)
    letters = rng.sample("abcdefgh", rng.randint(1, 6))
    return rng.choice(
        [
            f"({'+'.join(letters)})^{{{n}}}",
            " + ".join(f"{rng.randint(1, 99)}x^{{{k}}}" for k in range(n % 150)) + " = 0",
            " = ".join(f"x_{k}" for k in range(n % 300 + 2)),
            f"x^{{{n}}} + x + 1 < {n} < y^x",
            "".join(rng.choice(["\\sin(", "\\cos(", "\\log("]) for _ in range(n % 120)) + "x" + ")" * (n % 120),
        ]
    )


def unclosed(rng: Random) -> str:
    return rng.choice(
        ["{", "\\frac{", "\\boxed{", "\\left(", "(", "[", "\\text{", "$", "\\sqrt{", "\\begin{"]
    ) * rng.randint(1, 20_000)


def nested(rng: Random) -> str:
    opening, inside, closing = rng.choice(
        [
            ("\\sqrt{", "2", "}"),
            ("\\frac{1}{", "2", "}"),
            ("(", "1", ")"),
            ("\\boxed{", "5", "}"),
            ("\\text{", "a", "}"),
            ("\\left[", "1,2", "\\right]"),
            ("|", "x", "|"),
            ("~(p & ", "q", ")"),
        ]
    )
    depth = rng.randint(1, rng.choice([30, 300, 5000]))
    return opening * depth + inside + closing * depth


def long_texts(rng: Random) -> str:
    piece = rng.choice(
        ["x", "1", " ", "$", "\n", "\\boxed{1} ", "a b ", "1,", "0", "}", "\\", "A: 1\n", "é", "#### 1\n", "2+2=4\n"]
    )
    return (piece * 100_000)[: rng.randint(90_000, 100_000)]


def right_to_left(rng: Random) -> str:
    marks = "\u202e\u202d\u2066\u2067\u2069\u200f\u061c"
    words = ["תשובה", "الجواب", "هو", "١٨", "שמונה", "۱۸", "18"]
    return "".join(
        rng.choice(marks) + rng.choice(words) + rng.choice(["", " ", rng.choice(marks)])
        for _ in range(rng.randint(1, 300))
    )


def zero_width(rng: Random) -> str:
    invisible = "\u200b\u200c\u200d\u2060\ufeff\u00ad\u180e"
    text = rng.choice(["18", "\\frac{1}{2}", "answer is 18", "</think>", "<answer>18</answer>"])
    marks = "".join(chr(0x300 + rng.randrange(100)) for _ in range(rng.randint(0, 2000)))
    return "".join(c + rng.choice(invisible) * rng.randint(0, 3) for c in text) + marks


def control_characters(rng: Random) -> str:
    some = [
        "\x00",
        "\ud800",
        "\udfff",
        "\x1b[2J",
        "\r",
        "\x08",
        "\x7f",
        "\u2028",
        "\x85",
        "\x0c",
        "\U0010ffff",
        "18",
        "\\frac{\x00}{2}",
    ]
    return "".join(rng.choice(some) for _ in range(rng.randint(1, 400)))


def regex_bait(rng: Random) -> str:
    piece = rng.choice(
        [
            "a", " ", "1,", " and ", "= ", "the answer is ", "A:", "####", "\t", "-", "1 ", "1/", ", ", "\\text{a}",
            "\\! ", "1.", "and or ", "1 of ", "half ", "\\quad ", "__", "* ", "`", "**1", "x=", "1 out of ",
            "Question ", "?", "1\n", "<answer>", "$1$ ", "\\ ", "1-", "v ", "->", "p & ", "1. p\n", "million ", "(1",
            "1)", "% ", "kg/",
        ]
    )  # fmt: skip
    return piece * rng.choice([rng.randint(1, 60), rng.randint(100, 2000), rng.randint(5000, 15_000)]) + rng.choice(
        ["", "!", "\x00", "x", "$"]
    )


def programs(rng: Random) -> str:
    touch = f"__import__('os').system('touch {CANARY}')"
    return rng.choice(
        [
            touch,
            f"exec({touch!r})",
            "__import__('os').kill(__import__('os').getppid(), 9)",
            "(lambda f: f(f))(lambda f: f(f))",
            "while True: pass",
            f"```python\nimport os\nos.system('touch {CANARY}')\n```",
            f"$(touch {CANARY})",
            f"`touch {CANARY}`",
            "\\input{/etc/passwd}",
            f"\\immediate\\write18{{touch {CANARY}}}",
            "{{7*7}} %s %(x)s {0.__class__} ${jndi:ldap://x}",
            f"!!python/object/apply:os.system ['touch {CANARY}']",
            f"Symbol('x').__class__.__init__.__globals__['__builtins__']['open']('{CANARY}','w')",
            "cos\nsystem\n(S'true'\ntR.",
            "[" * rng.randint(1, 3000) + "]",
        ]
    )


def odd_numbers(rng: Random) -> str:
    n = rng.randint(1, 100_000)
    return rng.choice(
        [
            "9" * n, "0." + "0" * n + "1", f"1e{n}", "-" * n + "1", "1/0", "0/0", "\\infty", "nan", "i^i", f"{n}%%",
            f"\\frac{{{n}}}{{0}}", "1" + ",000" * (n % 3000), f"{n}\\%" * (n % 50), ".".join("1" * (n % 500)),
            f"10^{{{n}}}", f"10^{{-{n}}}", f"{n}_{{{n % 17}}}", f"{n}\\pi^{{{n}}}", "½" * (n % 300), "⁹" * (n % 300),
            f"{n}k million billion", f"\\overline{{{n}}}", f"0.\\dot{{{n % 10}}}", f"x={n}=y={n}",
        ]
    )  # fmt: skip


def lists(rng: Random) -> str:
    n = rng.choice([3, 30, 500])
    numbers = [str(rng.randint(-99, 99)) for _ in range(n)]
    return rng.choice(
        [
            ", ".join(numbers), "\\{" + ", ".join(numbers) + "\\}", "(" + ",".join(numbers) + ")",
            " \\cup ".join(f"({a},{a}1)" for a in numbers), " or ".join(f"x={a}" for a in numbers), "; ".join(numbers),
            " \\text{ and } ".join(numbers), "[" + "],[".join(numbers) + "]",
        ]
    )  # fmt: skip


def tags(rng: Random) -> str:
    some = [
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "18",
        "\n",
        "<|im_end|>",
        "\\boxed{",
        "}",
        "User:",
        "Question: what?",
    ]
    return "".join(rng.choice(some) for _ in range(rng.choice([5, 100, 5000])))


def fences(rng: Random) -> str:
    some = [
        "```",
        "```python\n",
        "~~~",
        "\n",
        "print(1)\n",
        "````",
        "assert False\n",
        "`",
        "    ```\n",
        "def f(): return 1\n",
    ]
    return "".join(rng.choice(some) for _ in range(rng.choice([5, 100, 5000])))


def steps(rng: Random) -> str:
    def line() -> str:
        a, b = rng.randint(0, 10**6), rng.randint(0, 9)
        return rng.choice(
            [
                f"{a}+{b}={a + b}",
                f"{a}^{a}={b}",
                f"{a}/{0}={b}",
                f"x={a}",
                "x=x^x",
                f"{b}!!!={a}",
                f"1. p & q, assumption {a}",
                f"{a}. q, 1 & e",
            ]
        )

    return "\n".join(line() for _ in range(rng.choice([3, 100, 3000])))


def games(rng: Random) -> str:
    n = rng.randint(1, 4000)
    chain = rng.choice(["*", "+", "-", "/", "^", "**"]).join(str(rng.randint(0, 10**9)) for _ in range(n))
    return rng.choice(
        [
            chain,
            "(" * n + "1" + ")" * n,
            "-" * n + "1",
            f"{chain}={chain}",
            "1" * n + "*" + "1" * n,
            "1//0",
            "1 2 3",
            "~" * n + "p",
        ]
    )


def unicode_noise(rng: Random) -> str:
    blocks = [
        (0x20, 0x7F),
        (0x370, 0x52F),
        (0x600, 0x6FF),
        (0x900, 0x97F),
        (0x2000, 0x2BFF),
        (0x4E00, 0x4FFF),
        (0x1D400, 0x1D7FF),
        (0x1F300, 0x1F6FF),
    ]
    low, high = rng.choice(blocks)
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.choice([3, 50, 5000])))


def number_words(rng: Random) -> str:
    written = (
        "one two hundred thousand million billion half a an third quarters of and point dozen score minus "
        "percent twenty k"
    )
    words = written.split()
    return rng.choice([" ", "-", "  "]).join(rng.choice(words) for _ in range(rng.choice([2, 8, 40, 3000])))


FAMILIES: dict[str, Make] = {
    make.__name__: make
    for make in (
        nested_powers, factorials, determinants, calculus, polynomials, unclosed, nested, long_texts, right_to_left,
        zero_width, control_characters, regex_bait, programs, odd_numbers, lists, tags, fences, steps, games,
        unicode_noise, number_words,
    )
}  # fmt: skip


def hostile(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """``count`` of ``(family, completion)``, the same for the same seed."""
    rng = Random(seed)
    for name in islice(cycle(FAMILIES), count):
        yield name, rng.choice(_WRAPPINGS).format(FAMILIES[name](rng))
