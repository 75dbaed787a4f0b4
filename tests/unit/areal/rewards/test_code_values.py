"""Values between tests and code under test: what is sent is what arrives, and nothing else."""

from __future__ import annotations

import datetime
import decimal
import fractions
import json
import os
import threading
from collections import Counter, OrderedDict, deque
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.rewards.code import final_code
from areal.rewards.code_tests.far import OPERATIONS
from areal.rewards.code_tests.values import Table
from areal.rewards.code_tests.wire import Peer

KEYS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    *(st.binary(), st.tuples(st.integers(), st.text()), st.frozensets(st.integers())),
)
SCALARS = st.one_of(
    *(KEYS, st.complex_numbers(allow_nan=False), st.integers().map(lambda n: n << 200)),
    *(
        st.decimals(allow_nan=False),
        st.fractions(),
        st.datetimes().map(lambda when: when.replace(fold=0)),
        st.dates(),
        st.timedeltas(),
    ),
    *(st.binary().map(bytearray), st.sampled_from([..., NotImplemented, range(3), slice(1, None)])),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        *(st.lists(inner), st.dictionaries(KEYS, inner), st.lists(inner).map(tuple)),
        *(st.sets(KEYS), st.lists(inner).map(deque), st.lists(KEYS).map(Counter)),
        st.dictionaries(KEYS, inner).map(OrderedDict),
    ),
    max_leaves=20,
)


def sent(value: Any) -> Any:
    """The value as the other side has it."""
    here, there = Table(None), Table(None)
    packed = here.pack(value)
    message = json.loads(json.dumps([packed, here.rest(0)]))
    there.add(message[1])
    return there.unpack(message[0])


def shown(value: Any) -> str:
    """Types and contents; sets in an order of their own."""
    if isinstance(value, set | frozenset):
        return f"{type(value)}{sorted(map(shown, value))}"
    if isinstance(value, dict):
        return f"{type(value)}{[(shown(key), shown(each)) for key, each in value.items()]}"
    if isinstance(value, list | tuple | deque):
        return f"{type(value)}{[shown(each) for each in value]}"
    return f"{type(value)}{value!r}"


@given(VALUES)
def test_value_when_it_is_sent_then_the_same_arrives(value: Any) -> None:
    assert shown(sent(value)) == shown(value)


def test_list_when_it_is_in_a_value_twice_then_it_arrives_as_one() -> None:
    row: list[Any] = [1]
    arrived = sent([row, row, {"row": row}])
    assert arrived[0] is arrived[1] is arrived[2]["row"]
    row.append(row)
    assert (arrived := sent(row))[1] is arrived
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert type(sent(deep)) is list


NONSENSE = st.recursive(
    st.one_of(st.none(), st.integers(-2, 3), st.text(max_size=3), st.sampled_from(["ref", "int"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)


@given(NONSENSE)
def test_nonsense_when_it_arrives_then_it_is_a_plain_value_or_an_ordinary_exception(data) -> None:
    table = Table(None)
    try:
        table.add([["list", [], None]])
        found = table.unpack(data)
    except Exception:
        return
    assert type(found).__module__ in ("builtins", "collections")


class End(Peer):
    """An end that does what it is asked, in a thread of this process."""

    believes = True

    def serve(self, do: str, arguments: list[Any]) -> Any:
        return OPERATIONS[do](*arguments)

    def pack_other(self, table: Table, value: Any) -> Any:
        return self.pack_far(value)

    def operators(self, shape: dict[str, Any]) -> bool:
        return True

    def broken(self, why: str) -> NoReturn:
        raise EOFError(why)


@pytest.fixture
def ends():
    (read_a, write_a), (read_b, write_b) = os.pipe(), os.pipe()
    here, there = End(read_a, write_b), End(read_b, write_a)

    def answer() -> None:
        with pytest.raises(EOFError):
            there.answer_all()

    thread = threading.Thread(target=answer)
    thread.start()
    yield here, there
    os.close(write_b)
    thread.join(30)
    for fd in (read_a, write_a, read_b):
        os.close(fd)


def test_arguments_when_the_other_side_changes_them_then_they_change_here(ends) -> None:
    here, there = ends

    def change(rows: list[list[int]], names: dict[str, Any], seen: set[int]) -> list[int]:
        rows[0].append(4)
        rows.append(rows[0])
        names["new"] = seen
        seen.add(1)
        return rows[0]

    function = here.far(there.export(change), there.pack_far(change)[2])
    first, names, seen = [3], {}, set()
    rows = [first, [True]]
    assert function(rows, names, seen) is first
    assert rows == [[3, 4], [True], [3, 4]]
    assert rows[2] is first
    assert names == {"new": {1}}
    assert names["new"] is seen


def test_call_when_the_other_side_raises_then_the_exception_has_its_class_and_text(ends) -> None:
    here, there = ends

    class OddError(LookupError):
        pass

    def fail(text: str) -> None:
        raise OddError(text)

    function = here.far(there.export(fail), there.pack_far(fail)[2])
    there.resolve = lambda module, name: None
    here.resolve = lambda module, name: {"LookupError": LookupError}[name]
    with pytest.raises(LookupError, match="odd number") as caught:
        function("odd number")
    assert type(caught.value).__name__ == "OddError"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("a\n```python\nx = 1\n```\nprints\n```text\n1\n```\nend", "x = 1\n"),
        ("```Python3\nx = 1\n```\n```bash\nls\n```", "x = 1\n"),
        ("```py\nx = '''\n````\n'''\n", "x = '''\n"),
        ("````python\n'''\n```\nx\n```\n'''\n````\n", "'''\n```\nx\n```\n'''\n"),
        ("Cut off:\n```python\nx = 1\n", "x = 1\n"),
        ("  ```python\n  x = 1\n  ```", "x = 1\n"),
        ("1. So:\n\n   ```python\n   if x:\n       y = 1\n\n   ```\n", "if x:\n    y = 1\n\n"),
        ("- ```py\n  x = '''\n y\n  '''\n  ```\n", "x = '''\ny\n'''\n"),
        ("\t```python\n\tx = 1\n", "x = 1\n"),
        ("```python\nx = 1\n```\nOutput:\n```\n5\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nRun it:\n```\npython x.py\n```", "x = 1\n"),
        ("```py\nx = 1\n```\n```python\nx = 2\n```\n```py\nx = 3\n```\n```\n4\n```", "x = 3\n"),
        ("```\nx = 1\n```\n```\nx = 2\n```", "x = 2\n"),
        ("<think>\n```python\nx = 1\n```\n</think>\n```python\nx = 2\n```", "x = 2\n"),
        ("<think>\n```python\nx = 1\n```\n</think>No idea.", "No idea."),
        ("```python\nx = 1\n```\n</think>No idea.", "No idea."),
        ("<think>\n```python\nx = 1\n```\nHm", ""),
        ("<think>\nx = 1", ""),
        ("Use `x` or ```y``` here", "Use `x` or ```y``` here"),
    ],
)
def test_code_when_text_has_fences_then_the_code_is_the_last_block_of_python(text, code) -> None:
    assert final_code(text) == code


def test_values_when_they_are_of_the_standard_library_then_they_are_copied() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=2))
    for value in (
        *(decimal.Decimal("NaN"), fractions.Fraction(1, 3), deque([1], maxlen=2), {}.keys()),
        *(datetime.datetime(2024, 1, 2, tzinfo=zone), {1: [2]}.items(), float("nan")),
    ):
        assert repr(sent(value)) == repr(value)
