"""Attributes that are other ones for a while."""

import pytest

from torch_join._base.attributes import setting


class Thing:
    kind = "a class's"

    @property
    def computed(self) -> str:
        return "computed"

    def __init__(self) -> None:
        self.own = "its own"


def test_an_object_has_its_own_again_and_its_class_s_where_it_had_none() -> None:
    thing = Thing()
    with setting(thing, own=1, kind=2):
        assert (thing.own, thing.kind) == (1, 2)
    assert (thing.own, thing.kind) == ("its own", "a class's")
    assert vars(thing) == {"own": "its own"}


def test_a_class_has_what_its_dictionary_held() -> None:
    held = vars(Thing)["computed"]
    with setting(Thing, computed=property(lambda _: "another")):
        assert Thing().computed == "another"
    assert vars(Thing)["computed"] is held


def test_an_error_sets_them_back_too() -> None:
    thing = Thing()
    with pytest.raises(KeyError), setting(thing, own=1):
        raise KeyError
    assert thing.own == "its own"
