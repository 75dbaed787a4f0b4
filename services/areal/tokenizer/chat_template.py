"""A model's chat template: renders messages as text, as transformers does.

Messages arrive in several forms: a call's arguments as an object or as JSON text, reasoning under
several names, keys that are None. They are brought into one form here, and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any

from areal.errors import InvalidInput
from areal.tokenizer.json_text import json_object, loads

if TYPE_CHECKING:
    import jinja2

Message = dict[str, Any]

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning; templates read the first or the second."""
# Most characters that a template may produce by repeating or padding.
_MOST = 10_000_000
# A width or precision of eight digits or more, or one that is given as a value.
_PRINTF = re.compile(r"%[-+ #0]*(?:\d*\.)?(?:\d{8,}|\*)")
_FORMAT = re.compile(r"\{[^{}]*:[^{}]*(?:\d{8,}|\{)")
_PADDING = ("center", "expandtabs", "ljust", "rjust", "zfill")
# Unicode's noncharacter: no text has it.
_MARK = "\ufdd0"
_QUESTION = {"role": "user", "content": "?"}


class ChatTemplate:
    """One compiled template; safe to share between coroutines."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles it.

        Args:
            source: Jinja source.
            special_tokens: Named tokens that the template may use (`bos_token`, `eos_token`, …).

        Raises:
            InvalidInput: The source is not Jinja.
        """
        self._special_tokens = dict(special_tokens)
        self._template, marks = _compile(source)
        self._marking = _compile(source, _MARK)[0] if marks else None

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """Returns the template's text.

        Args:
            messages: The conversation; see `Tokenizer.render_chat`.
            **variables: All other names that the template reads.

        Raises:
            InvalidInput: The messages are malformed, or the template refuses them.
        """
        return self._render(self._template, messages, variables)

    def render_marked(self, messages: Sequence[Message], **variables: Any) -> list[str]:
        """Returns the text, cut at the template's `{% generation %}` marks.

        Returns:
            Parts that join to what `render` returns; those with an odd index are marked. One part:
            the template has no marks.

        Raises:
            InvalidInput: As `render`, or a message contains the mark.
        """
        whole = self.render(messages, **variables)
        if self._marking is None:
            return [whole]
        parts = self._render(self._marking, messages, variables).split(_MARK)
        if "".join(parts) != whole:
            raise InvalidInput("messages: expected no character that marks the assistant's text")
        return parts

    def _render(
        self, template: jinja2.Template, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> str:
        plain = plain_messages(messages, self._takes_text)
        for message in plain:
            if message.get("tool_calls") and "content" not in message and self._needs_content:
                message["content"] = ""
        try:
            return self._fill(template, plain, variables)
        except InvalidInput as error:
            listed = (index for index, each in enumerate(plain) if _is_list(each.get("content")))
            if (index := next(listed, None)) is None:
                raise
            raise InvalidInput(
                f"messages[{index}].content: a list of parts, where the chat template may expect "
                f"text ({error})"
            ) from None

    def _fill(
        self, template: jinja2.Template, messages: list[Message], variables: Mapping[str, Any]
    ) -> str:
        import jinja2

        names = {"tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return template.render(
                **{**names, **self._special_tokens, **variables, "messages": messages}
            )
        except jinja2.TemplateError as error:
            raise InvalidInput(f"messages: the chat template refuses them: {error}") from None
        except Exception as error:  # the template is foreign code, and so are the messages
            raise InvalidInput(f"messages: do not fit the chat template: {error}") from None

    @cached_property
    def call_shown(self) -> str:
        """How an answer looks that calls the function `probe`; "": it has no place for calls."""
        arguments = '{"probe": "x"}' if self._takes_text else {"probe": "x"}
        text = self._shown(arguments, content="")
        try:
            prompt = self._fill(self._template, [_QUESTION], {"add_generation_prompt": True})
        except InvalidInput:
            prompt = ""
        return text.removeprefix(prompt).lstrip() if "probe" in text else ""

    @cached_property
    def shows_tools(self) -> bool:
        """Whether it has a place for tools."""
        schema = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
        probe = {"name": "areal_probe", "description": "?", "parameters": schema}
        tools = [{"type": "function", "function": probe}]
        try:
            text = self._fill(self._template, [_QUESTION], {"tools": tools})
        except InvalidInput:
            return True  # it takes tools otherwise than expected
        return "areal_probe" in text

    @cached_property
    def _takes_text(self) -> bool:
        """Whether it writes a call's arguments as they are (DeepSeek), so that they must be text.

        An object would end in an error there, or in Python's notation.
        """
        as_object = self._shown({"probe": "x"}, content="")
        as_text = '{"probe": "x"}'
        return "{'probe'" in as_object or (not as_object and bool(self._shown(as_text, content="")))

    @cached_property
    def _needs_content(self) -> bool:
        """Whether it reads the content of a turn that has none beside its calls (Qwen3)."""
        arguments = '{"probe": "x"}' if self._takes_text else {"probe": "x"}
        return not self._shown(arguments) and bool(self._shown(arguments, content=""))

    def _shown(self, arguments: Any, **content: str) -> str:
        """The text of a chat that ends with a call; "" if the template refuses it."""
        function = {"name": "probe", "arguments": arguments}
        call = {"id": "probe0000", "type": "function", "function": function}
        answer = {"role": "assistant", "tool_calls": [call], **content}
        try:
            return self._fill(self._template, [_QUESTION, answer], {})
        except InvalidInput:
            return ""


def _is_list(content: Any) -> bool:
    return isinstance(content, (list, tuple))


def plain_messages(messages: Any, arguments_as_text: bool = False) -> list[Message]:
    """Returns messages in the form in which templates read them.

    Keys whose value is None are left out, reasoning has the names that templates read, and the
    arguments of calls are objects.

    Args:
        messages: The conversation.
        arguments_as_text: Write arguments as JSON text instead; text stays as it is.

    Raises:
        InvalidInput: A message or a call in it is malformed.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidInput("messages: expected a list of {'role', 'content'} objects")
    return [
        _plain(message, f"messages[{index}]", arguments_as_text)
        for index, message in enumerate(messages)
    ]


def _plain(message: Any, where: str, as_text: bool) -> Message:
    if not isinstance(message, Mapping) or message.get("role") is None:
        raise InvalidInput(f"{where}: expected an object with 'role' and 'content'")
    if not isinstance(message["role"], str):
        raise InvalidInput(f"{where}.role: {message['role']!r:.80}, expected text")
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    if calls := plain.get("tool_calls"):
        if not isinstance(calls, (list, tuple)):
            raise InvalidInput(f"{where}.tool_calls: expected a list, got {type(calls).__name__}")
        plain["tool_calls"] = [
            _plain_call(call, f"{where}.tool_calls[{number}]", as_text)
            for number, call in enumerate(calls)
        ]
    return plain


def _plain_call(call: Any, where: str, as_text: bool) -> Message:
    if not isinstance(call, Mapping):
        raise InvalidInput(f"{where}: expected an object, got {type(call).__name__}")
    plain = {key: value for key, value in call.items() if value is not None}
    if not isinstance(function := plain.get("function"), Mapping):
        return _plain_function(plain, where, as_text)
    return {**plain, "function": _plain_function(function, f"{where}.function", as_text)}


def _plain_function(function: Mapping[str, Any], where: str, as_text: bool) -> Message:
    if "arguments" not in function:
        return dict(function)
    given = function["arguments"]
    arguments: Any = json_object(given, f"{where}.arguments")
    if as_text:
        written = isinstance(given, str) and given.strip()
        arguments = given if written else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": arguments}


def plain_tools(tools: Any) -> list[Message] | None:
    """Returns the JSON schemas of tools; each of them, and the list, may be JSON text.

    Raises:
        InvalidInput: It is not a list of objects.
    """
    if isinstance(tools, str):
        try:
            tools = loads(tools)
        except ValueError:
            raise InvalidInput(f"tools: not JSON: {tools[:80]!r}") from None
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise InvalidInput(f"tools: expected a list of JSON schemas, got {type(tools).__name__}")
    return [json_object(tool, f"tools[{number}]") for number, tool in enumerate(tools)]


def _check_size(operator: str, left: Any, right: Any) -> None:
    """Refuses repetitions, powers and formats whose results are large."""
    if operator == "%" and isinstance(left, str) and _PRINTF.search(left):
        _refuse_above(_MOST + 1)
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int):
                _refuse_above(len(value) * times)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _refuse_above(left.bit_length() * right)


def _check_call(text: str, method: str, values: Sequence[Any]) -> None:
    """Refuses methods of text that pad it to a large width."""
    if method == "format" and _FORMAT.search(text):
        _refuse_above(_MOST + 1)
    if method in _PADDING:
        for width in values:
            _refuse_above(width if isinstance(width, int) else 0)


def _refuse_above(size: int) -> None:
    import jinja2

    if size > _MOST:
        raise jinja2.TemplateError(f"it asks for {size:.3g} characters, expected at most {_MOST}")


def _padding(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's that refuses large widths."""

    @wraps(own)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_call("", "center", [*args, *kwargs.values()])
        if name == "format":
            _check_size("%", str(value), args)
        return own(value, *args, **kwargs)

    return checked


def _bounded() -> type[jinja2.Environment]:
    """Jinja's sandbox, with bounds on what a few characters of a template may ask for."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        """Refuses what takes gigabytes or hours for a few characters of template."""

        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_size(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            own = super().wrap_str_format(value)
            if own is None:
                return None

            def checked(*args: Any, **kwargs: Any) -> str:
                _check_call(value.__self__, "format", [])
                return own(*args, **kwargs)

            return checked

        def call(_self, _context: Any, _function: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
            text = getattr(_function, "__self__", None)
            if isinstance(text, str):
                _check_call(text, _function.__name__, [*args, *kwargs.values()])
            return super().call(_context, _function, *args, **kwargs)

    return Environment


def _compile(source: str, mark: str = "") -> tuple[jinja2.Template, int]:
    """The template, and the number of its `{% generation %}` marks.

    Templates come from strangers: sandboxed, and with the names that transformers gives them.

    `mark`: is written before and after assistant text.
    """
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols

    lines: list[int] = []

    class Generation(Extension):
        """`{% generation %}` marks assistant text for training masks."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's interface

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            lines.append(line)
            edge = nodes.Output([nodes.TemplateData(mark)], lineno=line)
            # What is set inside stays inside, as in transformers.
            return nodes.Scope([edge, *body, edge] if mark else body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = _bounded()(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    # Python's own are Jinja's toys for tests of web pages: `lipsum` makes text of any length.
    for name in ("cycler", "joiner", "lipsum"):
        del environment.globals[name]
    for name in ("center", "format", "indent"):
        environment.filters[name] = _padding(name, environment.filters[name])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source), len(lines)
    except jinja2.TemplateError as error:
        raise InvalidInput(f"chat template: {error}") from None
