import pytest

from areal_weight_sync.index import Changes


def test_since_when_servers_change_then_the_newest_change_of_each_after_that_point():
    changes = Changes()
    marks = [changes.as_of]
    for server in "abac":
        changes.mark(server)
        marks.append(changes.as_of)
    found = [changes.since(mark) for mark in marks]
    assert found == [["c", "a", "b"], ["c", "a", "b"], ["c", "a"], ["c"], []]


@pytest.mark.parametrize(
    "as_of", ["", "x", "x:1", ":", "{life}:-1", "{life}:9", "{life}:", "{life}:٣"]
)
def test_since_when_the_mark_is_not_of_this_life_then_everything_must_be_read(as_of):
    changes = Changes()
    changes.mark("a")
    assert changes.since(as_of.format(life=changes.as_of.partition(":")[0])) is None


def test_since_when_more_have_changed_than_is_remembered_then_everything_must_be_read():
    changes = Changes(remembered=3)
    begun = changes.as_of
    for server in "abc":
        changes.mark(server)
    assert changes.since(begun) == ["c", "b", "a"]
    later = changes.as_of
    changes.mark("d")
    assert changes.since(begun) is None
    assert changes.since(later) == ["d"]


def test_since_when_two_coordinators_then_neither_knows_the_others_marks():
    one, other = Changes(), Changes()
    one.mark("a")
    other.mark("a")
    assert other.since(one.as_of) is None
