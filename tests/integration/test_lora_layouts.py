"""LoRA over several ranks (gloo): in any layout the adapters are those of one rank."""

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.test_layouts import LIMIT_S, Runs, assert_weights_close, others
from tests.unit.areal_torch.engines.hub_families import make_family
from tests.unit.areal_torch.engines.train_fixtures import assert_gradients_close, make_batch

from areal.config.training import LoraConfig, TrainEngineConfig
from areal.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE, PREFIX, adapter_config
from areal.weights.manifest import AdapterInfo
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import lora

RANK, ALPHA = 4, 12
STEPS = list(range(6))
LAYOUTS = {
    1: ["d1"],
    2: ["d2", "d1t2", "d1c2"],
    4: ["d4s2", "d2c2", "d2t2", "d2s1t2", "d1t2c2"],
}
# Qwen2 has biases of projections, Qwen3 norms of its heads, Qwen3-MoE experts without adapters.
OTHERS = {
    1: [("qwen2", "d1"), ("qwen3_moe", "d1")],
    2: [("qwen2", "d1t2"), ("qwen3_moe", "d2e2")],
    4: [("qwen2", "d2t2"), ("qwen3_moe", "d4e2"), ("qwen3_moe", "d2t2e2")],
}
KINDS = {n: [*(("qwen3", layout) for layout in LAYOUTS[n]), *OTHERS[n]] for n in LAYOUTS}
# The last of each is trained in a run that has begun in the others.
RESUMED = {2: ["d1t2", "d2", "d1t2"], 4: ["d4s2", "d2t2", "d2c2"]}

pytestmark = pytest.mark.timeout(4 * LIMIT_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where models, checkpoints and results are."""
    return tmp_path_factory.mktemp("lora-layouts")


@pytest.fixture(scope="module")
def runs(folder):
    """All jobs, one launch for each number of ranks; that of one rank comes first."""
    models = {
        kind: str(make_family(kind, folder / kind, num_key_value_heads=4))
        for kind in ("qwen2", "qwen3", "qwen3_moe")
    }
    begun = str(folder / "checkpoint")

    def job(name, kind, layout, dtype, keeps="none", **extra):
        config = {
            "path": models[kind],
            "dtype": dtype,
            "layout": layout,
            "lora": {"rank": RANK, "alpha": ALPHA},
            "gradient_checkpointing": keeps,
            "optimizer": {"lr": 1e-3, "gradient_clipping": 0.05},
            "reward_norm": "group/group",
            "mb_spec": {"max_tokens_per_mb": 70},
        }
        return {"config": config, "out": str(folder / name), "seeds": STEPS, **extra}

    launches = []
    for ranks, layouts in LAYOUTS.items():
        jobs = []
        if ranks == 1:  # B is 0 at first, and so is the gradient of A
            jobs.append(job("begun", "qwen3", "d1", "float32", seeds=STEPS[:3], save_to=begun))
        for layout in layouts:
            one = {"gradients": True, "seeds": STEPS[:4], "resume": begun}
            jobs.append(job(f"gradients-{layout}", "qwen3", layout, "float32", **one))
        for kind, layout in KINDS[ranks]:
            jobs.append(job(f"{kind}-{layout}", kind, layout, "float64", export=True))
        if ranks == 2:
            for keeps in ("selective", "full"):
                jobs.append(job(f"gradients-{keeps}", "qwen3", "d1t2", "float32", keeps, **one))
            kept = {"save_to": str(folder / "checkpoint-2"), "seeds": STEPS[:2]}
            jobs.append(job("kept", "qwen3", "d1t2", "float64", export=True, **kept))
        if ranks <= 2:
            layout, two = ("d1", "d1t2")[ranks - 1], {"seeds": STEPS[:2]}
            jobs.append(job(f"bfloat16-{layout}", "qwen3", layout, "bfloat16", **two))
        parts = RESUMED.get(ranks, [])
        for number, layout in enumerate(parts):
            before, after = (str(folder / f"part-{ranks}-{n}") for n in (number, number + 1))
            extra = {"resume": before} if number else {}
            extra |= {"save_to": after, "seeds": STEPS[: 2 * number + 2], "export": True}
            jobs.append(job(f"resumed-{ranks}-{number}", "qwen3", layout, "float64", **extra))
        launches.append([ranks, jobs])
    found = Runs(folder, launches)
    assert found["begun"]
    return found


def several(pairs):
    """(kind, layout) of several ranks; four share few cores, so theirs are long."""
    return [*pairs[2], *(pytest.param(*pair, marks=pytest.mark.long) for pair in pairs[4])]


def assert_adapters_close(folder, ours, expected):
    """Compares what two jobs have published as adapters."""
    found, one = (load_file(folder / f"{name}.adapters") for name in (ours, expected))
    assert_weights_close(found, one, 1e-10)


@pytest.mark.parametrize("layout", others(LAYOUTS))
def test_gradients_when_adapters_resume_from_one_rank_in_a_layout_then_equal_its(runs, layout):
    (ours, rows), (one, rows1) = (runs[f"gradients-{each}"] for each in (layout, "d1"))
    assert all(".lora_" in name and tensor.abs().max() > 0 for name, tensor in one.items())
    assert_gradients_close(ours, one, 1e-5)
    for name in ("loss", "entropy", "n_loss_tokens", "n_tokens"):
        assert rows[0][name] == pytest.approx(rows1[0][name], rel=1e-5)


@pytest.mark.parametrize("keeps", ["selective", "full"])
def test_gradients_when_layers_of_a_tensor_group_are_recomputed_then_equal_those_of_one_rank(
    runs, keeps
):
    assert_gradients_close(runs[f"gradients-{keeps}"][0], runs["gradients-d1"][0], 1e-5)


@pytest.mark.parametrize(("kind", "layout"), several(KINDS))
def test_export_when_adapters_trained_in_a_layout_then_equals_that_of_one_rank(
    runs, folder, kind, layout
):
    (ours, rows), (one, rows1) = (runs[f"{kind}-{each}"] for each in (layout, "d1"))
    assert_weights_close(ours, one, 1e-10)
    assert_adapters_close(folder, f"{kind}-{layout}", f"{kind}-d1")
    for a, b in zip(rows, rows1, strict=True):
        for name in ("loss", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-8)
    assert max(row["grad_norm"] for row in rows1) > 0.05  # clipping took part
    assert rows1[-1]["loss"] != pytest.approx(rows1[0]["loss"], rel=1e-3)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_export_when_adapters_resume_in_other_layouts_then_equals_that_of_one_rank(
    runs, folder, ranks
):
    last = f"resumed-{ranks}-{len(RESUMED[ranks]) - 1}"
    (ours, rows), (one, _) = runs[last], runs["qwen3-d1"]
    assert len(rows) == 2
    assert_weights_close(ours, one, 1e-10)
    assert_adapters_close(folder, last, "qwen3-d1")


def test_training_when_a_tensor_group_computes_in_bfloat16_then_it_is_close_to_one_rank(runs):
    (ours, rows), (one, rows1) = (runs[f"bfloat16-{each}"] for each in ("d1t2", "d1"))
    assert {name: t.dtype for name, t in ours.items()} == {n: t.dtype for n, t in one.items()}
    assert rows[-1]["loss"] == pytest.approx(rows1[-1]["loss"], abs=2e-2)
    assert rows[-1]["grad_norm"] == pytest.approx(rows1[-1]["grad_norm"], rel=0.1)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
def test_peft_when_a_tensor_group_trained_the_adapters_then_it_computes_what_merged_weights_do(
    runs, folder, tmp_path
):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def base():
        return AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype="float64")

    merged, _ = runs["kept"]
    published = load_file(folder / "kept.adapters")
    sent, exported = tmp_path / "sent", tmp_path / "exported"
    sent.mkdir()
    (sent / ADAPTER_FILE).write_bytes((folder / "kept.adapters").read_bytes())
    info = AdapterInfo(RANK, ALPHA, "", 0.0, "", 0.0)
    (sent / ADAPTER_CONFIG).write_bytes(adapter_config(info, published))

    # As `areal versions export` does: one process reads what two ranks have saved.
    config = TrainEngineConfig(
        path=str(folder / "qwen3"), dtype="float64", lora=LoraConfig(rank=RANK, alpha=ALPHA)
    )
    engine = FSDPEngine(config)
    engine.initialize()
    engine.load_checkpoint(folder / "checkpoint-2")
    assert_weights_close(dict(engine.iter_full_tensors()), merged, 1e-12)
    lora.write(engine.model.hf, exported, config.path)
    engine.destroy()
    written = load_file(exported / ADAPTER_FILE)
    assert all(name.startswith(PREFIX) for name in written)
    assert_weights_close(written, published, 1e-12)

    plain = base()
    plain.load_state_dict(merged)
    ids = make_batch(0, vocabulary=96)["input_ids"][None, :40]
    with torch.no_grad():
        expected, before = plain(ids).logits, base()(ids).logits
        assert (expected - before).abs().max() > 1e-3
        for adapter in (sent, exported):
            found = PeftModel.from_pretrained(base(), adapter)(ids).logits
            assert torch.allclose(found, expected, rtol=0, atol=1e-10)
