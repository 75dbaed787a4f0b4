"""How an allocation string describes the trainer's ranks, and the products it refuses."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.config.allocation import Allocation, Layout, Sharing, of_ranks, parse_allocation
from areal.config.experiment import GRPOConfig, build_config
from areal.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "layout", "ranks", "per_share", "averaged"),
    [
        ("d1", Layout(1, 1), 1, 1, 1),
        ("d8", Layout(8, 8), 8, 1, 8),
        ("d16s8", Layout(16, 8), 16, 1, 16),
        ("d2s1", Layout(2, 1), 2, 1, 2),
        ("d4t2", Layout(4, 4, tensor=2), 8, 2, 4),
        ("d8t2c2e4", Layout(8, 8, tensor=2, context=2, experts=4), 32, 4, 16),
    ],
)
def test_layout_when_parsed_then_counts_ranks_and_prints_as_it_was(
    text, layout, ranks, per_share, averaged
):
    parsed = Layout.parse(text)
    assert parsed == layout
    assert str(parsed) == text
    assert (parsed.ranks, parsed.per_share, parsed.averaged) == (ranks, per_share, averaged)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("d6s4", "6 / 4 is not a whole number"),
        ("d2t2e8", "2 x c1 x t2 = 4: 4 / 8 is not a whole number"),
        ("d4s2e4", "2 / 4 is not a whole number"),
        ("d0", "needs d1 or more"),
        ("t2", "needs d1 or more"),
        ("d2t0", "t0: expected 1 or more"),
        ("d2d2", "each letter once"),
        ("d2p2", "no pipeline parallelism"),
        ("d2x2", "expected e.g. 'd8'"),
    ],
)
def test_layout_when_numbers_do_not_fit_then_shows_the_arithmetic_in_one_line(text, why):
    with pytest.raises(ConfigError) as caught:
        parse_allocation(f"sglang:d1+fsdp:{text}")
    line = str(caught.value)
    assert why in line
    assert text in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("text", "sizes", "why"),
    [
        ("d1t4", (28, 4, 0), None),
        ("d1t8", (28, 4, 0), "28 heads over t8 x c1 = 8 ranks: 28 / 8 is not a whole number"),
        ("d1t4c2", (32, 4, 0), "4 key and value heads over t4 x c2 = 8 ranks"),
        ("d8e8", (32, 4, 128), None),
        ("d6e6", (32, 4, 128), "128 experts over e6 ranks: 128 / 6 is not a whole number"),
        ("d8e8", (32, 4, 0), "the model has no experts"),
    ],
)
def test_layout_when_the_model_cannot_be_shared_then_shows_the_arithmetic(text, sizes, why):
    layout = Layout.parse(text)
    if why is None:
        layout.check_model(*sizes)
        return
    with pytest.raises(ConfigError) as caught:
        layout.check_model(*sizes)
    assert why in str(caught.value)


def test_layout_when_another_number_of_ranks_started_then_refuses():
    Layout.parse("d8t2").check_world(16)
    with pytest.raises(ConfigError, match="d8 x t2 x c1 = 16 ranks, but 8 were started"):
        Layout.parse("d8t2").check_world(8)


@pytest.mark.parametrize(("train", "layout"), [("d4t2", "d4t2"), ("d4s2", "d4s2"), ("d4", "")])
def test_config_when_built_then_engines_have_a_layout_that_is_not_plain(train, layout):
    overrides = [f"allocation_mode=sglang:d1+fsdp:{train}", "ref.path=models/base"]
    config = build_config(GRPOConfig, None, overrides)
    assert config.actor.layout == config.ref.layout == layout


def test_allocation_when_of_a_trainer_alone_then_there_are_no_servers():
    parsed = parse_allocation("fsdp:d4t2")
    assert (parsed.inference_replicas, parsed.trainer_ranks) == (0, 8)
    assert build_config(GRPOConfig, None, ["allocation_mode=fsdp:d1"]).offline
    assert not GRPOConfig().offline
    with pytest.raises(ConfigError, match="needs d1 or more"):
        parse_allocation("sglang:d0+fsdp:d1")


def test_layers_when_compiled_then_a_layout_with_t_is_refused():
    parse_allocation("sglang:d1+fsdp:d2c2").layout.check_compiled()
    said = (
        r"^trainer layout 'd2t2': actor.kernels=compile .*expected a layout without t, such as d4"
    )
    with pytest.raises(ConfigError, match=said):
        parse_allocation("sglang:d1+fsdp:d2t2").layout.check_compiled()


@pytest.mark.parametrize(
    ("text", "sharing"),
    [
        ("sglang:d2+fsdp:d1", Sharing.APART),
        ("fsdp:d1", Sharing.APART),
        ("sglang:d1|fsdp:d1", Sharing.FITTING),
        ("sglang:d2t2|fsdp:d4", Sharing.FITTING),
        ("sglang.d2p1t1|d2", Sharing.FITTING),
        ("sglang:d1|fsdp:d1@shared", Sharing.SHARED),
        ("sglang:d1|fsdp:d1@alternating", Sharing.ALTERNATING),
    ],
)
def test_allocation_when_gpus_are_shared_or_not_then_says_how(text, sharing):
    allocation = parse_allocation(text)
    assert allocation.sharing is sharing
    servers = allocation.inference_replicas * allocation.inference_gpus
    apart = 0 if sharing.together else servers
    assert allocation.gpus == allocation.trainer_ranks + apart
    if sharing.together:
        said = replace(allocation, sharing=Sharing.SHARED)
        assert parse_allocation(str(said)) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sglang:d2|fsdp:d1", "as many for servers (2 x 1 = 2) as trainer ranks (1)"),
        ("sglang:d1t2|fsdp:d1", "as many for servers (1 x 2 = 2) as trainer ranks (1)"),
        ("sglang:d1+fsdp:d1@shared", "'@shared': expected '|' in place of '+'"),
        ("sglang:d1|fsdp:d1@turns", "'@turns': expected @shared, @alternating, or nothing"),
        ("sglang:d1|fsdp:d1@", "'@': expected @shared, @alternating, or nothing"),
        ("sglang:d1|fsdp:d1@apart", "'@apart': expected @shared"),
        ("sglang:d1||fsdp:d1", "expected e.g."),
        ("sglang:d2d3+fsdp:d1", "servers 'd2d3': expected each letter once"),
        ("sglang:7d2+fsdp:d1", "servers '7d2': expected e.g. 'd4t2'"),
        ("sglang:d2t0+fsdp:d1", "servers 'd2t0': t0: expected 1 or more"),
        ("sglang.d2t+d1", "servers 'd2t': expected e.g. 'd4t2'"),
        (f"sglang:d1+fsdp:d{'9' * 5000}", "expected e.g. 'd8'"),
        ("|fsdp:d1", "expected e.g."),
        ("fsdp:d1@shared", "expected e.g."),
        ("Auto", "or 'auto'"),
    ],
)
def test_allocation_when_it_shares_wrongly_then_one_line(text, said):
    with pytest.raises(ConfigError) as refused:
        parse_allocation(text)
    assert said in str(refused.value)
    assert str(refused.value).startswith(f"allocation_mode {text!r}")


_COUNT = st.integers(1, 16)


@st.composite
def allocations(draw: st.DrawFn) -> Allocation:
    shard, copies, tensor, context = (draw(_COUNT) for _ in range(4))
    experts = draw(st.sampled_from([1, shard * tensor * context]))
    layout = Layout(shard * copies, shard, tensor, context, experts)
    sharing, width = draw(st.sampled_from(Sharing)), draw(_COUNT)
    servers = draw(st.integers(0, 16)) if sharing is Sharing.APART else layout.ranks
    if servers == 0 or sharing is not Sharing.APART:
        width = 1
    return Allocation(servers, layout, width, sharing)


@given(allocations())
def test_allocation_when_printed_then_it_is_parsed_to_the_same(allocation):
    assert parse_allocation(str(allocation)) == allocation


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("auto", "auto"),
        ("sglang.d12p1t1+d4p1t1", "sglang:d12+fsdp:d4"),
        ("fsdp:d16s8", "fsdp:d16s8"),
        ("sglang:d2t2|fsdp:d4@shared", "sglang:d2t2|fsdp:d4@shared"),
        ("sglang:d2t1|fsdp:d2", "sglang:d2|fsdp:d2"),
    ],
)
def test_allocation_when_printed_then_it_is_the_shortest_form(text, printed):
    assert str(parse_allocation(text)) == printed
    assert str(of_ranks(4, 2, 2, Sharing.FITTING)) == "sglang:d2t2|fsdp:d4"


def test_allocation_when_code_makes_one_then_it_is_printed_by_the_one_grammar():
    services = Path(__file__).parents[4] / "services"
    spelled = re.compile(r"(?:sglang|fsdp):d\{")  # in an f-string
    found = [f for f in services.glob("areal*/**/*.py") if spelled.search(f.read_text("utf-8"))]
    assert [f.name for f in found] == ["allocation.py"]
