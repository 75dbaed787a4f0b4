"""A tokenizer without torch: the `tokenizers` library and the model's chat template.

Reads what a Hugging Face model directory has (tokenizer.json, tokenizer_config.json,
chat_template.jinja, generation_config.json, config.json) and gives the same ids as transformers'
AutoTokenizer for tokenizers that have a tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from areal.errors import InvalidInput

if TYPE_CHECKING:
    import jinja2
    import tokenizers


# Unicode's noncharacter: no text has it.
_MARK = "\ufdd0"


class Tokenizer:
    """Text to ids and back; safe to share between coroutines.

    Example:
        >>> tokenizer = Tokenizer.load(Path("runs/x/model"))
        >>> tokenizer.apply_chat_template([{"role": "user", "content": "12+34="}])
        [257, 49, 50, 43, 51, 52, 61, 258]
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        """Wraps a loaded tokenizer; most callers want `load`.

        Args:
            backend: The `tokenizers` object.
            chat_template: Jinja source; None if the model has none.
            special_tokens: Named tokens that the template may use (`bos_token`, `eos_token`, …).
            eos_token_ids: Every id that ends a generation; the tokenizer's own first.
            vocab_size: Ids that the model accepts; default: those that the tokenizer knows.
        """
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = list(eos_token_ids)
        self.vocab_size = vocab_size or backend.get_vocab_size(with_added_tokens=True)
        self._template = _compile(chat_template) if chat_template else None
        self._marking = (
            _compile(chat_template, mark=_MARK)
            if chat_template and "generation %}" in chat_template.replace("-%}", " %}")
            else None
        )
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)

    @classmethod
    def load(cls, tokenizer_dir: Path, model_dir: Path | None = None) -> Tokenizer:
        """Reads a tokenizer.

        Args:
            tokenizer_dir: Where tokenizer.json is.
            model_dir: Where config.json and generation_config.json are; default: the same.

        Raises:
            InvalidInput: A file is missing or malformed.
        """
        import tokenizers

        file = tokenizer_dir / "tokenizer.json"
        if not file.is_file():
            raise InvalidInput(f"tokenizer {str(file)!r} does not exist")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust library raises bare Exception
            raise InvalidInput(f"tokenizer {str(file)!r}: {error}") from None
        backend.no_padding()
        backend.no_truncation()
        config = _read_json(tokenizer_dir / "tokenizer_config.json")
        named = {**_read_json(tokenizer_dir / "special_tokens_map.json"), **config}
        special_tokens = {
            key: text
            for key, value in named.items()
            if key.endswith("_token") and (text := _token_text(value)) is not None
        }
        template_file = tokenizer_dir / "chat_template.jinja"
        if template_file.is_file():
            template: str | None = template_file.read_text()
        else:
            template = _default_template(config.get("chat_template"))
        model_dir = model_dir or tokenizer_dir
        model = _read_json(model_dir / "config.json")
        generation = _read_json(model_dir / "generation_config.json")
        eos = []
        own = special_tokens.get("eos_token")
        if own is not None and (own_id := backend.token_to_id(own)) is not None:
            eos.append(own_id)
        for source in (generation, model):
            value = source.get("eos_token_id")
            eos += value if isinstance(value, list) else [value] if value is not None else []
        text_config = model.get("text_config") or {}
        return cls(
            backend,
            chat_template=template,
            special_tokens=special_tokens,
            eos_token_ids=list(dict.fromkeys(int(e) for e in eos)),
            vocab_size=model.get("vocab_size") or text_config.get("vocab_size"),
        )

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-sequence token; None if it has none."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def is_special(self, token_id: int) -> bool:
        """Whether a token never occurs in ordinary text (`<|im_end|>`)."""
        return token_id in self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Converts text to ids, including special tokens that the tokenizer puts around a text."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Ids to text."""
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_batch(
        self, batch: Sequence[Sequence[int]], *, skip_special_tokens: bool = False
    ) -> list[str]:
        """Ids to text, for many."""
        # One by one: the library's own batch call wakes a pool of threads, which costs more.
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in batch]

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Returns the chat template's text.

        Args:
            messages: {"role", "content", …}; keys whose value is None are left out.
            add_generation_prompt: End with the header of an assistant's answer.
            tools: JSON schemas offered to the model.
            **variables: More names for the template (`enable_thinking=False`).

        Raises:
            InvalidInput: There is no template, messages are malformed, or the template refuses
                them.
        """
        return self._render(
            self._template,
            messages,
            tools=list(tools) if tools is not None else None,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

    def _render(
        self,
        template: jinja2.Template | None,
        messages: Sequence[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        import jinja2

        if template is None:
            raise InvalidInput("messages: this tokenizer has no chat template; use a 'prompt'")
        if isinstance(messages, (str, dict)) or not messages:
            raise InvalidInput("messages: expected a list of {'role', 'content'} objects")
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or "role" not in message:
                raise InvalidInput(
                    f"messages[{index}]: expected an object with 'role' and 'content'"
                )
        plain = [{k: v for k, v in message.items() if v is not None} for message in messages]
        try:
            return template.render(
                messages=plain,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens, **variables},
            )
        except jinja2.TemplateError as error:
            raise InvalidInput(f"messages: the chat template refuses them: {error}") from None
        except TypeError as error:
            raise InvalidInput(f"messages: do not fit the chat template: {error}") from None

    def render_marked(self, messages: Sequence[dict[str, Any]]) -> list[str]:
        """Returns the template's text of a conversation, cut at its `{% generation %}` marks.

        Returns:
            Parts that join to what `render_chat` renders; those with an odd index are marked. One
            part: the template has no marks.

        Raises:
            InvalidInput: As `render_chat`, or a message contains the mark.
        """
        if self._marking is None:
            return [self.render_chat(messages, add_generation_prompt=False)]
        parts = self._render(self._marking, messages).split(_MARK)
        if "".join(parts) != self._render(self._template, messages):
            raise InvalidInput("messages: expected no character that marks the assistant's text")
        return parts

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Ids of a conversation; arguments and errors as `render_chat`."""
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )
        return self.encode(text, add_special_tokens=False)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"{str(file)!r}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{str(file)!r}: expected a JSON object")
    return value


def _token_text(value: Any) -> str | None:
    """A token is written as a string or as {"content": "…"}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _default_template(value: Any) -> str | None:
    """One template, or a list of named ones, of which "default" counts."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _compile(source: str, mark: str = "") -> jinja2.Template:
    """Templates come from strangers: sandboxed, and with the names that transformers gives them.

    `mark`: is written before and after assistant text.
    """
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks assistant text for training masks."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's interface

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            edge = nodes.Output([nodes.TemplateData(mark)], lineno=line)
            return [edge, *body, edge] if mark else body

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

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise InvalidInput(f"chat template: {error}") from None
