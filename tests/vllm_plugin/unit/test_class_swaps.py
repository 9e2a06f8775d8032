"""Objects change their class and get it back; a class is compared with what is expected."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytest
from kvtxn.integrations.vllm_plugin.seam.hooks import (
    is_swapped,
    mix_in,
    restore_class,
    swap_class,
)

from kvtxn import KVTxnError


class Own:
    """Stands for a class of vLLM's."""

    def step(self):
        return ["own"]


class Louder:
    def step(self):
        return ["louder", *super().step()]


class First:
    def step(self):
        return ["first", *super().step()]


def test_mixins_come_first_and_go_again():
    """Mixins come first, in their order; the class and its other objects stay as they are."""
    before = dict(vars(Own))
    target, other = Own(), Own()
    swap_class(target, First, Louder)
    assert is_swapped(target)
    assert target.step() == ["first", "louder", "own"]
    assert isinstance(target, Own)
    assert other.step() == ["own"]
    restore_class(target)
    assert type(target) is Own
    assert not is_swapped(target)
    assert vars(target) == {}
    assert dict(vars(Own)) == before


def test_what_a_mixin_needs_comes_and_goes_with_it():
    target = Own()
    target.kept = 1
    undo = mix_in(target, Louder, needed=2)
    assert target.step() == ["louder", "own"]
    assert vars(target) == {"kept": 1, "needed": 2}
    undo()
    assert type(target) is Own
    assert vars(target) == {"kept": 1}


def test_a_class_with_an_abstract_base_is_swapped_too():
    """Objects of a class with an abstract base, which Python lays out differently, are swapped."""

    class Abstract(ABC):
        """Stands for an interface of vLLM's."""

        @abstractmethod
        def step(self):
            """As the client says."""

    class Client(Abstract):
        def step(self):
            return ["client"]

    class Second(Louder):
        def step(self):
            return ["second", *super().step()]

    client = Client()
    swap_class(client, First, Second)
    assert isinstance(client, Client)
    assert client.step() == ["first", "second", "louder", "client"]
    restore_class(client)
    assert (type(client), client.step()) == (Client, ["client"])


def test_objects_of_a_class_share_one_subclass():
    """An engine has a layer object per layer, and needs no class for each."""
    one, two = Own(), Own()
    swap_class(one, Louder)
    swap_class(two, Louder)
    assert type(one) is type(two)


def test_nothing_is_swapped_twice():
    """A second hook would call the first one's methods as the object's own."""
    target = Own()
    swap_class(target, Louder)
    with pytest.raises(KVTxnError, match="was swapped before"):
        swap_class(target, First)
    assert target.step() == ["louder", "own"]


@pytest.mark.parametrize("later", [False, True])
def test_only_our_own_class_is_taken_away(later):
    """``restore_class`` refuses an object's own class, and a class put over the swapped one."""
    target = Own()
    if later:
        swap_class(target, Louder)
        target.__class__ = type("Theirs", (type(target),), {})
    found = type(target)
    with pytest.raises(KVTxnError, match="not a class that swap_class made"):
        restore_class(target)
    assert type(target) is found
