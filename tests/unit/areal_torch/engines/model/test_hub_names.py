"""What leaves the trainer is named as on the Hub, and what lies there can be loaded."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.areal_torch.engines.hub_families import FAMILIES, SEEING, make_family, scatter
from tests.unit.areal_torch.engines.tiny_families import saved

from areal.config.training import TrainEngineConfig
from areal.errors import InvalidInput
from areal.weights.manifest import build_manifest, check_same_tensors
from areal.weights.publisher import NewVersion
from areal_torch.engines.export import buckets
from areal_torch.engines.export.publishing import host_tensors
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import hub_names
from areal_torch.publish.disk import DiskPublisher
from areal_torch.publish.fallback import FallbackPublisher


@pytest.fixture
def make_engine():
    engines = []

    def make(path, **options):
        engine = FSDPEngine(TrainEngineConfig(path=str(path), **options))
        engine.initialize()
        engines.append(engine)
        return engine

    yield make
    for engine in reversed(engines):
        engine.destroy()


def publish(engine, root):
    """A version as the trainer publishes it; returns its folder."""
    tensors = host_tensors(engine.iter_full_tensors())
    publisher = FallbackPublisher([DiskPublisher(root)])
    new = NewVersion(1, 1, tensors, Path(engine.config.path))
    return Path(publisher.publish(new, lambda _: None).path)


def assert_same(ours, expected):
    assert {n: tuple(t.shape) for n, t in ours.items()} == {
        n: tuple(t.shape) for n, t in expected.items()
    }
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("kind", FAMILIES)
def test_version_when_published_then_is_what_save_pretrained_writes(make_engine, tmp_path, kind):
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    engine = make_engine(make_family(kind, tmp_path / "source"))
    hf = engine.model.hf
    scatter(hf)
    hf.save_pretrained(tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    version = publish(engine, tmp_path / "weights")
    assert_same(load_file(version / "model.safetensors"), expected)
    engine.save(tmp_path / "saved")
    assert_same(load_file(tmp_path / "saved" / "model.safetensors"), expected)

    auto = AutoModelForImageTextToText if kind in SEEING else AutoModelForCausalLM
    fresh, told = auto.from_pretrained(version, output_loading_info=True)
    assert not any(told[problem] for problem in ("missing_keys", "unexpected_keys"))
    assert_same(fresh.state_dict(), hf.state_dict())
    other = make_engine(tmp_path / "source")
    other.load(version)
    assert_same(other.model.hf.state_dict(), hf.state_dict())


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def rewrite(folder, change):
    """Save what `change` makes of a directory's tensors."""
    tensors = change(weights_of(folder))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize("options", [{"fsdp_at_world_size_1": True}, {"init_from_scratch": True}])
def test_version_when_sharded_or_made_from_a_config_then_has_the_names_too(
    make_engine, tmp_path, options
):
    source = make_family("qwen3_moe", tmp_path / "source")
    engine = make_engine(source, **options)
    version = publish(engine, tmp_path / "weights")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in weights_of(version)
    before = {name: tensor.clone() for name, tensor in engine.iter_full_tensors()}
    scatter(engine.model.hf)
    engine.load(version)
    assert_same(dict(engine.iter_full_tensors()), before)


def test_export_when_experts_are_fused_then_a_bucket_is_small_or_one_group(
    make_engine, tmp_path, monkeypatch
):
    engine = make_engine(make_family("qwen3_moe", tmp_path / "source"))
    most, step_of = 20_000, {}
    for number, step in enumerate(hub_names.export_steps(engine.model.hf)):
        live = hub_names.live_tensors(engine.model.hf)
        for name, _ in step.run(engine.model.hf, [live[name] for name in step.names]):
            step_of[name] = number
    monkeypatch.setattr(buckets, "BUCKET_BYTES", most)
    found = list(engine.exporter.gathering(None).buckets())
    assert len(found) > 5
    for bucket in found:
        size = sum(tensor.nbytes for _, tensor in bucket)
        assert size <= most or len({step_of[name] for name, _ in bucket}) == 1
    assert any(sum(t.nbytes for _, t in bucket) > most for bucket in found)
    assert sorted(name for bucket in found for name, _ in bucket) == sorted(step_of)


def test_iter_full_tensors_when_experts_are_fused_then_gives_copies(make_engine, tmp_path):
    engine = make_engine(make_family("mixtral", tmp_path / "source"))
    tensors = dict(engine.iter_full_tensors("bfloat16"))
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    tensors = dict(engine.iter_full_tensors())
    held = {name: tensor.clone() for name, tensor in tensors.items()}
    scatter(engine.model.hf)
    assert_same(tensors, held)


def test_load_when_the_directory_keeps_experts_fused_then_takes_it_too(make_engine, tmp_path):
    engine = make_engine(make_family("qwen2_moe", tmp_path / "source"))
    engine.model.hf.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert "model.layers.0.mlp.experts.down_proj" in weights_of(tmp_path / "fused")
    expected = {name: tensor.clone() for name, tensor in engine.model.hf.state_dict().items()}
    scatter(engine.model.hf)
    engine.load(tmp_path / "fused")
    assert_same(engine.model.hf.state_dict(), expected)


def test_version_when_dense_layers_and_experts_have_two_names_then_both_come_out_again(
    make_engine, tmp_path
):
    source = tmp_path / "source"
    saved("kimi_linear", source)
    experts, dense = "model.layers.0.block_sparse_moe.", "model.layers.0.mlp."  # as on the Hub
    rewrite(source, lambda each: {n.replace(experts, dense): t for n, t in each.items()})
    names = weights_of(source).keys()
    assert {
        f"{dense}up_proj.weight",
        "model.layers.1.block_sparse_moe.experts.0.w1.weight",
    } <= names
    engine = make_engine(source)
    version = publish(engine, tmp_path / "weights")
    check_same_tensors(build_manifest(version, 1, 1), build_manifest(source, 0, 0))
    engine.save(tmp_path / "saved")
    assert weights_of(tmp_path / "saved").keys() == names


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("tie", [True, None])
def test_version_when_the_source_lists_a_tied_head_then_it_matches_and_loads(
    make_engine, tmp_path, tie
):
    source = make_family("gemma3_text", tmp_path / "source")
    rewrite(source, lambda tensors: tensors | {HEAD: tensors[EMBED].clone()})
    config = json.loads((source / "config.json").read_text())
    assert config.pop("tie_word_embeddings")
    if tie is not None:
        config["tie_word_embeddings"] = tie
    (source / "config.json").write_text(json.dumps(config))
    engine = make_engine(source)
    scatter(engine.model.hf)
    version = publish(engine, tmp_path / "weights")
    assert HEAD not in weights_of(version)
    check_same_tensors(build_manifest(version, 1, 1), build_manifest(source, 0, 0))
    engine.load(source)
    assert torch.equal(engine.model.hf.lm_head.weight, weights_of(source)[HEAD])
    rewrite(source, lambda tensors: without(tensors, EMBED))
    engine.load(version)
    engine.load(source)
    assert torch.equal(engine.model.hf.lm_head.weight, weights_of(source)[HEAD])


BYSTANDERS = {
    # Layers for speculative decoding, whose experts the Hub numbers too.
    "glm4_moe": {
        **{f"model.layers.92.mlp.experts.{n}.up_proj.weight": torch.ones(24, 32) for n in (0, 1)},
        "model.layers.92.eh_proj.weight": torch.ones(32, 64, dtype=torch.bfloat16),
    },
    "gpt_neox": {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)},
}


@pytest.mark.parametrize("kind", BYSTANDERS)
def test_version_when_the_source_has_more_than_the_model_then_carries_it_over(
    make_engine, tmp_path, kind
):
    source, more = make_family(kind, tmp_path / "source"), BYSTANDERS[kind]
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(source, lambda tensors: tensors | more | frequencies)
    engine = make_engine(source)
    scatter(engine.model.hf)
    version = publish(engine, tmp_path / "weights")
    check_same_tensors(build_manifest(version, 1, 1), build_manifest(source, 0, 0))
    published = weights_of(version)
    assert published.keys() == weights_of(source).keys() - frequencies.keys()
    assert_same({name: published[name] for name in more}, more)
    before = {name: tensor.clone() for name, tensor in engine.model.hf.state_dict().items()}
    scatter(engine.model.hf)
    engine.load(version)
    assert_same(engine.model.hf.state_dict(), before)


UP = "model.layers.1.mlp.experts.2.up_proj.weight"
DAMAGES = {
    f"lacks tensor '{UP}': expected": lambda t: without(t, UP),
    f"lacks tensor '{HEAD}' (and 2 more): expected": lambda t: {
        name: tensor for name, tensor in t.items() if ".layers." in name
    },
    "has unknown tensor 'model.layers.7.mlp.gate.weight' (and 1 more): expected": lambda t: (
        t | {f"model.layers.{n}.mlp.gate.weight": torch.ones(4, 32) for n in (7, 8)}
    ),
    "lacks tensor 'model.norm.weight'; has unknown tensor 'model.norms.weight': expected": (
        lambda t: without(t, "model.norm.weight") | {"model.norms.weight": torch.ones(32)}
    ),
    f"'{UP}' has shape (5, 5), expected (24, 32): ": lambda t: t | {UP: torch.ones(5, 5)},
    "'model.norm.weight' has shape (33,), expected (32,): ": lambda t: (
        t | {"model.norm.weight": torch.ones(33)}
    ),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_load_when_tensors_do_not_fit_then_says_which_and_changes_nothing(
    make_engine, tmp_path, words
):
    source = make_family("qwen3_moe", tmp_path / "source", tie_word_embeddings=False)
    engine = make_engine(source)
    scatter(engine.model.hf)
    before = {name: tensor.clone() for name, tensor in engine.model.hf.state_dict().items()}
    rewrite(source, DAMAGES[words])
    with pytest.raises(InvalidInput) as caught:
        engine.load(source)
    message = str(caught.value)
    assert message.startswith(f"directory {str(source)!r}: {words}")
    assert message.endswith("expected the tensors of a Qwen3MoeForCausalLM on the Hub")
    assert_same(engine.model.hf.state_dict(), before)


def test_load_when_a_tied_head_contradicts_the_embedding_then_says_so(make_engine, tmp_path):
    source = make_family("qwen2", tmp_path / "source")
    engine = make_engine(source)
    rewrite(source, lambda tensors: tensors | {HEAD: tensors[EMBED] + 1})
    with pytest.raises(InvalidInput, match=r"'lm_head\.weight' differs from 'model\.emb"):
        engine.load(source)
    with pytest.raises(InvalidInput, match=r"'lm_head\.weight' differs from .*config\.json ties"):
        make_engine(source)


def test_load_when_a_config_says_nothing_of_ties_and_the_head_differs_then_it_is_its_own(
    make_engine, tmp_path
):
    """Mistral Small 3 is published so, and transformers' class ties unless told otherwise."""
    source, head = tmp_path / "source", "language_model.lm_head.weight"
    saved("mistral3", source, tie_word_embeddings=False)
    config = json.loads((source / "config.json").read_text())
    assert config.pop("tie_word_embeddings") is False
    (source / "config.json").write_text(json.dumps(config))
    own = weights_of(source)
    assert head in own
    engine = make_engine(source)
    assert torch.equal(engine.model.hf.lm_head.weight, own[head])
    engine.save(tmp_path / "saved")
    assert_same(weights_of(tmp_path / "saved"), own)
    assert (
        json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    )


def test_initialize_when_the_directory_lacks_a_tensor_then_says_so(make_engine, tmp_path):
    source = make_family("qwen3_moe", tmp_path / "source")
    rewrite(source, lambda tensors: without(tensors, "model.norm.weight"))
    with pytest.raises(InvalidInput, match=r"lacks tensor 'model\.norm\.weight': expected"):
        make_engine(source)
    make_engine(source, init_from_scratch=True)
