import pytest

from atoll.coordinator.run.releases import is_newer


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("0.2.0", "0.1.0"), ("0.10", "0.9.9"), ("1", "0.99.1"), ("0.1.0.1", "0.1.0")],
)
def test_of_two_versions_one_is_newer(theirs, ours):
    assert is_newer(theirs, ours)
    assert not is_newer(ours, theirs)


@pytest.mark.parametrize("theirs", ["0.2.0", "0.2", "0.2.0rc1", "", "latest", "-1", "0." * 1000])
def test_nothing_else_is_newer(theirs):
    assert not is_newer(theirs, "0.2.0")


def test_a_version_that_cannot_be_read_here_is_never_old():
    assert not is_newer("9.9", "unknown")
