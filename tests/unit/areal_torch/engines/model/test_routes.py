"""Router replay: the server's choice of experts, with weights from the trainer's own logits."""

import functools
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
import transformers
from structlog.testing import capture_logs
from tests.unit.areal_torch.engines.train_fixtures import (
    assert_gradients_close,
    gradients,
    make_batch,
    routes_of,
)
from tools.tiny_architectures import tiny_model

from areal.config.training import (
    LoraConfig,
    MicroBatchSpec,
    OptimizerConfig,
    RefConfig,
    TrainEngineConfig,
)
from areal_torch.algorithms.packing import ROUTES
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import guards
from areal_torch.engines.model.routes import Routes, routers_of

pytestmark = pytest.mark.filterwarnings("ignore")

EXPERTS, CHOSEN = 4, 2  # of the tiny models
FEW = ["qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"]
MANY = [
    "afmoe",
    "bailing_hybrid",
    "cohere2_moe",
    "deepseek_v32",
    "ernie4_5_moe",
    "exaone_moe",
    "glm4_moe",
    "granitemoe",
    "hunyuan_v1_moe",
    "jamba",
    "kimi_linear",
    "lfm2_moe",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
]


def wild(kind, **options):
    """A tiny model whose weights are large enough for a choice to show, in float64."""
    torch.set_num_threads(1)
    hf = tiny_model(kind, 0)
    vars(hf.config.get_text_config()).update(options)
    for name, module in hf.named_modules():
        vars(module).update({k: v for k, v in options.items() if k in vars(module)})
        del name
    if hf._can_set_experts_implementation():
        hf.set_experts_implementation("eager")  # torch has no grouped product of float64
    guards.silence_noise(hf)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3)
    return hf.double().eval()


def ids_of(hf, count=14, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (1, count), generator=g)
    ids[torch.isin(ids, torch.tensor(guards.placeholders(hf.config)))] = 3
    return ids


def own_choice(hf, routes, ids):
    """The routers' own choice as routes, [tokens, layers, k]; logits."""
    with routes.recorded() as chosen:
        logits = hf(input_ids=ids, use_cache=False).logits
    given = torch.full((ids.shape[1], routes.layers, CHOSEN), -1, dtype=torch.int16)
    for layer, choice in chosen.items():
        given[:, layer] = choice.to(torch.int16)
    return given, logits


def others(given, seed=1):
    """Random experts of each token, all of them different ones."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(*given.shape[:2], EXPERTS, generator=g).argsort(-1)[..., :CHOSEN].short()


@pytest.mark.parametrize(
    "kind", [*FEW, *(pytest.param(each, marks=pytest.mark.long) for each in MANY)]
)
def test_replay_when_the_choice_is_the_routers_own_then_nothing_changes(kind):
    hf = wild(kind)
    routes = Routes(hf, guards.decoder_of(hf))
    ids = ids_of(hf)
    given, free = own_choice(hf, routes, ids)
    parameters = [p for p in hf.parameters() if p.requires_grad and p.is_floating_point()]
    before = torch.autograd.grad(free.square().mean(), parameters, allow_unused=True)
    with routes.told(given):
        same = hf(input_ids=ids, use_cache=False).logits
    after = torch.autograd.grad(same.square().mean(), parameters, allow_unused=True)
    assert torch.equal(same, free)
    for one, two in zip(before, after, strict=True):
        assert (one is None) == (two is None)
        assert one is None or torch.allclose(one, two, rtol=1e-12, atol=1e-15)
    with routes.told(given.flip(-1)):
        found = hf(input_ids=ids, use_cache=False).logits
    assert torch.allclose(found, free, rtol=1e-6), "the order of a token's experts has a meaning"
    with routes.told(others(given)):
        assert not torch.allclose(hf(input_ids=ids, use_cache=False).logits, free)


def qwen3_moe(router, hidden, chosen):
    scores = F.linear(hidden, router.weight).softmax(-1, dtype=torch.float)
    weights = scores.gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights


def mixtral(router, hidden, chosen):
    scores = F.linear(hidden, router.weight).float().softmax(-1)
    return (weights := scores.gather(1, chosen)) / weights.sum(-1, keepdim=True)


def gpt_oss(router, hidden, chosen):
    return F.linear(hidden, router.weight, router.bias).gather(1, chosen).softmax(-1)


def deepseek_v2(router, hidden, chosen):
    scores = F.linear(hidden.float(), router.weight.float()).softmax(-1)
    return scores.gather(1, chosen) * router.routed_scaling_factor


def deepseek_v3(router, hidden, chosen):
    scores = F.linear(hidden.float(), router.weight.float()).sigmoid().gather(1, chosen)
    if router.norm_topk_prob:
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return scores * router.routed_scaling_factor


FORMULAS = {
    "qwen3_moe": (qwen3_moe, {}),
    "qwen3_moe, weights not normalized": (qwen3_moe, {"norm_topk_prob": False}),
    "mixtral": (mixtral, {}),
    "gpt_oss": (gpt_oss, {}),
    "deepseek_v2": (deepseek_v2, {"topk_method": "greedy"}),
    "deepseek_v2, in groups": (
        deepseek_v2,
        {"topk_method": "group_limited_greedy", "num_group": 2, "topk_group": 1},
    ),
    "deepseek_v3": (deepseek_v3, {}),
    "deepseek_v3, in groups": (deepseek_v3, {"num_group": 2, "topk_group": 1}),
    "glm4_moe": (deepseek_v3, {}),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_replay_when_the_choice_is_another_then_weights_are_the_scores_of_the_given_experts(name):
    formula, options = FORMULAS[name]
    hf, written = (wild(name.partition(",")[0], **options) for _ in range(2))
    routes, ids = Routes(hf, guards.decoder_of(hf)), ids_of(hf)
    given = others(own_choice(hf, routes, ids)[0])
    given[5] = -1  # a token without a route chooses itself
    for layer, router in routers_of(written, guards.decoder_of(written)).items():
        chosen, plain = given[:, layer].long(), router.forward

        def forward(self, hidden, chosen=chosen, plain=plain):
            logits, weights, index = plain(hidden)
            index = torch.where(chosen < 0, index, chosen)
            flat = hidden.reshape(-1, hidden.shape[-1])
            replayed = formula(self, flat, index).to(weights.dtype)
            return logits, torch.where(chosen < 0, weights, replayed), index

        router.forward = MethodType(forward, router)
    expected = written(input_ids=ids, use_cache=False).logits
    with routes.told(given):
        found = hf(input_ids=ids, use_cache=False).logits
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)
    for one, two in zip(
        torch.autograd.grad(found.square().mean(), list(hf.parameters()), allow_unused=True),
        torch.autograd.grad(
            expected.square().mean(), list(written.parameters()), allow_unused=True
        ),
        strict=True,
    ):
        assert (one is None) == (two is None)
        assert one is None or torch.allclose(one, two, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "bad", [-1, EXPERTS, 32767, "twice"], ids=["negative", "beyond", "largest", "twice"]
)
def test_replay_when_a_route_is_no_choice_then_the_router_chooses(bad):
    hf = wild("qwen3_moe")
    routes, ids = Routes(hf, guards.decoder_of(hf)), ids_of(hf)
    given, free = own_choice(hf, routes, ids)
    if bad == "twice":
        given[..., 1] = given[..., 0]
    else:
        given[..., 0] = bad
    with routes.told(given):
        assert torch.equal(hf(input_ids=ids, use_cache=False).logits, free)


@pytest.mark.parametrize("kind", ["phimoe", "jetmoe"])
def test_routers_when_a_family_chooses_otherwise_then_there_are_none_and_it_says_why(kind):
    hf = tiny_model(kind, 0)
    routes = Routes(hf, guards.decoder_of(hf))
    batch = {ROUTES: torch.zeros(4, routes.layers, 2, dtype=torch.int16)}
    with capture_logs() as logs:
        assert routes.of(batch) is None
        assert routes.of(batch) is None
    assert [(each["event"], each["cause"]) for each in logs] == [
        ("routes_not_replayed", "it has no routers that call topk, one in a layer")
    ]


# ---------------------------------------------------------------- in the engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("model")
    hf = tiny_model("qwen3_moe", 0)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3)
    hf.save_pretrained(target)
    return target


@pytest.fixture
def engine_of(folder):
    made = []

    def make(kind=TrainEngineConfig, **options):
        if kind is TrainEngineConfig:
            options["optimizer"] = OptimizerConfig(lr=1e-3)
        made.append(FSDPEngine(kind(path=str(folder), dtype="float64", **options)))
        made[-1].initialize(total_train_steps=None)
        return made[-1]

    yield make
    for engine in reversed(made):
        engine.destroy()


def routed(engine, seed=0, **keys):
    """A batch, whose groups have common prompts, with random routes that agree on prompts."""
    batch = make_batch(seed, groups=3, vocabulary=90, **keys)
    batch[ROUTES] = routes_of(batch, seed, engine.model.routes.layers, EXPERTS, CHOSEN)
    return batch


def test_engine_when_a_batch_has_routes_then_both_passes_use_them(engine_of):
    engine = engine_of()
    batch = routed(engine)
    free = {key: value for key, value in batch.items() if key != ROUTES}
    replayed, chosen = engine.forward(batch), engine.forward(free)
    assert not torch.allclose(replayed, chosen)
    seen = []

    def loss(logprobs, entropies, part):
        seen.append(logprobs.detach())
        return logprobs.sum(), {}

    stats = engine.train_batch(batch, loss)
    assert torch.equal(seen[0], replayed)
    assert stats["routed_ratio"] == 1.0
    assert stats["unrouted_sequences"] == 0.0


MODES = {
    "in micro-batches": {"mb_spec": MicroBatchSpec(max_tokens_per_mb=40)},
    "recomputed": {"gradient_checkpointing": "full"},
    "recomputed in part, micro-batches": {
        "gradient_checkpointing": "selective",
        "mb_spec": MicroBatchSpec(max_tokens_per_mb=40),
    },
    "prefixes not shared": {"share_prefixes": False},
    "sharded": {"fsdp_at_world_size_1": True},
}


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_gradients_when_layers_are_recomputed_or_split_then_replay_gives_the_same(
    engine_of, options
):
    plain = engine_of(gradient_checkpointing="none", share_prefixes=True)
    batch = routed(plain)
    expected, _ = gradients(plain, batch)
    free, _ = gradients(plain, {key: value for key, value in batch.items() if key != ROUTES})
    with pytest.raises(AssertionError):
        assert_gradients_close(free, expected, 1e-3)
    found, stats = gradients(engine_of(**options), batch)
    assert_gradients_close(found, expected, 1e-6)  # a router computes in float32
    assert stats["routed_ratio"] == 1.0


def test_engine_when_adapters_are_off_then_the_base_model_chooses_itself(engine_of):
    engine = engine_of(lora=LoraConfig(rank=2))
    batch = routed(engine)
    free = {key: value for key, value in batch.items() if key != ROUTES}
    assert not torch.allclose(engine.forward(batch), engine.forward(free))
    with engine.without_adapters():
        assert torch.equal(engine.forward(batch), engine.forward(free))


@pytest.mark.long
@pytest.mark.process
def test_engine_when_layers_are_compiled_then_replay_gives_the_same(engine_of):
    plain = engine_of(gradient_checkpointing="none")
    batch = routed(plain)
    expected, _ = gradients(plain, batch)
    found, _ = gradients(engine_of(kernels="compile", gradient_checkpointing="full"), batch)
    assert_gradients_close(found, expected, 1e-6)


def test_engine_when_some_tokens_have_no_route_then_they_are_counted(engine_of):
    engine = engine_of()
    batch = routed(engine)
    first, second = (int(each) for each in batch["cu_seqlens"][1:3])
    batch[ROUTES][:first] = -1
    batch[ROUTES][second - 1] = -1
    tokens = len(batch["input_ids"])
    stats = engine.train_batch(batch, lambda logprobs, _, part: (logprobs.sum(), {}))
    assert stats["routed_ratio"] == pytest.approx((tokens - first - 1) / tokens)
    assert stats["unrouted_sequences"] == 1.0


def test_engine_when_no_token_has_a_route_then_logprobs_are_those_without(engine_of):
    engine = engine_of()
    batch = routed(engine)
    free = engine.forward({key: value for key, value in batch.items() if key != ROUTES})
    assert torch.equal(engine.forward({**batch, ROUTES: torch.full_like(batch[ROUTES], -1)}), free)


@pytest.mark.parametrize("other", [(slice(1), slice(None)), (slice(None), slice(1))])
def test_engine_when_routes_are_of_another_model_then_it_computes_without_and_says_so(
    engine_of, other
):
    engine = engine_of()
    batch = routed(engine)
    free = engine.forward({key: value for key, value in batch.items() if key != ROUTES})
    batch[ROUTES] = batch[ROUTES][:, *other]
    with capture_logs() as logs:
        assert torch.equal(engine.forward(batch), free)
    assert [each["event"] for each in logs] == ["routes_not_replayed"]
    stats = engine.train_batch(batch, lambda logprobs, _, part: (logprobs.sum(), {}))
    assert stats["routed_ratio"] == 0.0
    assert stats["unrouted_sequences"] == len(batch["cu_seqlens"]) - 1


def test_reference_when_a_batch_has_routes_then_it_chooses_itself(engine_of):
    engine = engine_of(RefConfig)
    batch = routed(engine)
    free = {key: value for key, value in batch.items() if key != ROUTES}
    assert torch.equal(engine.forward(batch), engine.forward(free))


def test_self_test_when_the_order_of_experts_has_a_meaning_then_the_family_is_not_replayed(
    engine_of, monkeypatch
):
    router = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter
    plain = router.forward

    @functools.wraps(plain)
    def forward(self, hidden):
        logits, weights, chosen = plain(self, hidden)
        return logits, weights * torch.tensor([1.0, 0.5]).to(weights), chosen

    monkeypatch.setattr(router, "forward", forward)
    refused = engine_of().model.routes.refused
    assert refused.startswith("its own choice, replayed, changes logprobs by")


def test_self_test_when_a_router_ignores_the_choice_then_the_family_is_not_replayed(
    engine_of, monkeypatch
):
    # As if a version of transformers chose by other means than topk.
    monkeypatch.setattr("areal_torch.engines.model.routes._TOPK", frozenset())
    engine = engine_of()
    assert engine.model.routes.refused == "none of its routers chose with topk over all experts"
    batch = routed(engine)
    free = {key: value for key, value in batch.items() if key != ROUTES}
    assert torch.equal(engine.forward(batch), engine.forward(free))
