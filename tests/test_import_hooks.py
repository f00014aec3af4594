"""Which modules are new since somebody looked last."""

from __future__ import annotations

import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas.import_hooks import imported_since

_STEPS = st.lists(st.tuples(st.sampled_from(("import", "remove", "look")), st.sampled_from("abcdef")))


@given(_STEPS)
def test_a_module_that_came_since_is_found_whatever_went(steps: list[tuple[str, str]]) -> None:
    """What is imported, removed, put in anew: each name is told once, at the next look after it came."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "modules", {**sys.modules})
        known: set[str] = set()
        told = imported_since(known)
        assert sorted(told) == sorted(sys.modules)
        expected: set[str] = set()
        seen: set[str] = set()
        for step, letter in [*steps, ("look", "")]:
            name = f"made_up_{letter}"
            if step == "import":
                sys.modules[name] = sys.modules.pop(name, types.ModuleType(name))
                expected |= {name} - seen
            elif step == "remove":
                sys.modules.pop(name, None)
                expected.discard(name)
            else:
                assert sorted(imported_since(known)) == sorted(expected)
                seen |= expected
                expected = set()
