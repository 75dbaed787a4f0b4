import json

import jinja2
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_torch.models import tiny


def test_make_tiny_model_when_loaded_then_is_a_complete_hugging_face_directory(tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    tiny.make_tiny_model(tmp_path, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) == 624_896
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tiny.END_ID
    names = {"config.json", "generation_config.json", "model.safetensors"}
    names |= {"tokenizer.json", "tokenizer_config.json"}
    assert {p.name for p in tmp_path.iterdir()} == names
    again = tmp_path / "again"
    tiny.make_tiny_model(again, seed=1)
    assert (again / "model.safetensors").read_bytes() == (
        tmp_path / "model.safetensors"
    ).read_bytes()


def test_tokenizer_when_loaded_either_way_then_bytes_are_ids(tmp_path):
    tiny.save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    fast = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(tmp_path)
    assert fast.get_vocab_size() == len(auto) == tiny.VOCAB_SIZE
    assert (auto.eos_token_id, auto.pad_token_id) == (tiny.END_ID, tiny.PAD_ID)
    for text in ("12+34=", "  two\n\tspaces ", "é 漢 🙂", "don't 1234"):
        ids = list(text.encode())
        assert fast.encode(text).ids == ids
        assert auto.encode(text) == ids
        assert fast.decode(ids) == auto.decode(ids) == text
    assert fast.encode("<|user|>7<|end|>").ids == [tiny.USER_ID, 55, tiny.END_ID]
    assert auto.decode([55, tiny.END_ID], skip_special_tokens=True) == "7"


def test_make_tiny_model_when_texts_are_given_then_each_is_one_token_and_no_special_one(tmp_path):
    texts = ("<|tool|>", '<tool_call>{"name": "calc", "arguments": {"x": "', '"}}</tool_call>')
    tiny.make_tiny_model(tmp_path, texts=texts)
    said = f"<|user|>{texts[0]}1{texts[1]}2*3{texts[2]}<|end|>"
    ids = [tiny.USER_ID, 261, *b"1", 262, *b"2*3", 263, tiny.END_ID]
    for tokenizer in (
        Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
        AutoTokenizer.from_pretrained(tmp_path),
    ):
        encoded = tokenizer.encode(said)
        assert getattr(encoded, "ids", encoded) == ids
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert text == f"{texts[0]}1{texts[1]}2*3{texts[2]}"
    logits = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([ids])).logits
    assert logits.shape == (1, len(ids), 264)


def test_chat_template_when_rendered_then_costs_two_tokens_besides_the_text(tmp_path):
    tiny.save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    auto = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "7+8="}]
    ids = auto.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids == [tiny.USER_ID, *b"7+8=", tiny.ASSISTANT_ID]
    # A process without transformers renders the same from tokenizer_config.json.
    template = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    messages += [{"role": "assistant", "content": "15"}]
    text = jinja2.Environment(autoescape=False).from_string(template).render(messages=messages)
    assert text == "<|user|>7+8=<|assistant|>15<|end|>"
    assert auto.apply_chat_template(messages, tokenize=False) == text
