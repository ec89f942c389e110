"""Attributes that are other ones for a while."""

import pytest

from torch_join._base.attributes import setting


class Thing:
    kind = "a class's"

    def __init__(self) -> None:
        self.own = self._kept = "its own"

    @property
    def computed(self) -> str:
        return self._kept

    @computed.setter
    def computed(self, value: str) -> None:
        self._kept = value


def test_an_object_has_its_own_again_and_its_class_s_where_it_had_none() -> None:
    thing = Thing()
    with setting(thing, own=1, kind=2):
        assert (thing.own, thing.kind) == (1, 2)
    assert (thing.own, thing.kind) == ("its own", "a class's")
    assert vars(thing) == {"own": "its own", "_kept": "its own"}


def test_a_property_is_set_and_not_deleted() -> None:
    thing = Thing()
    with setting(thing, computed="another"):
        assert thing.computed == "another"
    assert thing.computed == "its own"


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
