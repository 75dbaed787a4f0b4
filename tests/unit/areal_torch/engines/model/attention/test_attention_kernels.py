"""Each kernel of a GPU, written out for a CPU, against packed attention and transformers."""

import pytest
import torch
from tests.unit.areal_torch.engines.model.attention import flash_on_cpu
from tests.unit.areal_torch.engines.model.attention.flash_on_cpu import (
    install_packages,
    pretend_gpu,
    torch_kernels,
)
from tests.unit.areal_torch.engines.model.test_self_test import MADE_RIGHT, alone, wild_model
from tests.unit.areal_torch.engines.train_fixtures import make_batch
from torch.utils._python_dispatch import TorchDispatchMode

from areal.errors import InvalidInput
from areal_torch.engines.model.attention.dispatch import PACKED, attention_function, choose
from areal_torch.engines.model.attention.layout import build_layout
from areal_torch.engines.model.attention.varlen import FLASH_2, FLASH_3, PACKAGES, TORCH
from areal_torch.engines.model.heads import LogprobHead
from areal_torch.engines.model.packed import PackedCausalLM
from areal_torch.engines.model.self_test import self_test
from areal_torch.engines.model.source import load_model

KERNELS = (TORCH, FLASH_2, FLASH_3)
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def kernels(monkeypatch):
    install_packages(monkeypatch)
    with torch_kernels():
        yield


@pytest.fixture
def hopper(monkeypatch):
    pretend_gpu(monkeypatch, (9, 0))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize(("window", "kv_heads", "value_dim"), [(None, 2, 6), (5, 4, 8), (1, 1, 12)])
def test_kernel_when_heads_windows_and_prefixes_vary_then_equals_packed_attention(
    kernels, kernel, share_prefixes, window, kv_heads, value_dim
):
    g = torch.Generator().manual_seed(0)
    batch = make_batch(groups=4, vocabulary=5)
    layout = build_layout(batch, share_prefixes=share_prefixes)
    bare = build_layout(batch, share_prefixes=share_prefixes, buckets=False)
    assert layout.shared == share_prefixes
    assert not bare.buckets
    total = len(layout.computed)

    def leaf(heads, dim):
        x = torch.randn(1, total, heads, dim, generator=g, dtype=torch.float64)
        return x.transpose(1, 2).requires_grad_()

    leaves = leaf(4, 8), leaf(kv_heads, 8), leaf(kv_heads, value_dim)
    options = {"scaling": 0.7, "sliding_window": window}
    found, _ = attention_function(kernel)(None, *leaves, None, packed_layout=bare, **options)
    expected, _ = attention_function(PACKED)(None, *leaves, None, packed_layout=layout, **options)
    assert found.shape == (1, total, 4, value_dim)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(found.shape, generator=g, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_flash_attention_2_when_scores_are_capped_then_equals_packed_attention(kernels):
    batch = make_batch(groups=2)
    layout = build_layout(batch, share_prefixes=True)
    q, k, v = (torch.randn(1, 4, len(layout.computed), 8, dtype=torch.float64) for _ in range(3))
    options = {"packed_layout": layout, "softcap": 2.0}
    found, _ = attention_function(FLASH_2)(None, q, k, v, None, **options)
    expected, _ = attention_function(PACKED)(None, q, k, v, None, **options)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("kernel", "asked", "named"),
    [
        (TORCH, {"softcap": 2.0}, "softcap=2.0, which varlen attention does not"),
        (FLASH_3, {"softcap": 2.0}, "softcap=2.0, which flash_attention_3 attention does not"),
        (TORCH, {"s_aux": torch.ones(4)}, r"s_aux=a tensor \[4\]"),
        (FLASH_2, {"s_aux": torch.ones(4)}, r"s_aux=a tensor \[4\]"),
        (TORCH, {"position_bias": torch.ones(4)}, "position_bias"),
    ],
)
def test_kernel_when_asked_for_what_it_does_not_compute_then_refuses(kernels, kernel, asked, named):
    batch = make_batch(groups=1)
    layout = build_layout(batch, share_prefixes=False, buckets=False)
    q = torch.zeros(1, 4, len(layout.computed), 8)
    with pytest.raises(InvalidInput, match=named) as refusal:
        attention_function(kernel)(None, q, q, q, None, packed_layout=layout, **asked)
    assert "\n" not in str(refusal.value)


MODELS = {
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 7},
    "deepseek_v3": MADE_RIGHT["deepseek_v3"],
    "llama4_text": {"head_dim": 8, "attention_chunk_size": 4, "num_hidden_layers": 4},
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", MODELS)
def test_model_when_a_kernel_computes_its_attention_then_equals_transformers(
    tmp_path, kernels, kernel, kind
):
    hf = wild_model(tmp_path, kind, **MODELS[kind])
    trained = load_model(str(tmp_path), torch.float32, from_scratch=False, seed=0)
    model = PackedCausalLM(trained, kernel=kernel, chunk_elements=1 << 20)
    tested = self_test(model, CPU, torch.float32)
    assert tested.attention == kernel
    assert tested.difference < 1e-5
    batch = make_batch(vocabulary=96)
    layout = model.plan(batch, share_prefixes=False)
    targets = torch.nonzero(batch["loss_mask"]).flatten()
    logprobs, _ = model(batch, layout, targets, LogprobHead())
    torch.testing.assert_close(logprobs, alone(hf, batch)[targets], atol=4e-5, rtol=0)


class NoQuestions(TorchDispatchMode):
    """Fails where the host would wait for the device: to learn a number or how many there are."""

    asking = ("_local_scalar_dense", "nonzero", "unique", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert not name.startswith(self.asking), f"{name} makes the host wait"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", [PACKED, TORCH])
def test_model_when_it_computes_then_the_host_never_waits_for_the_device(tmp_path, kernels, kernel):
    wild_model(tmp_path, "qwen3", head_dim=8)
    hf = load_model(str(tmp_path), torch.float32, from_scratch=False, seed=0)
    model = PackedCausalLM(hf, kernel=kernel, chunk_elements=1 << 20)
    batch = make_batch(vocabulary=96)
    layout = build_layout(batch, share_prefixes=True, buckets=kernel == PACKED)
    targets = torch.nonzero(batch["loss_mask"]).flatten()
    with NoQuestions():
        logprobs, _ = model(batch, layout, targets, LogprobHead())
        logprobs.sum().backward()
    with NoQuestions(), pytest.raises(AssertionError, match="makes the host wait"):
        float(logprobs.sum())


def test_self_test_when_a_kernel_lets_sequences_see_one_another_then_refuses(tmp_path):
    def leaky(q, k, v, cu_seqlens, longest, scale, left):
        del cu_seqlens
        whole = torch.tensor([0, len(q)], dtype=torch.int32)
        return flash_on_cpu.attend(q, k, v, whole, len(q), scale, left)

    wild_model(tmp_path, "qwen3", head_dim=8)
    hf = load_model(str(tmp_path), torch.bfloat16, from_scratch=False, seed=0)
    model = PackedCausalLM(hf, kernel=TORCH, chunk_elements=1 << 20)
    with (
        torch_kernels(leaky),
        pytest.raises(InvalidInput, match=r"differ by .* nats.* than 0\.05 \(bfloat16, varlen"),
    ):
        self_test(model, CPU, torch.bfloat16)


def meta_model(folder, kind, **options):
    wild_model(folder, kind, **options)
    return load_model(str(folder), torch.float32, from_scratch=False, seed=0)


@pytest.fixture
def only_torch():
    with torch_kernels():
        yield


@pytest.mark.usefixtures("hopper", "only_torch")
@pytest.mark.parametrize(
    ("kind", "options", "kernel", "why"),
    [
        ("qwen3", {"head_dim": 8}, TORCH, None),
        ("gemma3_text", {"head_dim": 8, "sliding_window": 7}, TORCH, None),
        ("deepseek_v3", MADE_RIGHT["deepseek_v3"], TORCH, None),
        ("gpt_oss", MADE_RIGHT["gpt_oss"], PACKED, "GptOssForCausalLM has attention sinks"),
        ("gemma2", MADE_RIGHT["gemma2"], PACKED, "Gemma2ForCausalLM caps attention scores"),
        ("qwen3", {"head_dim": 264}, PACKED, "heads of width 264, more than 256"),
    ],
)
def test_choose_when_a_model_needs_more_than_a_kernel_has_then_takes_another(
    tmp_path, kind, options, kernel, why
):
    hf = meta_model(tmp_path, kind, **options)
    assert choose(hf, "auto", GPU, torch.bfloat16) == kernel
    assert choose(hf, "packed", GPU, torch.bfloat16) == PACKED
    if why is None:
        assert choose(hf, "varlen", GPU, torch.bfloat16) == TORCH
    else:
        with pytest.raises(InvalidInput, match=f"attn_impl=varlen: .*{why}; expected"):
            choose(hf, "varlen", GPU, torch.bfloat16)


def test_choose_when_packages_are_installed_then_prefers_hoppers_kernel(
    tmp_path, kernels, hopper, monkeypatch
):
    plain = meta_model(tmp_path / "plain", "qwen3", head_dim=8)
    capped = meta_model(tmp_path / "capped", "gemma2", **MADE_RIGHT["gemma2"])
    assert choose(plain, "auto", GPU, torch.bfloat16) == FLASH_3
    assert choose(capped, "auto", GPU, torch.bfloat16) == FLASH_2
    pretend_gpu(monkeypatch, (8, 0))
    assert choose(plain, "auto", GPU, torch.bfloat16) == FLASH_2
    with pytest.raises(InvalidInput, match="attn_impl=flash_attention_3: the GPU is not a Hopper"):
        choose(plain, FLASH_3, GPU, torch.bfloat16)


def test_choose_when_the_gpu_is_older_than_ampere_then_takes_packed_and_says_why(
    tmp_path, kernels, monkeypatch
):
    hf = meta_model(tmp_path, "qwen3", head_dim=8)
    pretend_gpu(monkeypatch, (7, 5))
    assert choose(hf, "auto", GPU, torch.float16) == PACKED
    for kernel in (TORCH, FLASH_2):
        with pytest.raises(InvalidInput, match=f"attn_impl={kernel}: the GPU is older than Ampere"):
            choose(hf, kernel, GPU, torch.float16)


@pytest.mark.usefixtures("hopper", "only_torch")
@pytest.mark.parametrize(
    ("kernel", "device", "compute", "named"),
    [
        (TORCH, CPU, torch.bfloat16, "the device is a cpu, not a GPU"),
        (TORCH, GPU, torch.float32, "computes only with 16 bits, not float32"),
        (FLASH_2, GPU, torch.bfloat16, "the package flash_attn is not installed"),
        (FLASH_3, GPU, torch.bfloat16, "the package flash_attn_interface is not installed"),
    ],
)
def test_choose_when_the_machine_lacks_something_then_says_so(
    tmp_path, kernel, device, compute, named
):
    hf = meta_model(tmp_path, "qwen3", head_dim=8)
    with pytest.raises(InvalidInput, match=f"attn_impl={kernel}: .*{named}.*attn_impl=packed"):
        choose(hf, kernel, device, compute)
    expected = TORCH if kernel in PACKAGES else PACKED
    assert choose(hf, "auto", device, compute) == expected
