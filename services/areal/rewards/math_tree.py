r"""Reads an expression in LaTeX or plain text as a tree.

The grammar is that of answers: numbers, variables, + - * / ^, fractions, roots, factorials,
binomials and functions, products without a sign, and mixed numbers. Size and depth are limited.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

_MAX_CHARS = 2000
_MAX_TOKENS = 400
_MAX_DEPTH = 40
_MAX_DIGITS = 1000

_TOKEN = re.compile(
    r"\s+"
    r"|(?P<fixed>\d*\.\d*)\\overline\{(?P<repeating>\d+)\}"
    r"|(?P<number>\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<command>\\[A-Za-z]+|\\[{}|%])"
    r"|(?P<word>[A-Za-z]+)"
    r"|(?P<symbol>[-+*/^_(){}\[\]|!%'])"
)
_FUNCTIONS = {
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
    "asin": "asin",
    "acos": "acos",
    "atan": "atan",
    "ln": "ln",
    "log": "ln",
    "lg": "lg",
    "exp": "exp",
    "abs": "fabs",
}
_PRODUCTS = {"*", "\\times", "\\cdot", "\\ast"}
_QUOTIENTS = {"/", "\\div"}
_NO_FACTOR = frozenset(
    [
        *[")", "]", "}", "|", "+", "-", "^", "_", "!", "%", "'"],
        "\\}",
        "\\%",
        "\\rfloor",
        "\\rceil",
        "\\rvert",
    ]
)
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_BARS = {
    "|": ("|", "fabs"),
    "\\vert": ("\\vert", "fabs"),
    "\\lvert": ("\\rvert", "fabs"),
    "\\lfloor": ("\\rfloor", "floor"),
    "\\lceil": ("\\rceil", "ceil"),
}
_STYLES = {"\\vec", "\\hat", "\\bar", "\\overline", "\\overrightarrow", "\\tilde", "\\mathbb"}
GREEK = (
    r"\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho"
    r"|sigma|tau|upsilon|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega)"
)
INFINITY = "\\infty"
_LETTERS = re.compile(rf"{GREEK}|\\(?:infty|ell|hbar|pi)")


class Unreadable(Exception):
    """A text is not an expression that this module knows."""


class TooCostly(Exception):
    """A value cannot be computed within bounded time and memory."""


@dataclass(frozen=True)
class Node:
    """One operation; `name` is a number's text, a variable, or a function."""

    kind: str
    name: str = ""
    parts: tuple[Node, ...] = ()


@lru_cache(maxsize=4096)
def parse(text: str) -> Node:
    """Returns the tree of an expression.

    Raises:
        Unreadable: It is not an expression of the known grammar.
        TooCostly: It is too long or too deeply nested.
    """
    if len(text) > _MAX_CHARS:
        raise TooCostly(f"an expression of {len(text)} characters")
    return _Reader(_tokens(text)).whole()


def variables(node: Node) -> frozenset[str]:
    """Names of an expression's variables."""
    if node.kind == "name":
        return frozenset([node.name])
    return frozenset().union(*(variables(part) for part in node.parts))


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise Unreadable(text[position])
        position = found.end()
        if found["repeating"]:
            tokens.append(f"0{found['fixed']}~{found['repeating']}")
        elif found["word"]:
            tokens += names_in(found["word"])
        elif token := found["number"] or found["command"] or found["symbol"]:
            tokens.append(token)
        if len(tokens) > _MAX_TOKENS:
            raise TooCostly(f"an expression of more than {_MAX_TOKENS} symbols")
    return tokens


def _is_number(token: str) -> bool:
    return token[:1].isdigit() or token[:1] == "."


def names_in(word: str) -> list[str]:
    """A function's name is a command without its backslash; other letters are variables."""
    if word in _FUNCTIONS or word in ("sqrt", "pi"):
        return ["\\" + word]
    if word in ("infinity", "inf", "oo"):
        return [INFINITY]
    for name in (*_FUNCTIONS, "sqrt", "pi"):  # 2xsin(x), pir
        before, found, after = word.partition(name)
        if found and len(before) < 2 and not after:
            return [*before, "\\" + name]
    return list(word)


class _Reader:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def whole(self) -> Node:
        node = self._sum()
        if self._at < len(self._tokens):
            raise Unreadable(self._tokens[self._at])
        return node

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._next()
        if not token:
            raise Unreadable("its end")
        self._at += 1
        return token

    def _skip(self, token: str) -> bool:
        if self._next() == token:
            self._at += 1
            return True
        return False

    def _sum(self) -> Node:
        terms = [self._signed(self._product)]
        while self._next() in ("+", "-"):
            terms.append(self._signed(self._product))
        return terms[0] if len(terms) == 1 else Node("sum", parts=tuple(terms))

    def _signed(self, read: Callable[[], Node]) -> Node:
        negative = False
        while self._next() in ("+", "-"):
            negative ^= self._take() == "-"
        node = read()
        return Node("minus", parts=(node,)) if negative else node

    def _product(self) -> Node:
        factors = [self._factor()]
        while True:
            token = self._next()
            if token in _PRODUCTS:
                self._take()
                factors.append(self._signed(self._factor))
            elif token in _QUOTIENTS:
                self._take()
                factors.append(Node("inverse", parts=(self._signed(self._factor),)))
            elif self._begins_factor(token):
                if _is_number(token) and factors[-1].kind == "number":
                    factors[-1] = self._mixed(factors[-1])
                    continue
                follower = self._beside(factors[-1])
                if token == "\\frac" and factors[-1].kind == "number":
                    follower = self._joined(factors.pop(), follower)
                factors.append(follower)
            else:
                break
        return factors[0] if len(factors) == 1 else Node("product", parts=tuple(factors))

    def _mixed(self, whole: Node) -> Node:
        """Reads "2 1/2" as two and a half; no other two numbers may be side by side."""
        above, slash, below = [*self._tokens[self._at : self._at + 3], "", ""][:3]
        if slash != "/" or not (above + below).isdigit():
            raise Unreadable("two numbers side by side")
        self._at += 3
        inverse = Node("inverse", parts=(Node("number", below),))
        part = Node("product", parts=(Node("number", above), inverse))
        return self._joined(whole, part)

    def _beside(self, before: Node) -> Node:
        """Reads a factor without a sign before it; a number has to be clear of what is before.

        2^3 3^2 is clear, unlike 1/2 3, 5% 3 and x2, which may be a list, an index or a power.
        """
        is_clear = before.kind not in ("number", "inverse", "percent", "degrees")
        if before.kind in ("name", "constant"):
            is_clear = [*self._tokens[self._at + 1 :], ""][0] == "^"
        if _is_number(self._next()) and not is_clear:
            raise Unreadable("a number beside another factor")
        return self._factor()

    @staticmethod
    def _joined(whole: Node, part: Node) -> Node:
        """The sum of a whole number and a proper fraction beside it; else their product."""
        above, inverse = part.parts
        below = inverse.parts[0] if inverse.parts else above
        digits = whole.name.isdigit() and above.name.isdigit() and below.name.isdigit()
        mixed = digits and 0 < int(above.name) < int(below.name)
        return Node("sum" if mixed else "product", parts=(whole, part))

    @staticmethod
    def _begins_factor(token: str) -> bool:
        return bool(token) and token not in _NO_FACTOR

    def _factor(self) -> Node:
        node = self._primary()
        for _ in range(_MAX_DEPTH):
            token = self._next()
            if token == "^":
                self._take()
                if self._next() in ("\\circ", "\\degree") or (
                    self._tokens[self._at : self._at + 3] == ["{", "\\circ", "}"]
                ):
                    self._at += 3 if self._next() == "{" else 1
                    node = Node("degrees", parts=(node,))
                else:
                    node = Node("power", parts=(node, self._signed(self._exponent)))
            elif token == "!":
                self._take()
                node = Node("factorial", parts=(node,))
            elif token in ("%", "\\%"):
                self._take()
                node = Node("percent", parts=(node,))
            else:
                return node
        raise TooCostly(f"more than {_MAX_DEPTH} operators in a row")

    def _exponent(self) -> Node:
        """Reads what follows ^: a group, or one symbol; `2^-x` and `2^3^2` bind to the right."""
        base = self._primary()
        if self._next() == "^":
            self._take()
            self._depth += 1
            return Node("power", parts=(base, self._signed(self._exponent)))
        return base

    def _primary(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise TooCostly(f"an expression nested more than {_MAX_DEPTH} deep")
        node = self._unit()
        self._depth -= 1
        return node

    def _unit(self) -> Node:
        token = self._take()
        if _is_number(token):
            if len(token) > _MAX_DIGITS:
                raise TooCostly(f"a number of {len(token)} digits")
            return Node("number", token)
        if token in _CLOSING:
            return self._closed(_CLOSING[token])
        if token in _BARS:
            closing, function = _BARS[token]
            return Node("function", function, (self._closed(closing),))
        if token in ("\\frac", "\\binom", "\\dbinom", "\\tbinom"):
            return self._two_storied(token)
        if token == "\\sqrt":
            return self._root()
        if token[0] == "\\" and token[1:] in _FUNCTIONS:
            return self._function(token[1:])
        return self._name(token)

    def _closed(self, closing: str) -> Node:
        node = self._sum()
        if not self._skip(closing):
            raise Unreadable("a bracket that is not closed")
        return node

    def _two_storied(self, token: str) -> Node:
        above, below = self._argument(), self._argument()
        if token != "\\frac":
            return Node("binomial", parts=(above, below))
        return Node("product", parts=(above, Node("inverse", parts=(below,))))

    def _root(self) -> Node:
        degree = Node("number", "2")
        if self._skip("["):
            degree = self._sum()
            if not self._skip("]"):
                raise Unreadable("a bracket that is not closed")
        argument = self._argument()
        if not variables(argument):
            return Node("root", parts=(argument, degree))
        return Node("power", parts=(argument, Node("inverse", parts=(degree,))))

    def _argument(self) -> Node:
        r"""The argument of \frac or \sqrt: a group, or one digit or letter, as in \frac12."""
        token = self._next()
        if token and token[0].isdigit() and len(token) > 1:
            if not token.isdigit():
                raise Unreadable(token)
            self._tokens[self._at : self._at + 1] = [token[0], token[1:]]
        return self._primary()

    def _function(self, name: str) -> Node:
        base: Node | None = None
        if name == "log" and self._skip("_"):
            base = self._argument()
        power: Node | None = None
        if self._skip("^"):
            power = self._signed(self._exponent)
            if power == Node("minus", parts=(Node("number", "1"),)):
                if f"a{_FUNCTIONS[name]}" not in _FUNCTIONS.values():
                    raise Unreadable("an inverse function")
                name, power = f"a{name}", None
        bracketed = self._next() in ("(", "{", "[")
        inner = self._primary() if bracketed else self._plain_argument()
        node = Node("function", _FUNCTIONS[name], (inner,))
        if base is not None:
            under = Node("function", "ln", (base,))
            node = Node("product", parts=(node, Node("inverse", parts=(under,))))
        return node if power is None else Node("power", parts=(node, power))

    def _plain_argument(self) -> Node:
        r"""An argument without brackets: \sin 2x, \ln\frac{1}{2}."""
        factors = [self._factor()]
        while self._begins_factor(self._next()) and self._next()[1:] not in _FUNCTIONS:
            if self._next() in _PRODUCTS | _QUOTIENTS or self._next() in _CLOSING:
                break
            factors.append(self._beside(factors[-1]))
        return factors[0] if len(factors) == 1 else Node("product", parts=tuple(factors))

    def _name(self, token: str) -> Node:
        if token in _STYLES and self._skip("{"):
            inside = []
            while self._next() != "}":
                inside.append(self._take())
            self._take()
            name = token + "{" + "".join(inside) + "}"
        elif (token.isalpha() and len(token) == 1) or _LETTERS.fullmatch(token):
            name = token
        else:
            raise Unreadable(token)
        if self._skip("_"):
            name += "_" + "".join(self._subscript())
        while self._skip("'"):
            name += "'"
        if name in ("e", "i", "\\pi"):
            return Node("constant", name)
        return Node("name", name)

    def _subscript(self) -> list[str]:
        if not self._skip("{"):
            return [self._take()]
        inside = []
        while self._next() != "}":
            inside.append(self._take())
        self._take()
        return inside
