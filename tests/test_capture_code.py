"""cloudpickle's private parts are as the one module that uses them expects."""

from __future__ import annotations

import functools
import types
from typing import Any

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
    """Functions that aren't the notebook's are left to cloudpickle."""
    assert types.ModuleType in code_by_value.dispatch_table()
    assert callable(private._lookup_module_and_qualname)


def test_names_of_nested_code() -> None:
    """Attributes don't count, nested functions, classes and comprehensions do."""
    source = """
def f(x):
    def g(): return a.attribute + x
    class C:
        k = b
    global c
    c = [d for y in e]
    del h
"""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    found = code_by_value.global_names(namespace["f"].__code__)
    assert {"a", "b", "c", "d", "e"} == found - {"k", "h"}


def test_a_cached_function_of_a_module_goes_by_reference() -> None:
    """Only the notebook's own travel by value."""
    import json.decoder as module

    module.taas_cached = functools.lru_cache(len)
    module.taas_cached.__module__, module.taas_cached.__qualname__ = module.__name__, "taas_cached"
    try:
        assert code_by_value.read_cached(module.taas_cached) is None
    finally:
        del module.taas_cached
