"""Constrained decoding with llguidance: which tokens may come next in a request.

    json_schema ────┐
    regex ──────────┼─> llguidance's Lark ──> Grammar, one per sequence ──> a row of allowed tokens
    structural_tag ─┘

Structural tags are xgrammar's, which SGLang takes; of its formats those that write text and JSON
(`_Lark._FORMATS`). The package is small and needs no torch; without it constraints are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

KINDS = ("json_schema", "regex", "structural_tag")
"""The sampling parameters that constrain an answer."""


class GrammarError(ValueError):
    """A constraint that cannot be compiled; the message is one line."""


class Grammar:
    """What one sequence may continue with. Made on the event loop, used by the engine's thread."""

    def __init__(self, matcher: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        """`stop_ids` are the model's; they end a complete answer."""
        self._matcher, self._vocab_size, self._stop_ids = matcher, vocab_size, list(stop_ids)

    def copy(self) -> Grammar:
        """Returns a copy for another sequence, at the same place."""
        return Grammar(self._matcher.deep_copy(), self._vocab_size, self._stop_ids)

    def allowed(self) -> NDArray[np.bool_]:
        """Whether each token may come next [vocab_size]; a matcher that gave up allows the end."""
        if not self._matcher.is_error():
            packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(packed, bitorder="little")[: self._vocab_size].astype(bool)
            if not self._matcher.is_error() and bits.any():
                return bits
        bits = np.zeros(self._vocab_size, dtype=bool)
        bits[self._stop_ids] = True
        return bits

    def accept(self, token: int) -> None:
        """The token was sampled."""
        if not self._matcher.is_error() and not self._matcher.is_stopped():
            self._matcher.consume_token(token)


class Grammars:
    """Compiles constraints for one model."""

    def __init__(self, tokenizer: str, vocab_size: int, stop_ids: Sequence[int]) -> None:
        """Reads the vocabulary: half a second for one of 150,000.

        Args:
            tokenizer: Tokenizer.json.
            vocab_size: Of the model.
            stop_ids: The tokens that end an answer.

        Raises:
            GrammarError: Llguidance is not installed, or cannot read this tokenizer.
        """
        try:
            import llguidance
        except ImportError:
            raise GrammarError(
                "this server has no constrained decoding: llguidance is not installed"
            ) from None
        self._library = llguidance
        self._vocab_size, self._stop_ids = vocab_size, sorted(stop_ids)
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer, n_vocab=vocab_size, eos_token=self._stop_ids
            )
        except ValueError as error:
            raise GrammarError(f"this server has no constrained decoding: {_line(error)}") from None

    def compile(self, kind: str, value: str) -> Grammar:
        """Returns the grammar at its start.

        Args:
            kind: One of KINDS.
            value: Its value.

        Raises:
            GrammarError: Malformed, or it has something that is not supported.
        """
        matcher = self._library.LLMatcher
        try:
            if kind == "json_schema":
                source = matcher.grammar_from_json_schema(value)
            elif kind == "regex":
                source = matcher.grammar_from_regex(value)
            else:
                source = matcher.grammar_from_lark(_Lark.of(json.loads(value)))
            made = matcher(self._tokenizer, source, log_level=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GrammarError(_line(error)) from None
        if made.is_error():
            raise GrammarError(_line(made.get_error()))
        return Grammar(made, self._vocab_size, self._stop_ids)


def _line(error: object) -> str:
    return " ".join(str(error).split())[:500]


class _Lark:
    """Writes a structural tag in llguidance's variant of Lark, a rule per format."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    @classmethod
    def of(cls, tag: Mapping[str, Any]) -> str:
        """The whole grammar; raises KeyError, TypeError or ValueError."""
        lark = cls()
        start = lark.rule(tag["format"])
        return "\n".join(["%llguidance {}", f"start: {start}", *lark.rules]) + "\n"

    def rule(self, form: Mapping[str, Any]) -> str:
        """Adds the rule of a format; returns its name."""
        write = self._FORMATS.get(form["type"])
        if write is None:
            raise GrammarError(
                f"format {form['type']!r}: not supported by this engine, expected one of "
                f"{', '.join(self._FORMATS)}"
            )
        return write(self, form)

    def _add(self, body: str, attributes: str = "", *, terminal: bool = False) -> str:
        name = f"{'T' if terminal else 'r'}{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _const(self, form: Mapping[str, Any]) -> str:
        return self._add(json.dumps(str(form["value"])))

    def _regex(self, form: Mapping[str, Any]) -> str:
        pattern = str(form["pattern"]).replace("/", r"\/")
        return self._add(f"/{pattern}/", terminal=True)

    def _json(self, form: Mapping[str, Any]) -> str:
        if form.get("style", "json") != "json":
            raise GrammarError(f"style {form['style']!r}: not supported by this engine")
        return self._add(f"%json {json.dumps(form['json_schema'])}")

    def _sequence(self, form: Mapping[str, Any]) -> str:
        return self._add(" ".join(self.rule(each) for each in form["elements"]))

    def _or(self, form: Mapping[str, Any]) -> str:
        return self._add(" | ".join(self.rule(each) for each in form["elements"]))

    def _optional(self, form: Mapping[str, Any]) -> str:
        return self._add(f"{self.rule(form['content'])}?")

    def _tag(self, form: Mapping[str, Any]) -> str:
        begin, content, end = form["begin"], form["content"], form["end"]
        before = [json.dumps(begin)] if begin else []
        if content["type"] == "any_text":  # up to the first end
            text = self._add(r"/(.|\n)*/", f"[suffix={json.dumps(end)}]")
            return self._add(" ".join([*before, text]))
        after = [json.dumps(end)] if end else []
        return self._add(" ".join([*before, self.rule(content), *after]))

    def _tags(self, form: Mapping[str, Any]) -> str:
        one = self._or({"elements": form["tags"]})
        if form.get("stop_after_first"):
            body = one
        else:
            separator = json.dumps(form["separator"]) if form["separator"] else ""
            body = f"{one} ({separator} {one})*"
        return self._add(body if form.get("at_least_one") else f"({body})?")

    _FORMATS: ClassVar[dict[str, Callable[[_Lark, Mapping[str, Any]], str]]] = {
        "const_string": _const,
        "json_schema": _json,
        "optional": _optional,
        "or": _or,
        "regex": _regex,
        "sequence": _sequence,
        "tag": _tag,
        "tags_with_separator": _tags,
    }
