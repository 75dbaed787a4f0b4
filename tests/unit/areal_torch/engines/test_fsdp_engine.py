"""The engine alone in a process; several ranks are in tests/integration."""

import json
import math
from concurrent.futures import Future

import pytest
import torch
from tests.unit.areal_torch.engines.hub_families import make_family
from tests.unit.areal_torch.engines.train_fixtures import (
    assert_gradients_close,
    gradients,
    make_batch,
    weighted_loss,
)

from areal.config.training import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.errors import InvalidInput
from areal.runs.checkpoints import DIGESTS, describe
from areal_torch.algorithms import packing
from areal_torch.engines.checkpoint import stager_for
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model.heads import LogprobHead, logprobs_of
from areal_torch.engines.model.source import load_model
from areal_torch.engines.optimizer import make_optimizer


@pytest.fixture
def make_engine(model_dir):
    engines = []

    def make(**options):
        steps = options.pop("total_train_steps", None)
        options.setdefault("optimizer", OptimizerConfig(lr=1e-3))
        options.setdefault("path", str(model_dir))
        engine = FSDPEngine(TrainEngineConfig(**options))
        engine.initialize(steps)
        engines.append(engine)
        return engine

    yield make
    for engine in reversed(engines):
        engine.destroy()


def plain_logprobs(engine, batch, temperature=1.0):
    """Logprobs from transformers, one sequence at a time."""
    hf = load_model(engine.config.path, torch.float64, from_scratch=False, seed=0)
    hf.set_attn_implementation("sdpa")
    parts = []
    for sequence in packing.unpack(batch):
        ids = sequence["input_ids"]
        with torch.no_grad():
            logits = hf(input_ids=ids[None]).logits[0, :-1] / temperature
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        logprobs = torch.cat([logprobs.new_zeros(1), logprobs])
        parts.append(torch.where(sequence["loss_mask"], logprobs, 0.0))
    return torch.cat(parts)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("share_prefixes", [True, False])
def test_forward_when_packed_then_equals_transformers_one_sequence_at_a_time(
    make_engine, temperature, share_prefixes
):
    engine = make_engine(dtype="float64", share_prefixes=share_prefixes)
    batch = make_batch()
    ours = engine.forward(batch, LogprobHead(temperature))
    assert ours.dtype == torch.float64
    expected = plain_logprobs(engine, batch, temperature)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    single = make_engine().forward(batch, LogprobHead(temperature))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-5)
    chunked = make_engine(dtype="float64", logits_chunk_elements=261 * 7)
    ours = chunked.forward(batch, LogprobHead(temperature))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"mb_spec": MicroBatchSpec(max_tokens_per_mb=60)},
        {"mb_spec": MicroBatchSpec(max_tokens_per_mb=1)},
        {"mb_spec": MicroBatchSpec(n_mbs=4)},
        {"share_prefixes": False},
        {"logits_chunk_elements": 261 * 7},
        {"gradient_checkpointing": True},
        {"fsdp_at_world_size_1": True},
        {
            "fsdp_at_world_size_1": True,
            "gradient_checkpointing": True,
            "logits_chunk_elements": 261 * 7,
            "mb_spec": MicroBatchSpec(max_tokens_per_mb=60),
        },
    ],
    ids=lambda options: ",".join(options),
)
def test_gradients_when_computed_another_way_then_are_the_same(make_engine, options):
    batch = make_batch(groups=4)
    expected, stats = gradients(make_engine(dtype="float64"), batch)
    ours, our_stats = gradients(make_engine(dtype="float64", **options), batch)
    assert_gradients_close(ours, expected, 1e-12)
    for name in ("loss", "entropy", "weight", "n_tokens", "n_loss_tokens"):
        assert our_stats[name] == pytest.approx(stats[name], rel=1e-10)


def test_gradients_when_one_sequence_at_a_time_then_add_up_to_the_packed_one(make_engine):
    engine = make_engine()
    batch = make_batch(groups=3)
    packed, stats = gradients(engine, batch)
    tokens, total, loss = stats["n_loss_tokens"], {}, 0.0
    for index in range(len(batch["group_index"])):
        one, one_stats = gradients(engine, packing.select(batch, [index]))
        share = one_stats["n_loss_tokens"] / tokens
        loss += one_stats["loss"] * share
        for name, grad in one.items():
            total[name] = total.get(name, 0) + grad * share
    assert loss == pytest.approx(stats["loss"], rel=1e-6)
    assert_gradients_close(packed, total, 1e-5)


def test_logprobs_of_when_logits_are_given_then_matches_the_definition():
    logits = torch.tensor([[0.0, math.log(3.0)], [2.0, 2.0]], dtype=torch.float64)
    logprobs, entropies = logprobs_of(logits, torch.tensor([1, 0]), 1.0)
    assert logprobs.exp().tolist() == pytest.approx([0.75, 0.5])
    assert entropies.tolist() == pytest.approx(
        [-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), math.log(2)]
    )


def test_train_batch_when_repeated_then_fits_and_reports(make_engine):
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.001)
    engine = make_engine(optimizer=optimizer, total_train_steps=1000)
    batch = make_batch(groups=2)
    rows = [engine.train_batch(batch, weighted_loss) for _ in range(12)]
    assert rows[-1]["loss"] < rows[0]["loss"] - 1.0
    assert rows[0]["entropy"] == pytest.approx(math.log(261), rel=0.05)
    assert rows[0]["n_tokens"] == len(batch["input_ids"])
    assert rows[0]["n_loss_tokens"] == int(batch["loss_mask"].sum())
    assert rows[0]["lr"] == pytest.approx(0.005)
    assert all(row["skipped_steps"] == 0.0 for row in rows)
    assert engine.step.steps_taken == 12


def test_train_batch_when_clipping_then_bounds_the_update_only(make_engine):
    batch = make_batch(groups=2)
    norms = []
    for limit in (0.0, 0.05):
        engine = make_engine(optimizer=OptimizerConfig(lr=0.0, gradient_clipping=limit, beta1=0.0))
        stats = engine.train_batch(batch, weighted_loss)
        # With beta1 = 0 the first moment is the gradient that the optimizer saw.
        seen = sum(float(s["exp_avg"].square().sum()) for s in engine.step.optimizer.state.values())
        norms.append((stats["grad_norm"], seen**0.5))
    assert norms[0][0] == pytest.approx(norms[0][1], rel=1e-5)
    assert norms[1][0] == pytest.approx(norms[0][0], rel=1e-6)
    assert norms[1][1] == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize("sharded", [False, True])
def test_train_batch_when_the_gradient_is_zero_then_all_but_norms_and_biases_decay(
    make_engine, sharded
):
    engine = make_engine(
        optimizer=OptimizerConfig(lr=0.1, weight_decay=0.5), fsdp_at_world_size_1=sharded
    )
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.add_(1.0)  # biases begin at 0, which no decay changes
    before = dict(engine.iter_full_tensors())
    stats = engine.train_batch(make_batch(), lambda logprobs, *_: (0.0 * logprobs.sum(), {}))
    assert (stats["grad_norm"], stats["skipped_steps"]) == (0.0, 0.0)
    spared = {name for name in before if name.endswith(("norm.weight", ".bias"))}
    assert {name.split(".")[-2] for name in spared} == {
        *("q_proj", "k_proj", "v_proj"),
        *("input_layernorm", "post_attention_layernorm", "norm"),
    }
    for name, tensor in engine.iter_full_tensors():
        factor = 1.0 if name in spared else 1.0 - 0.1 * 0.5
        torch.testing.assert_close(tensor, factor * before[name], msg=name)


def test_train_batch_when_the_gradient_is_not_finite_then_skips_and_counts(make_engine):
    engine = make_engine()
    before = {name: p.clone() for name, p in engine.model.named_parameters()}

    def broken(logprobs, entropies, batch):
        return (logprobs * float("inf")).sum(), {}

    stats = engine.train_batch(make_batch(), broken)
    assert stats["skipped_steps"] == 1.0
    assert engine.step.steps_taken == 0
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
    assert engine.train_batch(make_batch(), weighted_loss)["skipped_steps"] == 0.0


@pytest.mark.parametrize("empty", ["no sequences", "no loss tokens"])
def test_train_batch_when_there_is_nothing_to_learn_then_skips(make_engine, empty):
    engine = make_engine()
    batch = make_batch()
    if empty == "no sequences":
        batch = packing.select(batch, [])
    else:
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    stats = engine.train_batch(batch, weighted_loss)
    assert stats["skipped_steps"] == 1.0
    assert stats["loss"] == 0.0
    assert engine.forward(batch).tolist() == [0.0] * len(batch["input_ids"])


def test_train_batch_when_misused_then_says_so(make_engine, model_dir):
    batch = make_batch()
    with pytest.raises(InvalidInput, match="rewards"):
        make_engine().train_batch({**batch, "rewards": torch.zeros(3)}, weighted_loss)
    frozen = make_engine(optimizer=None)
    assert not any(p.requires_grad for p in frozen.model.parameters())
    with pytest.raises(InvalidInput, match="optimizer"):
        frozen.train_batch(batch, weighted_loss)
    with pytest.raises(InvalidInput, match="initialize"):
        _ = FSDPEngine(TrainEngineConfig(path=str(model_dir))).model


def test_initialize_when_the_model_is_missing_then_names_the_path(tmp_path):
    engine = FSDPEngine(TrainEngineConfig(path=str(tmp_path / "nothing")))
    try:
        with pytest.raises(InvalidInput, match=r"nothing.*config\.json"):
            engine.initialize()
    finally:
        engine.destroy()


def test_initialize_when_from_scratch_then_the_seed_decides(make_engine):
    first, same, other = (
        make_engine(init_from_scratch=True, seed=s).forward(make_batch()) for s in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_train_batch_when_compute_is_bfloat16_then_master_weights_stay_float32(make_engine):
    engine = make_engine(dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-2))
    batch = make_batch(groups=2)
    assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
    exact = make_engine().forward(batch)
    ours = engine.forward(batch)
    assert not torch.equal(ours, exact)
    torch.testing.assert_close(ours, exact, rtol=0.02, atol=0.05)
    losses = [engine.train_batch(batch, weighted_loss)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("sharded", [False, True])
def test_iter_full_tensors_when_exported_then_are_copies_in_hugging_face_names(
    make_engine, sharded
):
    engine = make_engine(fsdp_at_world_size_1=sharded)
    tensors = dict(engine.iter_full_tensors())
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors  # tied
    held = {name: tensor.clone() for name, tensor in tensors.items()}
    engine.train_batch(make_batch(), weighted_loss)
    assert all(torch.equal(tensors[name], held[name]) for name in held)
    changed = dict(engine.iter_full_tensors("bfloat16"))
    assert {t.dtype for t in changed.values()} == {torch.bfloat16}
    assert not torch.equal(changed["model.norm.weight"], held["model.norm.weight"].bfloat16()) or (
        not torch.equal(
            changed["model.embed_tokens.weight"], held["model.embed_tokens.weight"].bfloat16()
        )
    )


@pytest.mark.parametrize("sharded", [False, True])
def test_save_when_loaded_then_transformers_and_the_engine_agree(make_engine, tmp_path, sharded):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = make_engine(fsdp_at_world_size_1=sharded)
    batch = make_batch()
    engine.train_batch(batch, weighted_loss)
    trained = engine.forward(batch)
    engine.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "Qwen2ForCausalLM"
    ]
    hf = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in engine.iter_full_tensors():
        assert torch.equal(hf.state_dict()[name], tensor)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 260
    fresh = make_engine(fsdp_at_world_size_1=sharded)
    # A forward first: parameters gathered for it must not hide the ones that are loaded.
    assert not torch.equal(fresh.forward(batch), trained)
    fresh.load(tmp_path)
    assert torch.equal(fresh.forward(batch), trained)
    with pytest.raises(InvalidInput, match=r"no model\.safetensors"):
        fresh.load(tmp_path / "nowhere")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("at_step", [0, 3])
def test_checkpoint_when_resumed_then_continues_bit_for_bit(
    make_engine, tmp_path, background, at_step
):
    batches = [make_batch(seed) for seed in range(6)]
    options = {
        "optimizer": OptimizerConfig(
            lr=1e-2, lr_scheduler_type="cosine", warmup_steps_proportion=0.2
        ),
        "total_train_steps": 10,
    }
    engine = make_engine(**options)
    for step in range(at_step):
        engine.train_batch(batches[step], weighted_loss)
    engine.set_version(at_step)
    torch.manual_seed(11)
    saved = engine.save_checkpoint(tmp_path / "c", {"cursor": [1, 2]}, background=background)
    assert isinstance(saved, Future)
    drawn = torch.rand(3)
    # Training continues while the checkpoint is written: it must hold the weights of the call.
    for step in range(at_step, 6):
        last = engine.train_batch(batches[step], weighted_loss)
    saved.result(timeout=60)
    resumed = make_engine(**options)
    assert resumed.load_checkpoint(tmp_path / "c") == {"cursor": [1, 2]}
    assert resumed.get_version() == at_step
    assert torch.equal(torch.rand(3), drawn)
    for step in range(at_step, 6):
        again = resumed.train_batch(batches[step], weighted_loss)
    assert again["lr"] == last["lr"]
    expected = dict(engine.iter_full_tensors())
    for name, tensor in resumed.iter_full_tensors():
        assert torch.equal(tensor, expected[name]), name


def test_stager_when_on_a_gpu_then_keeps_its_memory_and_on_a_cpu_there_is_none(
    make_engine, tmp_path, monkeypatch
):
    assert stager_for(torch.device("cpu")) is None
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: pinned.append(t.nbytes) or t)
    engine, batch = make_engine(fsdp_at_world_size_1=True), make_batch()
    engine._stager = stager_for(torch.device("cuda"))
    resumed = make_engine(fsdp_at_world_size_1=True)
    for number in range(3):
        engine.train_batch(batch, weighted_loss)
        saved = engine.save_checkpoint(tmp_path / str(number), background=True)
        expected = engine.forward(batch)
        engine.train_batch(batch, weighted_loss)  # does not change what is being written
        saved.result(timeout=60)
        resumed.load_checkpoint(tmp_path / str(number))
        assert torch.equal(resumed.forward(batch), expected)
        if number == 0:
            once = len(pinned)
    assert len(pinned) == once
    assert sum(pinned) >= 0.9 * engine.checkpoint_bytes()


def test_load_checkpoint_when_it_is_not_one_then_names_what_is_missing(make_engine, tmp_path):
    engine = make_engine()
    with pytest.raises(InvalidInput, match=r"trainer_state\.json"):
        engine.load_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path / "c")
    (tmp_path / "c" / ".metadata").unlink()
    with pytest.raises(InvalidInput, match=r"\.metadata"):
        engine.load_checkpoint(tmp_path / "c")


def test_save_checkpoint_when_it_is_done_then_its_files_are_described(make_engine, tmp_path):
    engine = make_engine()
    engine.save_checkpoint(tmp_path, background=True).result(60)
    (described,) = tmp_path.glob(f"*{DIGESTS}")
    files = {file.name: describe(file) for file in tmp_path.glob("*.distcp")}
    assert files
    assert json.loads(described.read_text()) == files
    held = sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    assert engine.checkpoint_bytes() <= held < 1.1 * engine.checkpoint_bytes() + 2**20


def test_optimizer_when_it_is_made_of_a_gathered_model_then_refused(make_engine):
    """It would update copies of embedding and head, and the weights themselves would stay."""
    engine = make_engine(fsdp_at_world_size_1=True)
    engine.model.unshard()
    with pytest.raises(RuntimeError, match=r"expected reshard\(\) before its optimizer"):
        make_optimizer(engine.model, OptimizerConfig())
    engine.model.reshard()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_train_batch_when_sharded_then_every_weight_changes(make_engine, tmp_path, kind):
    engine = make_engine(path=str(make_family(kind, tmp_path)), fsdp_at_world_size_1=True)
    before = {name: tensor.clone() for name, tensor in engine.iter_full_tensors()}
    batch = make_batch()
    batch["input_ids"] %= engine.model.vocab_size
    engine.train_batch(batch, weighted_loss)
    same = [name for name, value in engine.iter_full_tensors() if torch.equal(value, before[name])]
    assert same == []
