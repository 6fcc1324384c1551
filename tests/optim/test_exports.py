import atoll.optim


def test_exported_members():
    public = {
        name
        for name, value in vars(atoll.optim).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("atoll.")
    }
    assert sorted(public | {"CELL"}) == sorted(atoll.optim.__all__)


def test_exports_are_sorted_and_documented():
    names = atoll.optim.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name.islower(), name))
    assert all(getattr(atoll.optim, name).__doc__ for name in names if name != "CELL")
