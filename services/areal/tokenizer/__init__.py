"""A tokenizer without torch: the `tokenizers` library and the model's chat template.

Reads what a Hugging Face model directory has (tokenizer.json, tokenizer_config.json,
chat_template.jinja, generation_config.json, config.json) and gives the same ids as transformers'
AutoTokenizer for tokenizers that have a tokenizer.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.errors import InvalidInput, PromptTooLong
from areal.model_directory import rope_of
from areal.tokenizer.chat_fields import refuse_left_out
from areal.tokenizer.chat_template import ChatTemplate, plain_tools

if TYPE_CHECKING:
    import tokenizers


_LARGE = 1 << 14


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
        chat_template: str | Mapping[str, str] | None = None,
        special_tokens: dict[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        vocab_size: int | None = None,
        longest: int | None = None,
    ) -> None:
        """Wraps a loaded tokenizer; most callers want `load`.

        Args:
            backend: The `tokenizers` object.
            chat_template: Jinja source, or several by name, of which `tool_use` is for chats with
                tools and `default` for all others; None if the model has none.
            special_tokens: Named tokens that the template may use (`bos_token`, `eos_token`, …).
            eos_token_ids: Every id that ends a generation; the tokenizer's own first.
            vocab_size: Ids that the model accepts; default: those that the tokenizer knows.
            longest: The most tokens that the model takes; None: unknown.
        """
        self.backend = backend
        named = (
            {"default": chat_template} if isinstance(chat_template, str) else chat_template or {}
        )
        self.chat_template = named.get("default") or next(iter(named.values()), None)
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = list(eos_token_ids)
        self.vocab_size = vocab_size or backend.get_vocab_size(with_added_tokens=True)
        self.longest = longest
        self._templates = {
            name: ChatTemplate(source, self.special_tokens) for name, source in named.items()
        }
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
        model_dir = model_dir or tokenizer_dir
        model_file, generation_file = (
            model_dir / "config.json",
            model_dir / "generation_config.json",
        )
        model, generation = _read_json(model_file), _read_json(generation_file)
        eos = []
        own = special_tokens.get("eos_token")
        if own is not None and (own_id := backend.token_to_id(own)) is not None:
            eos.append(own_id)
        for file, source in ((generation_file, generation), (model_file, model)):
            eos += _end_ids(file, source.get("eos_token_id"))
        text_config = {**model, **(model.get("text_config") or {})}
        known = model.get("vocab_size") or text_config.get("vocab_size")
        if known is not None and not isinstance(known, int):
            raise InvalidInput(f"{str(model_file)!r}: vocab_size {known!r:.80}: expected a number")
        try:
            longest = longest_input(text_config)
        except InvalidInput as error:
            raise InvalidInput(f"{str(model_file)!r}: {error}") from None
        return cls(
            backend,
            chat_template=_chat_templates(tokenizer_dir, config.get("chat_template")),
            special_tokens=special_tokens,
            eos_token_ids=list(dict.fromkeys(eos)),
            vocab_size=known,
            longest=longest,
        )

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-sequence token; None if it has none."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def is_special(self, token_id: int) -> bool:
        """Whether a token never occurs in ordinary text (`<|im_end|>`)."""
        return token_id in self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Converts text to ids, including special tokens that the tokenizer puts around a text.

        Half of a surrogate pair, as in file names that are not UTF-8, is read as U+FFFD.
        """
        try:
            return self._encode(text, add_special_tokens)
        except TypeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int]
        if len(text) < _LARGE:
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # only a batch releases the interpreter's lock, which the event loop waits for
            [whole] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = whole.ids
        return ids

    def refuse_longer(self, texts: Sequence[str], most: int) -> None:
        """Raises an error if texts have certainly more tokens than a prompt may have.

        It takes no more time and memory than the encoding of about twice as many tokens, however
        long the texts are. Texts that are refused by their length alone are not encoded at all.

        Args:
            texts: The texts of a prompt.
            most: The most tokens that the model takes.

        Raises:
            PromptTooLong: They are too long.
        """
        size = sum(map(len, texts))
        if size <= most:
            return
        if size > most * self._longest_token:
            raise PromptTooLong(
                f"messages: {size} characters leave no room in a context of {most} tokens",
                tokens=math.ceil(size / self._longest_token),
                limit=most,
            )
        # Each cut, and each edge of two texts, can be a token less than in the whole prompt.
        bound, reach = most + 2 * len(texts) + 16, 2 * most
        while True:
            head = "".join(_first(texts, reach))
            found = len(self.encode(head, add_special_tokens=False))
            if found > bound:
                raise PromptTooLong(
                    f"messages: {size} characters are more than {most} tokens, which leaves no "
                    "room in the model's context",
                    tokens=found,
                    limit=most,
                )
            if reach >= size:
                return
            reach *= 2

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token; at least 16, as some normalizers drop characters."""
        return max(16, *map(len, self.backend.get_vocab(with_added_tokens=True)))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Converts ids to text."""
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_batch(
        self, batch: Sequence[Sequence[int]], *, skip_special_tokens: bool = False
    ) -> list[str]:
        """Converts each sequence of ids to text."""
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
            messages: {"role", "content", …}; keys whose value is None are left out, and a call's
                arguments may be an object or its JSON text.
            add_generation_prompt: End with the header of an assistant's answer.
            tools: JSON schemas offered to the model, or their JSON text.
            **variables: More names for the template (`enable_thinking=False`).

        Raises:
            InvalidInput: There is no template, messages or tools are malformed, or the template
                refuses them.
        """
        tools = plain_tools(tools)
        return self._template(tools).render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )

    def render_marked(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[str]:
        """Returns the template's text of a conversation, cut at its `{% generation %}` marks.

        Returns:
            Parts that join to what `render_chat` renders; those with an odd index are marked. One
            part: the template has no marks.

        Raises:
            InvalidInput: As `render_chat`, or a message contains the mark.
        """
        tools = plain_tools(tools)
        return self._template(tools).render_marked(messages, tools=tools)

    def check_chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """Raises an error if the chat template leaves out a part of a row's chat.

        Raises:
            InvalidInput: As `render_chat`, or the template has no place for the tools, a role, a
                call, reasoning or a text; the message names the field.
        """
        refuse_left_out(
            lambda chat, offered: self._template(offered).render(chat, tools=offered),
            messages,
            tools,
        )

    @property
    def call_shown(self) -> str:
        """How the chat template writes a call of `probe`; "" if there is no place for calls."""
        template = self._with_tools
        return "" if template is None else template.call_shown

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        template = self._with_tools
        return template is not None and template.shows_tools

    @property
    def _with_tools(self) -> ChatTemplate | None:
        return self._templates.get("tool_use") or self._templates.get("default")

    def _template(self, tools: Sequence[dict[str, Any]] | None) -> ChatTemplate:
        """The one that transformers would choose."""
        if not self._templates:
            raise InvalidInput("messages: this tokenizer has no chat template; use a 'prompt'")
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidInput(
                f"chat template: none is named {name!r}, expected one beside "
                f"{', '.join(sorted(self._templates))}"
            )
        return self._templates[name]

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Returns the ids of a conversation; arguments and errors are those of `render_chat`."""
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )
        return self.encode(text, add_special_tokens=False)


def _first(texts: Sequence[str], count: int) -> Iterator[str]:
    """The first characters of texts."""
    for text in texts:
        if count <= 0:
            return
        yield text[:count]
        count -= len(text)


def longest_input(config: Mapping[str, Any]) -> int | None:
    """Returns the most tokens that a model takes; None: its config.json does not say.

    Args:
        config: The model's config, that of the text part if it has several.
    """
    known = config.get("max_position_embeddings") or config.get("n_positions")
    rope = rope_of(config)
    if not isinstance(known, int) or not isinstance(rope, Mapping):
        return known if isinstance(known, int) else None
    # These stretch the positions that the config names; other kinds name the stretched ones.
    kind = rope.get("rope_type") or rope.get("type")
    factor = rope.get("factor") if kind in ("yarn", "linear") else 1
    return int(known * max(1.0, float(factor or 1)))


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))  # Infinity, too, which Mamba's configs have
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{str(file)!r}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{str(file)!r}: expected a JSON object")
    return value


def _read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{str(file)!r}: byte {error.start} is not UTF-8: expected a text in UTF-8"
        ) from None


def _end_ids(file: Path, value: Any) -> list[int]:
    """What `eos_token_id` names in a file of the model: one id, several, or none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) for each in ids):
        raise InvalidInput(f"{str(file)!r}: eos_token_id {value!r:.80}: expected an id, or a list")
    return [int(each) for each in ids]


def _token_text(value: Any) -> str | None:
    """A token is written as a string or as {"content": "…"}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_templates(folder: Path, configured: Any) -> str | dict[str, str] | None:
    """Returns one template, or several by name: from files if there are any, or the config."""
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    named = {file.stem: _read_text(file) for file in files}
    if (file := folder / "chat_template.jinja").is_file():
        named["default"] = _read_text(file)
    if named:
        return named
    if isinstance(configured, list):
        configured = {
            each.get("name"): each.get("template") for each in configured if isinstance(each, dict)
        }
    if isinstance(configured, dict):
        return {str(k): v for k, v in configured.items() if isinstance(v, str)}
    return configured if isinstance(configured, str) else None
