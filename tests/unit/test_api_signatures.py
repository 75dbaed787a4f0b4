"""What we call of torch and transformers exists, with these arguments, in every supported version.

`tools/api_signatures.json` has the signatures of the versions' own sources, so nothing is installed
and no network is needed.
"""

import ast
import json
from functools import cache

import pytest
from tools.api_signatures import FILE, FOLDERS, VERSIONS, Sources, accepts
from tools.api_uses import Use, _Reader, uses

from areal_torch.engines.versions import SUPPORTED

WRITTEN = json.loads(FILE.read_text())
PLANS = "layouts with t or e are refused before 5.23 (plans._check_version)"
HANDLED = {
    "transformers.PreTrainedModel.activation_checkpointing_enable": "getattr, else the older name",
    "transformers.PreTrainedModel.score": "only models with a scalar head have it",
    "transformers.PreTrainedModel._weight_conversions": "set when a model is loaded, also by us",
    "transformers.PreTrainedModel._known_conversions": "set by us when a model is built",
    "transformers.PreTrainedModel._left_on_disk": "set by us when a model is built",
    "transformers.PreTrainedModel._names_in_files": "set by us when a model is loaded",
    "transformers.distributed.tensor_parallel.apply_tensor_parallelism": PLANS,
    "transformers.distributed.expert_parallel.apply_expert_parallelism": PLANS,
    "transformers.distributed.parallel_utils.replace_layer_number_by_wildcard": PLANS,
    "transformers.distributed.parallel_utils._AllReduceBackward": PLANS,
    "transformers.distributed.parallel_utils._AllReduceBackward.apply": PLANS,
}
"""Names that some supported version lacks or takes otherwise -> what the code does there."""


@cache
def our_uses():
    """Reads all of our code, for seconds: not when tests are collected."""
    return uses(FOLDERS)


def faults(use):
    """(version, what it lacks) for one use."""
    column = WRITTEN["signatures"].get(use.name, "unknown")
    assert column != "unknown", f"{use.where} uses {use.name}: run `make signatures` to look it up"
    package = "torch" if use.name.startswith("operator ") else use.name.split(".")[0]
    for version in VERSIONS[package]:
        signatures = column[version] if isinstance(column, dict) else column
        if signatures is None:
            yield version, "does not have it"
        elif signatures and (use.positional is not None or use.keywords):
            reasons = [accepts(signature, use) for signature in signatures]
            if None not in reasons:
                yield version, reasons[0]


def test_uses_when_compared_with_every_supported_version_then_each_has_them():
    found = [
        f"{use.where}: {use.name}, {version}: {why}"
        for use in our_uses()
        for version, why in faults(use)
        if use.name not in HANDLED
    ]
    assert not found, "\n".join(found)


def test_handled_when_a_version_is_no_longer_supported_then_no_entry_is_left_behind():
    unsupported = {use.name for use in our_uses() if list(faults(use))}
    assert set(HANDLED) <= unsupported


def test_versions_when_looked_up_then_one_of_each_supported_minor():
    assert {package: list(versions) for package, versions in VERSIONS.items()} == (
        WRITTEN["versions"]
    )
    for package, (oldest, newest) in SUPPORTED.items():
        major, first = oldest.split(".")
        minors = [f"{major}.{n}" for n in range(int(first), int(newest.split(".")[1]) + 1)]
        assert [version.rpartition(".")[0] for version in VERSIONS[package]] == minors


def call(text):
    """The one call of a dotted name in a line of code."""
    tree = ast.parse(f"import torch, transformers\n{text}")
    found = _Reader("here", trains=True).read(tree)
    return next(use for use in found if use.positional is not None or use.keywords)


@pytest.mark.parametrize(
    ("text", "version", "why"),
    [
        # The calls of before: all bfloat16 models were refused with torch 2.11.
        (
            "torch.nn.attention.varlen.varlen_attn(q, k, v, b, b, n, n, scale=1, enable_gqa=True)",
            "2.11.0",
            "no argument enable_gqa",
        ),
        # And none could be checkpointed, nor saved, with transformers 5.17.
        ("hf.activation_checkpointing_enable(options)", "5.17.0", "does not have it"),
        ("hf.gradient_checkpointing_enable(options)", None, None),
        ("torch.mm(a, b, out_dtype=wide)", None, None),
        ("torch.mm(a, b, out_type=wide)", "2.11.0", "no argument out_type"),
        ("torch.mm(a)", "2.14.1", "needs mat2"),
        ("torch.distributed.new_group(*ranks, group_desc='x')", None, None),
        ("torch.compile(f, True, True)", "2.13.0", "takes 1 positional arguments, not 3"),
    ],
)
def test_call_when_a_version_does_not_take_it_then_named(text, version, why):
    found = dict(faults(call(text)))
    if version is None:
        assert not found
    else:
        assert found[version] == why


@pytest.mark.parametrize(
    ("signature", "positional", "keywords", "why"),
    [
        ("a, b=, *, c=", 1, ("c",), None),
        ("a, b=, *, c=", 3, (), "takes 2 positional arguments, not 3"),
        ("a, b=, *, c", 1, (), "needs c"),
        ("a, /, b", 1, ("a", "b"), "no argument a"),
        ("a, *rest, c=", 5, ("c",), None),
        ("a, **others", 1, ("anything",), None),
        ("a, b", None, ("b",), None),
    ],
)
def test_accepts_when_a_call_fits_or_not_then_says_why(signature, positional, keywords, why):
    assert accepts(signature, Use("f", "here", positional, keywords)) == why


class Wheel:
    """A wheel of a few files."""

    def __init__(self, **files):
        self.files = {f"{name}.py": text for name, text in files.items()}

    def namelist(self):
        return list(self.files)

    def read(self, name):
        return self.files[name].encode()


def test_sources_when_names_are_imported_inherited_or_conditional_then_found():
    sources = Sources(
        Wheel(
            **{
                "torch/__init__": "from .deep import *\nfrom torch.deep import f as g\n",
                "torch/deep": (
                    "try:\n    from numpy import array\nexcept ImportError:\n    pass\n"
                    "class A:\n    def __init__(self, x, *, y=1): self.z = x\n"
                    "    @staticmethod\n    def s(a): ...\n    def m(self, b, /, *c): ...\n"
                    "class B(A):\n    kind = 1\n"
                    "if True:\n    def f(a, b=1, **c): ...\n"
                ),
            }
        )
    )
    assert sources.signatures("torch.B") == ["x, *, y="]
    assert sources.signatures("torch.B.s") == ["a"]
    assert sources.signatures("torch.B.m") == ["b, /, *c"]
    assert sources.signatures("torch.B.z") == []
    assert sources.signatures("torch.B.kind") == []
    assert sources.signatures("torch.g") == ["a, b=, **c"]
    assert sources.signatures("torch.deep.array") == []
    assert sources.signatures("torch.B.gone") is None
    assert sources.signatures("torch.gone") is None
