import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from areal.errors import InvalidInput
from areal.tokenizer import Tokenizer, longest_input
from areal_torch.models.tiny import ASSISTANT_ID, END_ID, USER_ID, save_tokenizer

CHAT_ML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = """\
{%- if tools %}
  {{- '<|im_start|>system\\n# Tools\\n' }}
  {%- for tool in tools %}
    {%- if not tool.name %}{% continue %}{% endif %}
    {{- tool | tojson }}{{ '\\n' }}
  {%- endfor %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {%- generation %}{{ message.content }}{{ eos_token }}{%- endgeneration %}
  {%- elif message.role == 'user' %}
    {{- message.content | trim }}
  {%- else %}
    {{- raise_exception('unexpected role ' + message.role) }}
  {%- endif %}
{%- endfor %}
"""
MESSAGES = [
    {"role": "user", "content": "What is 12+34?\n"},
    {"role": "assistant", "content": "46 <é>", "name": None},
    {"role": "user", "content": "Sure? 数学"},
]


def bpe_directory(path: Path, template: str, *, jinja_file: bool = False) -> Path:
    """A trained byte-level BPE tokenizer with ChatML tokens, as SmolLM2 has."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["what is the answer to this question", "You are helpful"], trainer)
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<|im_start|>", "special": True},
        "eos_token": "<|im_end|>",
    }
    if jinja_file:
        (path / "chat_template.jinja").write_text(template)
    else:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("template", "jinja_file"), [(CHAT_ML, False), (CHAT_ML, True), (TOOLS, False)]
)
def test_chat_template_when_rendered_then_equals_transformers(tmp_path, template, jinja_file):
    path = bpe_directory(tmp_path / "m", template, jinja_file=jinja_file)
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    tools = [{"name": "add", "text": "<b>&é"}, {"text": "no name"}] if template is TOOLS else None
    for generation in (True, False):
        got = ours.apply_chat_template(MESSAGES, add_generation_prompt=generation, tools=tools)
        expected = theirs.apply_chat_template(
            MESSAGES, add_generation_prompt=generation, tools=tools, return_dict=False
        )
        assert got == list(expected)
        assert ours.decode(got) == theirs.decode(got)
        assert ours.decode(got, skip_special_tokens=True) == theirs.decode(
            got, skip_special_tokens=True
        )
    text = "the question is <|im_end|> 12,5 naïve\t数"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_token_id == theirs.eos_token_id


def test_tiny_model_when_loaded_then_equals_transformers(tmp_path):
    save_tokenizer(tmp_path)
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "12+34="}]
    ids = ours.apply_chat_template(messages)
    assert ids == [USER_ID, *b"12+34=", ASSISTANT_ID]
    assert ids == list(
        theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    )
    assert ours.eos_token_ids == [END_ID]
    assert ours.vocab_size == len(theirs) == 261
    assert ours.decode_batch([[52, 54, END_ID], []], skip_special_tokens=True) == ["46", ""]


def test_eos_when_several_files_name_some_then_all_are_kept(tmp_path):
    path = bpe_directory(tmp_path / "t", CHAT_ML)
    model = tmp_path / "model"
    model.mkdir()
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (model / "config.json").write_text('{"eos_token_id": 5, "vocab_size": 512}')
    tokenizer = Tokenizer.load(path, model)
    assert tokenizer.eos_token_ids == [2, 0, 5]
    assert tokenizer.vocab_size == 512


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("hello", "a list of"),
        ([], "a list of"),
        (["hello"], r"messages\[0\]"),
        ([{"role": "user", "content": "x"}, {"content": "x"}], r"messages\[1\]"),
        ([{"role": "tool", "content": "x"}], "unexpected role tool"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": 5}], None),
        ([{"role": [], "content": "1"}], r"messages\[0\].role: \[\], expected text"),
    ],
)
def test_chat_template_when_messages_are_malformed_then_names_them(tmp_path, messages, expected):
    tokenizer = Tokenizer.load(bpe_directory(tmp_path / "m", TOOLS))
    if expected is None:
        assert tokenizer.apply_chat_template(messages)
        return
    with pytest.raises(InvalidInput, match=expected):
        tokenizer.apply_chat_template(messages)


def test_chat_template_when_content_does_not_fit_then_invalid_input(tmp_path):
    save_tokenizer(tmp_path)
    with pytest.raises(InvalidInput, match="do not fit the chat template"):
        Tokenizer.load(tmp_path).apply_chat_template([{"role": "user", "content": 5}])


def test_chat_template_when_hostile_then_sandboxed(tmp_path):
    path = bpe_directory(tmp_path / "m", "{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidInput, match="refuses"):
        Tokenizer.load(path).apply_chat_template(MESSAGES)


def test_load_when_a_file_is_missing_or_broken_then_names_it(tmp_path):
    with pytest.raises(InvalidInput, match=r"tokenizer\.json' does not exist"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"tokenizer\.json'"):
        Tokenizer.load(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(InvalidInput, match=r"config\.json': not JSON"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("chat_template.jinja", b"\xe9", r"chat_template\.jinja': byte 0 is not UTF-8"),
        ("additional_chat_templates/x.jinja", b"a\xe9", r"x\.jinja': byte 1 is not UTF-8"),
        ("tokenizer_config.json", b"\xff\xfe{", r"tokenizer_config\.json': byte 0 is not UTF-8"),
        ("generation_config.json", b'{"eos_token_id": [5, null]}', r"eos_token_id \[5, None\]: ex"),
        ("config.json", b'{"eos_token_id": "<eos>"}', "eos_token_id '<eos>': expected an id"),
        ("config.json", b'{"eos_token_id": [[5]]}', r"config\.json': eos_token_id \[\[5\]\]"),
        ("config.json", b'{"vocab_size": "512"}', "vocab_size '512': expected a number"),
        (
            "config.json",
            b'{"rope_parameters": {"rope_type": "default"}, '
            b'"rope_scaling": {"type": "linear", "factor": 2.0}}',
            r"config\.json': rope_parameters=.* and rope_scaling=.* differ",
        ),
    ],
)
def test_load_when_a_strangers_file_has_another_form_then_one_line_names_it(
    tmp_path, file, content, said
):
    save_tokenizer(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InvalidInput, match=said) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_load_when_the_config_has_infinity_then_read_as_transformers_does(tmp_path):
    save_tokenizer(tmp_path)
    config = '{"time_step_limit": [0.0, Infinity], "vocab_size": 300, "max_position_embeddings": 9}'
    (tmp_path / "config.json").write_text(config)
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.vocab_size, loaded.longest) == (300, 9)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 2000),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}}, 2000),
        (  # said twice, for two releases of transformers
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0},
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_theta": 5.0,
            },
            2000,
        ),
        (  # transformers would take another base
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            None,
        ),
    ],
)
def test_longest_input_when_the_rope_is_said_twice_then_it_must_be_the_same(config, expected):
    config = {"max_position_embeddings": 1000, **config}
    if expected is None:
        with pytest.raises(InvalidInput, match="expected only one of them"):
            longest_input(config)
    else:
        assert longest_input(config) == expected


def test_tokenizer_when_used_then_imports_no_torch(tmp_path):
    save_tokenizer(tmp_path)
    code = (
        "import sys; from pathlib import Path; from areal.tokenizer import Tokenizer\n"
        f"t = Tokenizer.load(Path({str(tmp_path)!r}))\n"
        "assert t.apply_chat_template([{'role': 'user', 'content': 'x'}])\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    services = Path(__file__).parents[3] / "services"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(services)}, timeout=60
    )
