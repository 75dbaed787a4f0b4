"""A recipe's own loss and advantages: as the built-in of the same formula, or one clear line."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.unit.areal_torch.engines.train_fixtures import make_batch

from areal import recipe_folder
from areal.config.losses import LOSSES
from areal.config.training import MicroBatchSpec, OptimizerConfig, PPOActorConfig
from areal.errors import ConfigError, InvalidInput, TrainingDiverged, WorkflowError
from areal.recipe import forget_recipe, load_recipe
from areal_torch.algorithms import losses, packing
from areal_torch.engines import failed_step
from areal_torch.engines.formulas import Formula
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model.heads import LogprobHead
from areal_torch.engines.ppo import PPOActor

HERE = Path(__file__).name
FOLDER = Path(__file__).parents[3] / "e2e" / "recipes" / "own_formula"


@pytest.fixture
def make_actor(model_dir):
    engines = []

    def make(*, loss=None, advantages=None, head=None, **options):
        options.setdefault("optimizer", OptimizerConfig(lr=1e-2))
        options.setdefault("reward_norm", "group/group")
        config = PPOActorConfig(path=str(model_dir), **options)
        engine = FSDPEngine(config)
        engine.initialize()
        engine.set_version(4)
        engines.append(engine)
        return PPOActor(config, engine, loss=loss, advantages=advantages, head=head)

    yield make
    for engine in reversed(engines):
        engine.destroy()


class NoEngine:
    """The loss of a batch that has its proximal logprobs asks no engine."""


def own_ppo(policy_logprobs, proximal_logprobs, advantages, *, low, high):
    """PPO's clipped surrogate, as a recipe would write it."""
    ratio = (policy_logprobs - proximal_logprobs).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    return torch.maximum(-advantages * ratio, -advantages * clipped), {"my/ratio": ratio}


def own_grpo(rewards, group_index):
    """Rewards less their group's mean, divided by its standard deviation."""
    found = torch.empty_like(rewards)
    for group in group_index.unique():
        mine = group_index == group
        values = rewards[mine]
        spread = values.std() + 1e-5 if values.std() > 0 else 1.0
        found[mine] = (values - values.mean()) / spread
    return found


def learned(actor, steps=3):
    rows = []
    for step in range(steps):
        batch = make_batch(seed=step)
        actor.compute_advantages(batch)
        rows.append(actor.ppo_update(batch))
    return dict(actor.engine.iter_full_tensors()), rows


def assert_same(ours, expected):
    assert ours[0].keys() == expected[0].keys()
    for name, tensor in ours[0].items():
        assert torch.equal(tensor, expected[0][name]), name
    for row, other in zip(ours[1], expected[1], strict=True):
        assert row["loss"] == other["loss"]
        assert row["grad_norm"] == other["grad_norm"]


def test_ppo_update_when_a_loss_has_ppos_formula_then_learns_as_ppo_to_the_bit(make_actor):
    options = {"ppo_n_minibatches": 3, "eps_clip": 0.1, "eps_clip_higher": 0.2}
    own = make_actor(loss=partial(own_ppo, low=0.1, high=0.2), **options)
    ours, built_in = learned(own), learned(make_actor(**options))
    assert_same(ours, built_in)
    assert ours[1][-1]["my/ratio"] == pytest.approx(built_in[1][-1]["ppo_ratio"], rel=1e-6)
    assert built_in[1][-1]["clip_ratio"] > 0
    assert built_in[1][-1]["behavior_weight"] != 1.0


def test_ppo_update_when_a_recipe_folder_has_the_formulas_then_learns_to_the_bit(make_actor):
    options = {"ppo_n_minibatches": 3, "eps_clip": 0.1, "eps_clip_higher": 0.2}
    recipe = load_recipe(recipe_folder.pack(FOLDER), "own_formula")
    try:
        found = []
        for high in (0.2, 0.0):
            loss = partial(recipe.clipped, low=0.1, high=high)
            found.append(learned(make_actor(loss=loss, advantages=recipe.of_the_group, **options)))
    finally:
        forget_recipe(recipe)
    same, other = found
    assert_same(same, learned(make_actor(**options)))
    assert all("my/ratio" in row for row in same[1])
    assert other[1][-1]["loss"] != same[1][-1]["loss"], "a constant has no effect"


def test_ppo_update_when_kl_and_aggregation_are_set_then_hold_for_an_own_loss_too(make_actor):
    options = {"kl_loss_ctl": 0.1, "entropy_ctl": 0.01, "loss_aggregation": "sequence_mean"}
    found = []
    for loss in (partial(own_ppo, low=0.2, high=0.2), None):
        actor = make_actor(loss=loss, **options)
        batch = make_batch()
        batch["reference_logprobs"] = batch["behavior_logprobs"] * 1.1
        actor.compute_advantages(batch)
        row = actor.ppo_update(batch)
        found.append((dict(actor.engine.iter_full_tensors()), [row]))
    assert_same(*found)
    assert found[0][1][0]["kl"] == found[1][1][0]["kl"]


@pytest.mark.parametrize("name", LOSSES)
def test_ppo_update_when_given_a_built_in_loss_per_call_then_is_that_loss_type(make_actor, name):
    constants = dict.fromkeys(LOSSES[name].constants, 1.7)
    built_in = make_actor(loss_type=name, loss_constants=constants, ppo_n_minibatches=2)
    other = make_actor(ppo_n_minibatches=2)
    function = partial(getattr(losses, LOSSES[name].function), **constants)
    found = []
    for actor, loss in ((built_in, None), (other, function)):
        batch = make_batch()
        actor.compute_advantages(batch)
        row = actor.ppo_update(batch, loss)
        found.append((dict(actor.engine.iter_full_tensors()), [row]))
    assert_same(*found)


def test_compute_advantages_when_own_ones_have_grpos_formula_then_are_equal(make_actor):
    actor = make_actor()
    expected, ours = make_batch(groups=4), make_batch(groups=4)
    actor.compute_advantages(expected)
    actor.compute_advantages(ours, own_grpo)
    assert torch.equal(ours["advantages"], expected["advantages"])
    assert torch.equal(ours["returns"], expected["returns"])
    per_token = make_batch(groups=4)
    actor.compute_advantages(per_token, lambda token_rewards: token_rewards.cumsum(0))
    assert bool((per_token["advantages"][~per_token["loss_mask"]] == 0).all())


def test_loss_when_micro_batches_have_no_loss_tokens_then_what_it_returns_there_is_nothing(
    make_actor,
):
    def mean_free(policy_logprobs, loss_mask):
        return -policy_logprobs / loss_mask.sum(), {"my/low_max": policy_logprobs - 100.0}

    actor = make_actor(loss=mean_free, mb_spec=MicroBatchSpec(max_tokens_per_mb=10))
    batch = make_batch(groups=2)
    first = slice(0, int(batch["cu_seqlens"][1]))
    batch["loss_mask"][first] = False
    actor.compute_advantages(batch)
    row = actor.ppo_update(batch)
    assert row["skipped_steps"] == 0.0
    assert math.isfinite(row["loss"])
    assert row["my/low_max"] < -50.0


def test_loss_when_the_recipe_adds_keys_and_a_head_then_gets_them(make_actor):
    seen = []

    def uses_all(policy_logprobs, my_scores, sequence_level, cu_seqlens):
        seen.append((tuple(my_scores.shape), len(sequence_level) == len(cu_seqlens) - 1))
        return -policy_logprobs * my_scores[:, 0]

    actor = make_actor(
        loss=uses_all, head=LogprobHead(0.5), mb_spec=MicroBatchSpec(max_tokens_per_mb=60)
    )
    batch = make_batch(groups=4)
    actor.compute_advantages(batch)
    count = len(batch["input_ids"])
    batch["my_scores"] = torch.ones(count, 3)
    batch["sequence_level"] = torch.arange(len(batch["group_index"]))
    row = actor.ppo_update(batch)
    assert len(seen) > 1
    assert sum(shape[0] for shape, _ in seen) == count
    assert all(shape[1] == 3 and fits for shape, fits in seen)
    cold = -actor.engine.forward(batch, LogprobHead(0.5))
    assert row["loss"] == pytest.approx(float(cold.sum() / batch["loss_mask"].sum()), rel=0.5)
    for key, wrong in (("my_scores", torch.ones(3)), ("sequence_level", torch.ones(2)), ("x", 1)):
        with pytest.raises(InvalidInput, match=f"batch..{key}"):
            packing.check_batch({**batch, key: wrong})


def test_loss_when_a_positional_only_parameter_has_a_default_then_the_others_keep_their_places():
    def wall(policy_logprobs, tau=0.5, proximal_logprobs=None, advantages=None, /):
        return policy_logprobs, tau, proximal_logprobs, advantages

    offered = {"advantages": 3.0, "policy_logprobs": 1.0, "proximal_logprobs": 2.0}
    assert Formula(wall, "loss")(offered) == (1.0, 0.5, 2.0, 3.0)
    assert Formula(partial(wall, 7.0), "loss")(offered) == (7.0, 0.5, 2.0, 3.0)


def test_ppo_update_when_the_batch_has_a_name_that_the_loss_gets_elsewhere_then_refused(make_actor):
    def clipped(policy_logprobs, eps_clip):
        return -policy_logprobs * eps_clip

    actor = make_actor(loss=clipped)
    batch = make_batch()
    actor.compute_advantages(batch)
    batch["eps_clip"] = torch.ones(len(batch["input_ids"]))
    with pytest.raises(InvalidInput, match=r"clipped \(.*'eps_clip': the batch has this key"):
        actor.ppo_update(batch)
    del batch["eps_clip"]
    batch["entropies"] = torch.ones(len(batch["input_ids"]))
    with pytest.raises(InvalidInput, match=r"batch\['entropies'\]: a loss gets the policy's own"):
        actor.ppo_update(batch)


def test_ppo_update_when_the_loss_does_not_reach_the_model_then_refused_in_one_line(make_actor):
    tau = torch.nn.Parameter(torch.ones(()))
    actor = make_actor(loss=lambda advantages: -advantages * tau)
    batch = make_batch()
    actor.compute_advantages(batch)
    with pytest.raises(InvalidInput, match="a gradient, but not by the model's weights"):
        actor.ppo_update(batch)
    actor.ppo_update(batch, lambda policy_logprobs: -policy_logprobs)  # nothing is left of it


# -- losses that cannot be used -----------------------------------------------------------------


def scalar(policy_logprobs):
    return -policy_logprobs.mean()


def detached(policy_logprobs):
    return -policy_logprobs.detach()


def not_a_tensor(policy_logprobs):
    return 1.0


def misspelt(policy_logprob):
    return -policy_logprob


def raises(policy_logprobs):
    return policy_logprobs @ torch.ones(7)


def in_place(policy_logprobs, advantages):
    advantages.mul_(2)
    return -policy_logprobs * advantages


def taken_name(policy_logprobs):
    return -policy_logprobs, {"loss": policy_logprobs}


def scalar_statistic(policy_logprobs):
    return -policy_logprobs, {"my/x": policy_logprobs.mean()}


def nothing(policy_logprobs):
    pass


async def a_coroutine(policy_logprobs):
    return -policy_logprobs


BAD = {
    scalar: "shape \\(\\): expected one number per token",
    detached: "no gradient",
    not_a_tensor: "returned float",
    misspelt: "'policy_logprob'.*did you mean 'policy_logprobs'",
    raises: "RuntimeError.*test_own_loss.py:\\d+\\)$",
    in_place: "changed advantages in place",
    taken_name: "'loss' is a metric of every step",
    scalar_statistic: "statistic 'my/x' has shape",
    nothing: "returned NoneType",
    a_coroutine: "returned coroutine",
}


@pytest.mark.parametrize("loss", BAD, ids=lambda each: each.__name__)
def test_loss_when_it_cannot_be_used_then_one_line_names_its_file_and_line(loss):
    actor = PPOActor(PPOActorConfig(), NoEngine(), loss=loss)
    policy = torch.tensor([0.0, -1.0], requires_grad=True)
    batch = {
        "behavior_logprobs": torch.tensor([0.0, -2.0]),
        "advantages": torch.tensor([0.0, 1.0]),
        "loss_mask": torch.tensor([False, True]),
        "cu_seqlens": torch.tensor([0, 2], dtype=torch.int32),
    }
    with pytest.raises((InvalidInput, WorkflowError), match=BAD[loss]) as caught:
        actor._loss(policy, torch.zeros(2), batch)
    line = loss.__code__.co_firstlineno
    assert f"loss {loss.__name__} (" in str(caught.value)
    assert f"{HERE}:{line})" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda rewards: rewards / 0.0 * 0.0, "returned nan for"),
        (lambda rewards: rewards.double() * 0 + 1e300, "returned 1e\\+300 for"),
        (lambda rewards: rewards[:3], "returned shape \\(3,\\): expected \\[15\\]"),
        (lambda rewards: rewards.tolist(), "returned list"),
        (lambda rewards: rewards.nothing, "AttributeError.*nothing"),
        (lambda reward: reward, "did you mean 'rewards'"),
    ],
)
def test_advantages_when_they_cannot_be_used_then_one_line_names_file_and_line(function, said):
    actor = PPOActor(PPOActorConfig(), NoProcesses(), advantages=function)
    with pytest.raises((InvalidInput, WorkflowError), match=said) as caught:
        actor.compute_advantages(make_batch())
    assert f"{HERE}:{function.__code__.co_firstlineno}" in str(caught.value)


class NoProcesses:
    process_group = None
    reduce_stats = None


def test_advantages_when_the_kl_penalty_would_be_lost_then_refused():
    config = PPOActorConfig(kl_ctl=0.1)
    with pytest.raises(InvalidInput, match=r"kl_ctl=0\.1 would have no effect"):
        PPOActor(config, NoProcesses(), advantages=own_grpo)


def test_loss_constants_when_the_loss_has_no_such_one_then_names_it():
    with pytest.raises(ConfigError, match=r"'tau'.*sapo; expected one of tau_negative, tau_pos"):
        PPOActor(PPOActorConfig(loss_type="sapo", loss_constants={"tau": 1.0}), NoEngine())
    with pytest.raises(ConfigError, match="ppo has no constants of its own"):
        PPOActor(PPOActorConfig(loss_constants={"tau_positive": 1.0}), NoEngine())
    with pytest.raises(InvalidInput, match="loss='ppo': expected a function"):
        PPOActor(PPOActorConfig(), NoEngine(), loss="ppo")


RECIPE = b"""
def my_loss(policy_logprobs, advantages, *, scale):
    return -advantages * policy_logprobs * scale
"""


def test_ppo_update_when_an_own_loss_is_not_finite_then_named_kept_and_taken_again(
    make_actor, tmp_path, model_dir
):
    module = load_recipe(RECIPE, "my_recipe.py")
    loss = partial(module.my_loss, scale=math.inf)
    actor = make_actor(loss=loss, optimizer=OptimizerConfig(max_skipped_steps=1))
    batch = make_batch(groups=3)
    actor.compute_advantages(batch)
    with pytest.raises(TrainingDiverged, match=r"own loss my_loss \(my_recipe.py:2\)") as caught:
        actor.ppo_update(batch)
    session = Session(tmp_path)
    settings = failed_step.settings_of(actor.config, 1.0, failed_step.describe_loss(actor))
    failed_step.keep(caught.value, session, actor=settings)
    (said,) = failed_step.replay(tmp_path / "failed_step_1", model_dir)
    assert "the loss is" in said
    # What the kept recipe says is what is taken again.
    info = tmp_path / "failed_step_1" / "failure.json"
    info.write_text(info.read_text().replace("Infinity", "1.0"))
    (said,) = failed_step.replay(tmp_path / "failed_step_1", model_dir)
    assert "finite here" in said


HELPER = """
class Wall:
    def __call__(self, policy_logprobs):
        return policy_logprobs * float("nan")

    def bound(self, policy_logprobs):
        return policy_logprobs * float("nan")

def pulled(scale, policy_logprobs):
    return policy_logprobs * scale
"""


def kept_failure(make_actor, folder, loss):
    actor = make_actor(loss=loss, optimizer=OptimizerConfig(max_skipped_steps=1))
    batch = make_batch(groups=3)
    actor.compute_advantages(batch)
    with pytest.raises(TrainingDiverged) as caught:
        actor.ppo_update(batch)
    settings = failed_step.settings_of(actor.config, 1.0, failed_step.describe_loss(actor))
    failed_step.keep(caught.value, Session(folder), actor=settings)
    return folder / "failed_step_1"


def test_ppo_update_when_a_loss_of_a_helper_module_is_not_finite_then_taken_again(
    make_actor, tmp_path, model_dir
):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "recipe.py").write_text("from .walls import pulled, Wall\ndef main(argv): pass\n")
    (mine / "walls.py").write_text(HELPER)
    recipe = load_recipe(recipe_folder.pack(mine), "mine")
    try:
        loss = partial(recipe.pulled, math.inf)
        (said,) = failed_step.replay(kept_failure(make_actor, tmp_path / "a", loss), model_dir)
        assert "the loss is" in said
        for number, loss in enumerate((recipe.Wall(), recipe.Wall().bound)):
            folder = kept_failure(make_actor, tmp_path / str(number), loss)
            with pytest.raises(InvalidInput, match=r"<Wall object> .*at the top level"):
                failed_step.replay(folder, model_dir)
    finally:
        forget_recipe(recipe)


class Session:
    step, incarnation, world_size, rank, batch_tasks = 0, 1, 1, 0, ()

    def __init__(self, run_dir):
        self.config = type("Config", (), {"run_dir": run_dir})
