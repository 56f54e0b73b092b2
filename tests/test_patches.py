"""Patches: whatever was changed is back afterwards, in the order that makes that true."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import ClassVar

import pytest

from ranklens_core.patches import Patches


def test_set_restores_a_value_and_deletes_a_new_one() -> None:
    module = types.ModuleType("some_module")
    module.old = "before"  # type: ignore[attr-defined]
    patches = Patches()
    patches.set(module, "old", "after")
    patches.set(module, "new", 1)
    assert (module.old, module.new) == ("after", 1)
    patches.undo()
    assert module.old == "before"
    assert not hasattr(module, "new")


def test_the_same_attribute_set_twice_returns_to_the_first_value() -> None:
    class Target:
        value = 0

    patches = Patches()
    for value in (1, 2, 3):
        patches.set(Target, "value", value)
    patches.undo()
    assert Target.value == 0


def test_an_inherited_method_is_deleted_again_not_copied_down() -> None:
    class Base:
        def name(self) -> str:
            return "base"

    class Derived(Base):
        pass

    patches = Patches()
    patches.set(Derived, "name", lambda self: "patched")
    assert Derived().name() == "patched"
    patches.undo()
    assert Derived().name() == "base"
    assert "name" not in vars(Derived)


def test_descriptors_are_restored_as_they_were() -> None:
    class Target:
        @staticmethod
        def static() -> str:
            return "static"

        @classmethod
        def name(cls) -> str:
            return cls.__name__

    before = dict(vars(Target))
    with Patches() as patches:
        patches.set(Target, "static", None)
        patches.set(Target, "name", None)
    assert vars(Target)["static"] is before["static"]
    assert vars(Target)["name"] is before["name"]
    assert Target.name() == "Target"


def test_an_instance_gets_its_class_default_back() -> None:
    class Target:
        value = "class"

    target = Target()
    with Patches() as patches:
        patches.set(target, "value", "instance")
    assert vars(target) == {}


def test_slots_and_modules_that_keep_values_elsewhere() -> None:
    class Slots:
        __slots__ = ("value",)
        value: int

    class Config(types.ModuleType):
        """Like torch's config modules: values live outside ``__dict__``."""

        values: ClassVar[dict[str, object]] = {"disable": False}

        def __getattr__(self, name: str) -> object:
            try:
                return self.values[name]
            except KeyError:
                raise AttributeError(name) from None

        def __setattr__(self, name: str, value: object) -> None:
            self.values[name] = value

    slots, config = Slots(), Config("config")
    slots.value = 1
    with Patches() as patches:
        patches.set(slots, "value", 2)
        patches.set(config, "disable", True)
        assert config.disable is True
    assert slots.value == 1
    assert config.disable is False


def test_setitem() -> None:
    mapping = {"old": 1}
    with Patches() as patches:
        patches.setitem(mapping, "old", 2)
        patches.setitem(mapping, "new", 3)
        assert mapping == {"old": 2, "new": 3}
    assert mapping == {"old": 1}


def test_a_key_the_program_removed_itself_is_no_error() -> None:
    mapping: dict[str, int] = {}
    patches = Patches()
    patches.setitem(mapping, "new", 1)
    del mapping["new"]
    patches.undo()
    assert mapping == {}


def test_undo_runs_in_reverse_order_and_once() -> None:
    order: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[str]:
        yield "entered"
        order.append("context")

    patches = Patches()
    patches.on_undo(order.append, "first")
    assert patches.enter(context()) == "entered"
    patches.on_undo(order.append, "last")
    patches.undo()
    patches.undo()
    assert order == ["last", "context", "first"]


def test_a_step_that_raises_does_not_stop_the_others() -> None:
    mapping = {"key": 1}

    def fail() -> None:
        raise ValueError("this step")

    patches = Patches()
    patches.setitem(mapping, "key", 2)
    patches.on_undo(fail)
    with pytest.raises(ValueError, match="this step"):
        patches.undo()
    assert mapping == {"key": 1}
