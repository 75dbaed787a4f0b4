"""Texts as a policy writes them when it goes astray: endless, nested, repeated, or senseless."""

from __future__ import annotations

import random
from collections.abc import Iterator

_ATOMS = (
    *("1", "2", "9", "17", "x", "y", "n", "e", "i", "\\pi", "\\infty", "99999999", "0.5", "10^{9}"),
    *(
        "\\frac{1}{2}",
        "a_n",
        "\\theta",
        "-3",
        "1,000",
        "½",
        "x!",
        "\\sqrt{2}",
        "7^{7^7}",
        "1e99999",
    ),
)
_JUNK = (
    *(
        "$",
        "$$",
        "\\",
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "|",
        "&",
        "^",
        "_",
        "~",
        "#",
        "####",
        ",",
        ", ",
    ),
    *("\\boxed", "\\boxed{", "\\text{", "\\left(", "\\frac", "\\sqrt", "\\int", "=", "<", "±", "≈"),
    *("so ", "the answer is ", "Answer: ", "B. ", "or ", "**", "`", "<think>", "</think>", "\n"),
    *(
        "é",
        "漢",
        "\u200b",
        "\ud7ff",
        "🙂",
        "\u0661",
        "\u2212",
        "\u2013",
        " ",
        "\t",
        "1 ",
        "A ",
        "not ",
        "\x00",
    ),
)


def expression(draw: random.Random, depth: int) -> str:
    """A random expression, as deep as told."""
    if depth <= 0 or draw.random() < 0.1:
        return draw.choice(_ATOMS)
    a, b = expression(draw, depth - 1), draw.choice(_ATOMS)
    return draw.choice(
        (
            f"{b}^{{{a}}}",
            f"({a})!",
            f"\\binom{{{a}}}{{{b}}}",
            f"\\frac{{{b}}}{{{a}}}",
            f"\\sqrt[{b}]{{{a}}}",
            f"\\sin({a})",
            f"\\ln {a}",
            f"({a}+{b})({a}-{b})" if depth < 4 else f"({a}+{b})",
            f"{a}={b}",
            f"({a}, {b})",
            f"\\{{{a}, {b}\\}}",
            f"\\sum_{{k=1}}^{{{a}}} k^{{{b}}}" if draw.random() < 0.05 else f"{a}+{b}",
            f"\\int_0^{{{a}}} x^x dx" if draw.random() < 0.05 else f"{a}-{b}",
            f"|{a}|",
            f"{a} \\pm {b}",
            f"{a} \\text{{ or }} {b}",
            f"{a} < {b}",
        )
    )


def texts(count: int, seed: int) -> Iterator[str]:
    """Yields that many completions, of up to 100 kB."""
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.randrange(6)
        size = int(10 ** draw.uniform(1, 4.3))
        if kind == 0:
            inner = expression(draw, draw.choice((2, 4, 8, 16, 40)))
        elif kind == 1:
            inner = draw.choice((*_ATOMS, *_JUNK)) * size
        elif kind == 2:
            inner = "".join(draw.choice(_JUNK) for _ in range(size))
        elif kind == 3:
            mark = draw.choice((",", ", ", " ", "+", "*", "^", "=", "\\\\", "&", ";", " and ", "!"))
            inner = mark.join(str(draw.randrange(10**6)) for _ in range(size // 4))
        elif kind == 4:
            opening, closing = draw.choice(
                (("(", ")"), ("{", "}"), ("[", "]"), ("\\sqrt{", "}"), ("\\text{", "}"), ("|", "|"))
            )
            deep = draw.choice((5, 19, 41, 300, size // 2))
            inner = opening * deep + draw.choice(_ATOMS) + closing * deep
        else:
            inner = draw.choice(("9" * size, "0." + "3" * size, f"1e{size}", f"{size}^{{{size}}}!"))
        form = draw.randrange(5)
        inner = inner[:100_000]
        yield (
            f"\\boxed{{{inner}}}",
            f"#### {inner}",
            f"The answer is {inner}",
            inner,
            f"\\boxed{{{inner}",
        )[form]
