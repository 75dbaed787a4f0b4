r"""Cleans the text of an answer: one spelling for each sign, space, dash, bracket and style.

Numbers in other scripts and signs of Unicode become ASCII or LaTeX; spacing, sizes and dollars go.
Relations become single characters (= < > ≤ ≥ ≠ ≈ ∈ ∪ ±), so that the rest can split at them. A
letter in ``\text{}`` gets a mark (§) so that the unit "m" is not taken for the variable m.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("–—−‒﹣‐‑", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000~", " "),
        **dict.fromkeys("\u200b\u2060\ufeff\u200e\u200f", ""),
        **dict.fromkeys("’ʼ‘′", "'"),
        **dict.fromkeys('“”„«»"', " "),
        "×": "\\times ",
        "÷": "/",
        "·": "\\cdot ",
        "⋅": "\\cdot ",
        "∗": "*",
        "⁄": "/",
        "∕": "/",
        "π": "\\pi ",
        **{letter: f"\\mathbb{{{name}}}" for letter, name in zip("ℝℤℕℚℂ", "RZNQC", strict=True)},
        "∞": "\\infty ",
        "°": "^\\circ ",
        "º": "^\\circ ",
        "√": "\\sqrt ",
        "⩽": "≤",
        "⩾": "≥",
        "≅": "≈",
        "≃": "≈",
        "θ": "\\theta ",
        "α": "\\alpha ",
        "β": "\\beta ",
        "λ": "\\lambda ",
        "φ": "\\phi ",
        "ω": "\\omega ",
        "…": "\\ldots ",
        "½": "\\frac{1}{2}",
        "⅓": "\\frac{1}{3}",
        "⅔": "\\frac{2}{3}",
        "¼": "\\frac{1}{4}",
        "¾": "\\frac{3}{4}",
        "⅕": "\\frac{1}{5}",
        "⅖": "\\frac{2}{5}",
        "⅗": "\\frac{3}{5}",
        "⅘": "\\frac{4}{5}",
        "⅙": "\\frac{1}{6}",
        "⅚": "\\frac{5}{6}",
        "⅛": "\\frac{1}{8}",
        "⅜": "\\frac{3}{8}",
        "⅝": "\\frac{5}{8}",
        "⅞": "\\frac{7}{8}",
        **{chr(0xFF01 + i): chr(0x21 + i) for i in range(94)},  # the full-width forms
    }
)
NEW_ROW = "␤"
"""Stands for a double backslash, which ends a row of a matrix."""
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
# Text with groups in braces that have none in them.
_GROUP = r"(?:[^{}]|\{[^{}]*\})*"
_UNRELATED = r"(?:[^{}=<>≤≥≠,;]|\{[^{}]*\})*"
_COMMANDS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\(?:left|right|[Bb]igg?[lrm]?)(?![A-Za-z])\s*(?:\.(?!\d))?"), ""),
    (
        re.compile(
            r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|phantom\{\}|bf|bfseries|rm|it"
            r"|tiny|scriptsize|footnotesize|small|normalsize|[Ll]arge|LARGE|[Hh]uge)(?![A-Za-z])"
        ),
        "",
    ),
    (re.compile(r"\\(?:[dtcs]|nice|x)frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(rf"\{{({_GROUP})\\over(?![A-Za-z])({_GROUP})\}}"), r"\\frac{\1}{\2}"),
    (re.compile(rf"^({_UNRELATED})\\over(?![A-Za-z])({_UNRELATED})$"), r"\\frac{\1}{\2}"),
    (re.compile(rf"\{{({_GROUP})\\choose(?![A-Za-z])({_GROUP})\}}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\mathbb\s*([A-Z])(?![A-Za-z])"), r"\\mathbb{\1}"),
    # A repeating decimal: 0.\dot{3}, 0.\bar{3}, 0.\dot{1}2\dot{3}, 0.\overline 3, 0.(3), 0.333...
    (
        re.compile(r"(?<=[\d.])\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?"),
        r"\\overline{\1\2\3}",
    ),
    (re.compile(r"(?<=[\d.])\\(?:dot|bar|overline)\s*\{?(\d+)\}?"), r"\\overline{\1}"),
    (re.compile(r"(?<=\d\.)\((\d+)\)"), r"\\overline{\1}"),
    (
        re.compile(
            r"(?<![\d.])(\d{1,9}\.\d{0,9}?)(\d{1,9}?)\2{2,} ?(?:\.\.\.|\\l?dots(?![A-Za-z]))"
        ),
        r"\1\\overline{\2}",
    ),
    (re.compile(r"\\colon(?![A-Za-z])|\\math(?:bin|rel) ?:"), ":"),
    (re.compile(r"(?<=[\d,])\\!(?=[\d,])"), ""),
    (re.compile(r"\\(?:[,;:! ]|quad|qquad|thinspace|enspace|hspace\*?\{[^{}]*\})"), " "),
    (re.compile(r"\\([$#&])"), r"\1"),
    (re.compile(r"\\pounds(?![A-Za-z])"), "£"),
    (re.compile(r"\\(?:text)?euro?(?![A-Za-z])"), "€"),
    (re.compile(r"\\(?:le|leq|leqslant)(?![A-Za-z])|<="), "≤"),
    (re.compile(r"\\(?:ge|geq|geqslant)(?![A-Za-z])|>="), "≥"),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\neq?(?![A-Za-z])|(?<![\d)}])!="), "≠"),  # 5!=120 is a factorial
    (re.compile(r"\\(?:approx|simeq|cong)(?![A-Za-z])"), "≈"),
    (re.compile(r"\\in(?![A-Za-z])"), "∈"),
    (re.compile(r"\\(?:big)?cup(?![A-Za-z])"), "∪"),
    (re.compile(r"\\(?:lor|vee)(?![A-Za-z])"), " or "),
    (re.compile(r"\\pm(?![A-Za-z])|\+/-|\+-"), "±"),
    (re.compile(r"\\mp(?![A-Za-z])"), "∓"),
    (re.compile(r"\\(?:ldots|dots|cdots|dotsc)(?![A-Za-z])|\.\.\."), r"\\ldots "),
    (re.compile(r"\\degree(?![A-Za-z])|\^\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"\\(?:emptyset|varnothing)(?![A-Za-z])"), r"\\{\\}"),
    (re.compile(r"\\[lr]angle(?![A-Za-z])"), lambda m: "⟨" if m[0] == "\\langle" else "⟩"),
    (re.compile(r"\\[lr]brace(?![A-Za-z])"), lambda m: "\\{" if m[0] == "\\lbrace" else "\\}"),
    (re.compile(r"\\(?:text)?color\s*\{[^{}]*\}"), ""),
    (re.compile(r"(?<=\d)\s*\\(?:Omega|ohm)(?![A-Za-z])"), " ohm"),
    (re.compile(r"`|(?<![A-Za-z0-9])__|__(?![A-Za-z0-9])"), " "),
)
_WORDS_IN = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mbox|operatorname\*?|emph|textnormal|unit)"
    r"\s*\{((?:[^{}\\]|\\.|\{[^{}]*\})*)\}"
)
_STYLED = re.compile(r"\\(?:mathbf|mathit|boldsymbol|bm|mathsf|boxed|underline)\s*\{([^{}]*)\}")
_MARK_IN_BRACES = re.compile(r"\{([,.:])\}")
_ROW_END = re.compile(r"\\\\(?:\s*\[\s*-?[\d.]+\s*(?:pt|ex|em|mm|cm|in)\s*\])?")
_LONE_LETTER = re.compile(r"(?<![A-Za-z\\§])([A-Za-z])(?![A-Za-z])")
_POWER = re.compile(r"(?<=[A-Za-z0-9)])\*\*(?=\(?-?\d)")
_ENDS = (
    "\\,",
    "\\;",
    "\\:",
    "\\!",
    "\\quad",
    "\\qquad",
    "\\",
    "~",
    ".",
    ",",
    ";",
    ":",
    " ",
    "\t",
    "\n",
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def clean(text: str) -> str:
    """Returns the text in the one spelling that the other modules of this reward read."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
    text = re.sub("[₀-₉]+", lambda m: f"_{{{m[0].translate(_LOWERED)}}}", text)
    text = undelimited(text.translate(_CHARACTERS).strip())
    text = _MARK_IN_BRACES.sub(r"\1", text)
    text = _ROW_END.sub(NEW_ROW, text)
    for _ in range(3):  # styles in styles
        styled = _STYLED.sub(r"\1", _WORDS_IN.sub(_marked, text))
        if styled == text:
            break
        text = styled
    text = unemphasized(text, " ")
    for pattern, plain in _COMMANDS:
        text = pattern.sub(plain, text)
    text = " ".join(text.split())
    return trimmed(undelimited(text)).removeprefix("=").lstrip()


def unemphasized(text: str, space: str = "") -> str:
    """Removes the asterisks of Markdown; those of a power, 10**-3, become "^"."""
    return _POWER.sub("^", text).replace("**", space)


def trimmed(text: str) -> str:
    """Removes punctuation and LaTeX's spaces at the end, and asterisks around the text."""
    text = text.strip().strip("*").strip()
    end = len(text)
    while not text.endswith("...", 0, end):
        found = next((mark for mark in _ENDS if text.endswith(mark, 0, end)), "")
        if not found:
            break
        end -= len(found)
    return text[:end].rstrip()


def undelimited(text: str) -> str:
    r"""Removes the dollars or brackets that enclose LaTeX: $...$, \(...\), \[...\]."""
    for _ in range(4):
        for opening, closing in _DELIMITERS:
            inner = text[len(opening) : -len(closing)]
            encloses = text.startswith(opening) and text.endswith(closing)
            if encloses and len(text) > len(opening) + len(closing) and opening not in inner:
                text = inner.strip()
                break
        else:
            bare = text.rstrip(".,;: ")
            if bare == text or not bare.endswith(("$", "\\)", "\\]")):
                return text
            text = bare
    return text


def _marked(words: re.Match[str]) -> str:
    return " " + _LONE_LETTER.sub(r"§\1", words[1]) + " "
