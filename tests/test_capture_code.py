"""cloudpickle's private parts are as the one module that uses them expects."""

from __future__ import annotations

import functools
import types

import cloudpickle
from cloudpickle import cloudpickle as private

from taas.capture import code_by_value


def test_this_cloudpickle_was_tested() -> None:
    """A new series may shape its private parts differently: run the suite, then raise TESTED_CLOUDPICKLE."""
    assert ".".join(cloudpickle.__version__.split(".")[:2]) == code_by_value.TESTED_CLOUDPICKLE


def _class_of_main() -> type:
    return type("Made", (), {"__module__": "__main__", "__slots__": ("a",), "f": lambda self: 1})


def test_a_class_is_reduced_to_the_six_parts_that_are_taken_apart() -> None:
    """(data process, (constructor, name, bases, keywords, tracker id, extra), (attributes, slots), None, None, setter)."""
    cls = _class_of_main()
    reduced = private._class_reduce(cls)
    constructor, arguments, state, items, pairs, setter = reduced
    assert constructor is private._make_skeleton_class
    assert setter is private._class_setstate
    assert (items, pairs) == (None, None)
    assert (type, "Made", (object,)) == arguments[:3]
    assert isinstance(arguments[3], dict)
    assert isinstance(arguments[4], str)
    assert len(arguments) == 6
    attributes, slots = state
    assert "f" in attributes
    assert isinstance(slots, dict)


def test_slots_are_part_of_how_a_class_is_made() -> None:
    """Set afterwards, __slots__ does nothing."""
    reading = code_by_value.read_class(_class_of_main())
    assert reading is not None
    constructor, arguments, _, (attributes,), *_ = reading
    assert arguments[3]["__slots__"] == ("a",)
    assert "__slots__" not in attributes
    assert "a" not in attributes
    assert not hasattr(constructor(*arguments[:4], None, None)(), "__dict__")


def test_the_hooks_of_the_pickler_exist() -> None:
    """What isn't the notebook's goes by reference; a class is made from its six parts, empty."""
    assert types.ModuleType in code_by_value.dispatch_table()
    assert private._should_pickle_by_reference(functools.wraps)
    assert not private._should_pickle_by_reference(_class_of_main())
    assert private._lookup_module_and_qualname(functools.wraps) == (functools, "wraps")
    assert private._lookup_module_and_qualname(_class_of_main()) is None
    made = private._make_skeleton_class(type, "Made", (dict,), {"__slots__": ("a",)}, None, None)
    assert (made.__name__, made.__bases__, made.__slots__) == ("Made", (dict,), ("a",))
