"""The plain back end computes what transformers computes, whatever else runs beside a request."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from tests.inference_server import make_model
from tests.integration.test_models_page import rows_of_the_page
from tests.unit.areal_inference.plain_rig import TOLERANCE, ask, finish, read, serve, worst
from tests.unit.areal_torch.engines.tiny_families import saved
from tools.gen_models import RIGHT

from areal.weights.manifest import build_manifest
from areal_inference.api import Limits, RequestError, parse_generate, render
from areal_inference.config import InferenceConfig
from areal_inference.frontend import read_model
from areal_inference.model import plain_cache
from areal_inference.model.config import ModelConfig, ModelError
from areal_inference.model.plain import PlainConfig, PlainModel
from areal_inference.model.weights import WeightError, load_weights
from areal_torch.engines.model import guards
from areal_torch.engines.model.routes import Routes

pytestmark = pytest.mark.filterwarnings("ignore")
# One of each kind of layer and of checkpoint.
EACH_TIME = {"qwen3_5", "qwen3_moe", "gemma3", "gemma4", "lfm2", "mamba", "zamba2"}

# With a cache, transformers 5.23 computes other logits, too, when it generates.
WRONG_CACHES = {"nemotron_h", "zamba2"}


def families() -> list[Any]:
    return [
        pytest.param(row.model_type, marks=[pytest.mark.long] * (row.model_type not in EACH_TIME))
        for row in rows_of_the_page()
        if row.result == RIGHT
    ]


def prompts(hf: Any) -> list[list[int]]:
    """Of several lengths, two of one; without tokens that stand for images."""
    reserved = guards.placeholders(hf.config)
    drawn = [[(7 * at + 3 * i) % 96 for i in range(at)] for at in (5, 9, 1, 12, 5)]
    drawn[4] = [token + 1 for token in drawn[4]]
    return [[3 if token in reserved else token for token in ids] for ids in drawn]


@pytest.mark.parametrize("kind", families())
@torch.inference_mode()
def test_logprobs_when_requests_come_share_and_are_retracted_then_those_of_transformers(
    tmp_path: Path, kind: str
) -> None:
    hf = saved(kind, tmp_path)
    scheduler = serve(tmp_path)
    assert scheduler.runner.model._keeps == (kind not in WRONG_CACHES)
    requests = [
        ask(ids, 4 + 3 * sample, seed=10 * number + sample)
        for number, ids in enumerate(prompts(hf))
        for sample in range(3)
    ]
    for request in requests[:8]:
        scheduler.submit(request)
    for _ in range(2):
        scheduler.step()
    for request in requests[8:]:  # some share a prompt whose first request is ahead by now
        scheduler.submit(request)
    scheduler.submit(late := ask(prompts(hf)[0], 5, seed=99))
    scheduler.step()
    scheduler._retract(scheduler.running[1])
    finish(scheduler)
    reserved = guards.placeholders(hf.config)
    whole = [each for each in (*requests, late) if not set(each.output_ids) & set(reserved)]
    assert len(whole) > len(requests) // 2
    assert all(each.finish == {"type": "length", "length": len(each.output_ids)} for each in whole)
    assert scheduler.stats.cached_tokens > 0
    assert worst(hf, whole) <= TOLERANCE


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    plan=st.lists(
        st.tuples(
            st.integers(0, 3),  # which prompt
            st.integers(1, 6),  # new tokens
            st.integers(0, 3),  # steps before the next one comes
            st.sampled_from(["", "", "retract", "pause", "abort", "flush"]),
        ),
        min_size=2,
        max_size=8,
    )
)
@torch.inference_mode()
def test_logprobs_when_anything_happens_beside_them_then_those_of_transformers(
    hybrid: tuple[Any, Path], plan: list[tuple[int, int, int, str]]
) -> None:
    hf, folder = hybrid
    scheduler = serve(folder, max_running=4)
    asked = []
    for number, (prompt, new, steps, event) in enumerate(plan):
        asked.append(ask([[5], [7, 8], [9, 10], [5, 6, 7]][prompt], new, seed=number))
        scheduler.submit(asked[-1])
        for _ in range(steps):
            scheduler.step()
        if event == "retract" and scheduler.running:
            scheduler._retract(scheduler.running[number % len(scheduler.running)])
        elif event == "pause":
            scheduler.pause("retract")
            scheduler.resume()
        elif event == "abort":
            scheduler.abort({asked[number // 2].rid}, "Aborted")
        elif event == "flush":
            scheduler.flush()
    finish(scheduler)
    done = [each for each in asked if each.output_ids]
    assert all(each.finish for each in asked)
    if done:
        assert worst(hf, done) <= TOLERANCE


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model with convolutions and attention."""
    folder = tmp_path_factory.mktemp("lfm2")
    return saved("lfm2", folder), folder


@torch.inference_mode()
def test_prompt_logprobs_when_asked_then_those_of_transformers(hybrid: tuple[Any, Path]) -> None:
    hf, folder = hybrid
    scheduler = serve(folder)
    request = ask([5, 6, 7, 8, 9], 2, logprob_start=1, top_logprobs=3)
    scheduler.submit(request)
    finish(scheduler)
    logprobs = hf(input_ids=torch.tensor([request.input_ids])).logits[0].log_softmax(-1)
    wanted = [float(logprobs[at - 1, request.input_ids[at]]) for at in (2, 3, 4)]
    assert request.input_logprobs == pytest.approx(wanted, abs=TOLERANCE)
    assert request.input_top_logprobs is not None
    for at, found in zip((2, 3, 4), request.input_top_logprobs, strict=True):
        assert [i for _, i in found] == logprobs[at - 1].topk(3).indices.tolist()


@torch.inference_mode()
def test_cache_when_it_mixes_up_sequences_then_each_token_is_computed_from_its_whole_sequence(
    hybrid: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, folder = hybrid
    right = plain_cache._picked

    def mixed(parts: list[Any]) -> Any:
        return right([(cache, size, torch.zeros_like(at)) for cache, size, at in parts])

    monkeypatch.setattr(plain_cache, "_picked", mixed)
    with capture_logs() as logs:
        scheduler = serve(folder)
    assert not scheduler.runner.model._keeps
    (line,) = [each for each in logs if each["event"] == "plain_decoder"]
    assert "its cache gives other logits" in line["tokens"]
    requests = [ask([5, 6, 7][: 1 + seed % 3], 4, seed=seed) for seed in range(5)]
    for request in requests:
        scheduler.submit(request)
    finish(scheduler)
    assert worst(hf, requests) <= TOLERANCE


# ------------------------------------------------------------------ weights


@torch.inference_mode()
def test_update_when_swapped_between_steps_then_later_tokens_are_of_the_new_weights(
    tmp_path: Path,
) -> None:
    old, new = saved("qwen3_moe", tmp_path / "0"), saved("qwen3_moe", tmp_path / "1", scale=1.3)
    scheduler = serve(tmp_path / "0")
    config = scheduler.runner.model._skeleton
    first, second = ask([5, 6, 7], 4, seed=1), ask([5, 6, 7], 4, seed=2)
    scheduler.submit(first)
    finish(scheduler)
    held = scheduler.runner.model.weights
    plain, _ = read(tmp_path / "1")
    fresh = load_weights(str(tmp_path / "1"), plain, torch.float32, held=held)
    scheduler.set_weights(fresh, "1")
    scheduler.submit(second)
    finish(scheduler)
    assert worst(old, [first]) <= TOLERANCE
    assert worst(new, [second]) <= TOLERANCE
    assert worst(old, [second]) > 100 * TOLERANCE
    assert config.hf is scheduler.runner.model._hf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checksums_when_a_composite_is_loaded_then_those_of_its_published_version(
    tmp_path: Path, dtype: str
) -> None:
    saved("qwen3_5", tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    config, _ = read(tmp_path, dtype)
    # As a trainer publishes it: some tensors stay float32, towers as they came.
    types = {name: view.dtype for name, view in config.allocate().views.items()}
    assert types.keys() == tensors.keys()
    save_file({n: t.to(types[n]).contiguous() for n, t in tensors.items()}, file)
    if dtype == "bfloat16":
        assert {torch.float32, torch.bfloat16} == set(types.values())
        assert types["model.language_model.layers.0.linear_attn.A_log"] is torch.float32
    weights = load_weights(str(tmp_path), config, getattr(torch, dtype))
    manifest = build_manifest(tmp_path, 0, 0)
    assert weights.checksums() == {each.name: each.digest for each in manifest.tensors}
    assert weights.digest() == manifest.digest


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "nan", "tower"])
def test_update_when_it_is_not_this_model_then_one_line_names_the_tensor(
    tmp_path: Path, fault: str
) -> None:
    saved("qwen3_5", tmp_path / "0")
    saved("qwen3_5", tmp_path / "1")
    (file,) = (tmp_path / "1").glob("*.safetensors")
    tensors = load_file(file)
    name = "model.language_model.layers.0.linear_attn.A_log"
    tower = next(each for each in tensors if "visual" in each)
    if fault == "missing":
        del tensors[name]
    elif fault == "unknown":
        tensors[name := f"{name}.more"] = torch.zeros(2)
    elif fault == "shape":
        tensors[name] = torch.zeros(99)
    elif fault == "nan":
        tensors[name][0] = float("nan")
    else:
        del tensors[name := tower]
    save_file(tensors, file)
    config, _ = read(tmp_path / "0")
    with pytest.raises(WeightError) as caught:
        load_weights(str(tmp_path / "1"), config, torch.float32)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_when_released_then_nothing_holds_them_until_others_are_loaded(
    hybrid: tuple[Any, Path],
) -> None:
    hf, folder = hybrid
    scheduler = serve(folder)
    model = scheduler.runner.model
    assert scheduler.release(frozenset({"kv_cache", "weights"}))
    assert all(tensor.is_meta for tensor in model._hf.parameters())
    assert model.weights.views == {}
    scheduler.regain(frozenset({"kv_cache", "weights"}))
    config, fresh = read(folder)
    scheduler.set_weights(fresh, "1")
    scheduler.submit(request := ask([5, 6, 7], 3))
    finish(scheduler)
    assert worst(hf, [request]) <= TOLERANCE
    assert config.architecture == type(hf).__name__


def test_tied_head_when_repeated_then_it_has_to_be_the_embedding(tmp_path: Path) -> None:
    saved("gemma", tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    config, _ = read(tmp_path)
    assert "lm_head.weight" not in config.shapes
    tensors["lm_head.weight"][0, 0] += 1.0
    save_file(tensors, file)
    with pytest.raises(WeightError, match=r"tensor lm_head.weight differs from model.embed_tokens"):
        load_weights(str(tmp_path), config, torch.float32)


# ------------------------------------------------------------------ which models


def chosen(folder: Path) -> Any:
    return read_model(InferenceConfig(model_path=str(folder)))


def test_model_when_the_fast_decoder_knows_it_then_it_serves_else_transformers(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "fast")
    assert isinstance(chosen(tmp_path / "fast"), ModelConfig)
    hf = saved("qwen3_moe", tmp_path / "plain")
    plain = chosen(tmp_path / "plain")
    assert isinstance(plain, PlainConfig)
    assert plain.architecture == type(hf).__name__
    assert plain.vocab_size == 96
    assert plain.max_position_embeddings == 128
    assert plain.eos_token_ids == {2}


@torch.inference_mode()
def test_model_when_the_fast_decoder_lacks_an_option_then_transformers_serves_it(
    tmp_path: Path,
) -> None:
    hf = make_model(
        tmp_path, "llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    )
    assert isinstance(chosen(tmp_path), PlainConfig)
    scheduler = serve(tmp_path)
    scheduler.submit(request := ask([5, 6, 7], 6))
    finish(scheduler)
    assert worst(hf, [request]) <= TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"model_type": 7}, "transformers cannot read it"),
        ({"model_type": None}, "transformers cannot read it"),
        ({"num_hidden_layers": "x"}, "transformers cannot read it"),
        ({"vocab_size": None}, "has shape"),
        ({"text_config": 3}, "config.json"),
        ({"auto_map": {"AutoConfig": "m.C"}, "model_type": "own"}, "transformers cannot read it"),
        ({"architectures": ["Qwen3MoeForSequenceClassification"]}, "makes a Qwen3MoeForCausalLM"),
        ({"hidden_size": 36}, "has shape"),
    ],
)
def test_model_when_transformers_cannot_serve_it_then_one_line_says_why(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    saved("qwen3_moe", tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text()) | change
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    with pytest.raises(ModelError) as caught:
        load_weights(str(tmp_path), chosen(tmp_path), torch.float32)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_model_when_transformers_is_not_installed_then_one_line_says_who_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"]}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"Qwen3MoeForCausalLM, expected .* need transformers: "):
        chosen(tmp_path)


def test_model_when_tokens_see_later_ones_then_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        initializer_range=0.3,
    )
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"BertLMHeadModel: .*(linear layer|later tokens)$"):
        PlainModel(*read(tmp_path))


def test_model_when_transformers_cannot_compute_it_then_one_line_says_so(tmp_path: Path) -> None:
    saved("rembert", tmp_path)  # an embedding of another width than its head
    with pytest.raises(ModelError, match=r"cannot compute it: mat1 and mat2 .*$") as caught:
        PlainModel(*read(tmp_path))
    assert "\n" not in str(caught.value)


def chosen_by(hf, request):
    """The experts that transformers chooses for a whole sequence, [tokens - 1, layers, k]."""
    routes = Routes(hf, guards.decoder_of(hf))
    ids = torch.tensor([request.input_ids + request.output_ids[:-1]])
    with torch.inference_mode(), routes.recorded() as chosen:
        hf(input_ids=ids, use_cache=False)
    return torch.stack([chosen[layer] for layer in range(routes.layers)], 1).numpy()


def test_routes_when_they_are_asked_for_then_they_are_those_of_the_whole_sequence(tmp_path):
    hf = saved("qwen3_moe", tmp_path)
    scheduler = serve(tmp_path, max_running=4)
    shared = ask([5, 6, 7, 8], 6, seed=1, routed_from=0)
    others = [
        ask([5, 6, 7, 8], 9, seed=2, routed_from=0),  # shares its prompt
        ask([9], 5, seed=3, routed_from=0),
        ask([3, 4, 5], 4, seed=4),
        ask([8, 7, 6, 5, 4], 3, seed=5, routed_from=2),  # waits for a row
    ]
    for each in (shared, *others):
        scheduler.submit(each)
    scheduler.step()
    scheduler.step()
    scheduler.pause("retract")
    scheduler.resume()
    finish(scheduler)
    for each in (shared, *others):
        if each.routed_from is None:
            assert each.routes == []
        else:
            assert np.array_equal(np.stack(each.routes), chosen_by(hf, each))


def test_routes_when_rendered_then_as_sglang_says_them(tmp_path):
    saved("qwen3_moe", tmp_path)
    scheduler = serve(tmp_path)
    body = {
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"max_new_tokens": 3, "ignore_eos": True},
        "return_routed_experts": True,
        "routed_experts_start_len": 2,
    }
    limits = Limits(
        vocab_size=96, context_length=100, max_total_tokens=1000, eos_token_ids=frozenset()
    )
    call = parse_generate(body, limits, None)
    scheduler.submit(call.requests[0])
    finish(scheduler)
    said = render(call.requests[0], call, None)["meta_info"]["routed_experts"]
    found = np.frombuffer(base64.b64decode(said), "<i4").reshape(-1, 4, 2)
    assert np.array_equal(found, np.stack(call.requests[0].routes)[2:])
    with pytest.raises(RequestError, match="routed_experts_start_len"):
        parse_generate({**body, "routed_experts_start_len": 5}, limits, None)
