"""Classes, their attributes, and what is made of them.

Each row is a notebook that shows and leaves the same with its header and without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Program, assert_same, each_of, play, row, together

pytestmark = pytest.mark.usefixtures("oracle")

ROWS = [
    row(
        "metadata of a dataclass",
        setup="""
            from dataclasses import dataclass, field, fields

            @dataclass
            class A:
                n: int = field(default=1, metadata={"help": "how many"})

            a = A()
        """,
        cell="""
            h = fields(a)[0].metadata["help"]
            b = A(2)
        """,
        check='h, fields(b)[0].metadata["help"], type(b) is A',
    ),
    row(
        "dataclasses made by calls",
        setup="""
            import dataclasses

            Here = dataclasses.make_dataclass("Here", ["p", ("q", int)])
        """,
        cell="""
            There = dataclasses.make_dataclass("There", ["a", ("b", list[int])])
            Below = dataclasses.make_dataclass("Below", ["c"], bases=(Here,))
            one = Below(1, 2, c=3)
        """,
        check=(
            "[C.__init__.__annotations__ for C in (Here, There, Below)],"
            " [f.type for f in dataclasses.fields(Below)], one"
        ),
    ),
    row(
        "instance",
        setup="""
            class A:
                pass

            a = A()
            a.x = [1]
            a.self = a
            k = {"a": a}
        """,
        cell="""
            a.x.append(2)
            a.y = a.x
            del a.self
        """,
    ),
    row(
        "slots",
        setup="""
            class S:
                __slots__ = ("a", "b", "__weakref__")

            s = S()
            s.a = [1]
            t = s
        """,
        cell="""
            s.b = s.a
            s.a = 2
        """,
    ),
    row(
        "slots and dict",
        setup="""
            class B:
                __slots__ = ("a",)

            class C(B):
                pass

            c = C()
            c.a = 1
            c.z = 2
            k = c
        """,
        cell="""
            c.a += 1
            c.new = [c]
            del c.z
        """,
    ),
    row(
        "dataclass",
        setup="""
            from dataclasses import dataclass, field

            @dataclass
            class D:
                n: int = 0
                l: list = field(default_factory=list)

            d = D()
            e = d
        """,
        cell="""
            d.n += 1
            d.l.append(d.n)
            f = D(5)
        """,
    ),
    row(
        "list subclass",
        setup="""
            class L(list):
                pass

            l = L([1])
            l.note = "x"
            k = l
        """,
        cell="""
            l.append(l.note)
            l.note = l
        """,
    ),
    row(
        "dict subclass",
        setup="""
            class M(dict):
                def __missing__(self, key):
                    return key

            m = M(a=1)
            k = m
        """,
        cell="""
            m["b"] = m["zz"]
            m.tag = 1
        """,
    ),
    row(
        "enum",
        setup="""
            import enum

            class E(enum.Enum):
                A = 1
                B = 2

            e = E.A
            log = []
        """,
        cell="""
            log.append(E.B)
            log.append(e is E.A)
            e = E.B
        """,
    ),
    row(
        "namedtuple",
        setup="""
            from collections import namedtuple
            Pt = namedtuple("Pt", "x y")
            p = Pt([1], 2)
        """,
        cell="""
            p.x.append(3)
            q = Pt(p, p.x)
        """,
    ),
    row(
        "property and classmethod",
        setup="""
            class A:
                count = 0

                @property
                def two(self):
                    return 2

                @classmethod
                def make(cls):
                    return cls()

                @staticmethod
                def one():
                    return 1

            a = A()
        """,
        cell="""
            b = A.make()
            c = [a.two, A.one(), isinstance(b, type(a))]
        """,
    ),
    row(
        "inheritance and super",
        setup="""
            class A:
                def f(self):
                    return 1

            class B(A):
                def f(self):
                    return super().f() + 1

            b = B()
        """,
        cell="""
            class C(B):
                def f(self):
                    return super().f() + 1

            c = C()
            r = [c.f(), isinstance(c, A), B().f()]
        """,
        check="c.f(), isinstance(c, A), B.f(c)",
    ),
    row(
        "abstract base class",
        setup="""
            import abc

            class A(abc.ABC):
                @abc.abstractmethod
                def f(self): ...

            class B(A):
                def f(self):
                    return 1

            b = B()
        """,
        cell="r = [isinstance(b, A), b.f()]",
    ),
    row(
        "metaclass",
        setup="""
            class M(type):
                def __call__(cls, *a):
                    o = super().__call__(*a)
                    o.made = True
                    return o

            class A(metaclass=M):
                pass

            a = A()
        """,
        cell="""
            b = A()
            r = b.made
        """,
    ),
    row(
        "class in the cell",
        setup="""
            k = 1

            class Base:
                def f(self):
                    return k
        """,
        cell="""
            class New(Base):
                pass

            o = New()
            k = 4
        """,
        check="o.f(), isinstance(o, Base)",
    ),
    row(
        "own pickling protocol",
        setup="""
            class Own:
                def __init__(self):
                    self.n = [0]
                    self.lock = __import__("threading").Lock()

                def __getstate__(self):
                    return {"n": self.n, "m": getattr(self, "m", 0)}

                def __setstate__(self, s):
                    self.__dict__.update(s)
                    self.lock = __import__("threading").Lock()

            o = Own()
            k = o
        """,
        cell="""
            o.n.append(1)
            o.m = 5
        """,
        check="o is k, o.m, o.n, o.lock.locked()",
    ),
    row(
        "protocol that only makes anew",
        setup="""
            class Own:
                def __init__(self, n):
                    self.n = n
                    self.lock = __import__("threading").Lock()

                def __reduce__(self):
                    return Own, (self.n,)

            o = Own(1)
            k = [o]
        """,
        cell="o.n = 5",
        check="o.lock.locked(), k[0] is o",
    ),
    row(
        "dataclass subclassed",
        setup="""
            from dataclasses import dataclass, field

            @dataclass
            class A:
                n: int
                l: list = field(default_factory=list)
        """,
        cell="""
            @dataclass
            class B(A):
                m: int = 2

            b = B(1)
        """,
        check="b, B(3, [4]), A(5)",
    ),
    row(
        "attributes are the object itself",
        setup="""
            class Bunch(dict):
                def __init__(self, **k):
                    super().__init__(**k)
                    self.__dict__ = self

            b = Bunch(n=1)
        """,
        cell="""
            b.n += 1
            b["m"] = 3
        """,
        check='b.m, b["n"], b.__dict__ is b',
    ),
    row(
        "class of an object changed",
        setup="""
            class A:
                pass

            class B:
                def hi(self):
                    return "hi"

            a = A()
            a.n = 1
            k = [a]
        """,
        cell="""
            a.__class__ = B
            a.n = 2
        """,
        check="a.hi(), k[0] is a, type(k[0]) is B",
    ),
    row(
        "registry of a metaclass",
        setup="""
            class Meta(type):
                classes = {}

                def __new__(mcs, name, bases, ns):
                    cls = super().__new__(mcs, name, bases, ns)
                    mcs.classes[name] = cls
                    return cls

            class A(metaclass=Meta):
                pass
        """,
        cell="""
            class B(A):
                k = 1

            n = len(Meta.classes)
        """,
        check="""
            (
                n,
                sorted(Meta.classes),
                sorted(k.__name__ for k in Meta.classes.values()),
                A in Meta.classes.values(),
            )
        """,
    ),
    row(
        "attributes of a class",
        setup="""
            class M:
                count = 0
                names = ["a"]
                gone = slots = 1
                old = (1,)

                def __init__(self):
                    M.count += 1
                    self.names.append(M.count)

                def f(self):
                    return "f"

                @classmethod
                def more(cls):
                    cls.count += 10
                    return cls.count

            m = M()
            k = [M]
        """,
        cell="""
            m2 = M()
            M.f = lambda self: "g"
            setattr(M, "new", [m2])
            del M.gone
            M.more()
            M.p = property(lambda self: self.count)
            M.s = staticmethod(len)
            M.slots = (M.slots, m)
            M.__doc__ = "doc"
        """,
        check="""
            (
                M.count,
                M.names,
                m.f(),
                m2.f(),
                M.new[0] is m2,
                hasattr(M, "gone"),
                M.more(),
                m.p,
                M.s([1]),
                M.slots[1] is m,
                k[0] is M,
                type(m2) is M,
            )
        """,
    ),
    row(
        "attributes of classes that inherit, and of abstract and slotted ones",
        setup="""
            import abc
            from dataclasses import dataclass

            class A(abc.ABC):
                n = 1

                @abc.abstractmethod
                def f(self): ...

            class B(A):
                def f(self):
                    return self.n

            class S:
                __slots__ = ("x",)
                made = 0

                def __init__(self):
                    S.made += 1
                    self.x = 1

            @dataclass
            class D:
                n: int = 1

            b = B()
            s = S()
        """,
        cell="""
            B.n = 5
            A.n = 7
            t = S()
            S.made += s.x
            D.n = 4
            D.extra = b
            isinstance(3, A)
            A.g = A.f
        """,
        check="b.f(), A.n, S.made, t.x, D(), D.n, D.extra is b, A.g is A.f",
    ),
    row(
        "an object that copies what it is made with",
        setup="""
            class Box:
                def __init__(self, items):
                    self.items = list(items)

                def __reduce__(self):
                    return Box, (self.items,)

            b, c = Box([1]), Box([2])
        """,
        cell="""
            b.items.append(3)
            d = Box(c.items)
        """,
        check="b.items, c.items, d.items",
    ),
    row(
        "class with its own __new__",
        setup="""
            class One:
                only, made = None, 0

                def __new__(cls, name):
                    if cls.only is None:
                        cls.only = super().__new__(cls)
                        One.made += 1
                    return cls.only

                def __init__(self, name):
                    self.name = name

            one = One("a")

            class Other(One):
                only = None
        """,
        cell="""
            other = Other("b")
            same = One("c")
        """,
        check="one is same is One.only, one.name, other.name, Other.only is other, One.made",
    ),
    row(
        "dict that needs arguments",
        setup="""
            class Table(dict):
                def __init__(self, name):
                    super().__init__()
                    self.name = name

            t = Table("t")
            t["a"] = 1
            k = t
        """,
        cell="""
            t["b"] = 2
            u = Table("u")
            u["x"] = t
        """,
        check='t, t.name, k is t, u.name, u["x"] is t',
    ),
    row(
        "annotations of a class in the cell",
        setup="""
            from typing import Optional
            from dataclasses import dataclass
        """,
        cell="""
            @dataclass
            class A:
                n: Optional[int] = None

            a = A(3)
        """,
        check="a, A.__annotations__",
    ),
    row(
        "objects that pickle by themselves in the cell",
        setup="import os, pickle",
        cell="""
            class A:
                def __init__(self):
                    self.n = []

                def __getstate__(self):
                    return {"n": pickle.dumps(self.n), "by": str(os.getpid()).encode()}

                def __setstate__(self, state):
                    self.n = pickle.loads(state["n"])

            class B:
                pass

            a = A()
            a.n = [B()]
        """,
        check="type(a.n[0]) is B",
    ),
]
"""Each shares a notebook with others, whose cells are one: what it binds gets its number."""


@each_of(together(ROWS))
def test_the_same_cells_with_and_without_the_header(program: Program, tmp_path: Path) -> None:
    """What they show and leave is the same, and nothing is lost."""
    assert_same(program, tmp_path)


def test_a_set_of_objects_is_told_by_what_is_in_it(tmp_path: Path) -> None:
    """At other addresses its items have another order, which is not reported as a difference."""
    program = row(
        "set",
        setup="""
            class A:
                seen = set()

                def __init__(self):
                    A.seen.add(self)

            l = [A() for _ in range(9)]
        """,
        cell="l += [A() for _ in range(9)]",
        check="A.seen == {*l}, len(l)",
    )
    played = play(program, tmp_path, plain=False)
    assert played.value == "(True, 18)"
    assert not played.lost
