"""Objects that are odd, or no longer needed: a headed cell takes them as a plain one does."""

from __future__ import annotations

import pytest
from notebook_harness import Notebook

TWO = "#pragma taas --gpus 2\n"

# what an earlier cell makes, what the headed cell does, what is to be seen then, and how it looks
ODD = {
    "slots, and a __getattr__ that takes any name for a key": (
        """
class Row:
    __slots__ = ("fields",)
    def __init__(self, **fields):
        self.fields = fields
    def __getattr__(self, name):
        return self.fields[name]
row = Row(a=1)""",
        "row.fields['a'] = 2\nmade = Row(b=row)",
        "row.a, made.b is row",
        "2 True",
    ),
    "no attributes, and a __getattr__ that raises": (
        """
class Closed:
    __slots__ = ()
    def __getattr__(self, name):
        raise RuntimeError(f"closed: {name}")
closed = [Closed()]""",
        "closed.append(Closed())",
        "len(closed), type(closed[0]) is type(closed[1])",
        "2 True",
    ),
    "a metaclass that takes any name for a key": (
        """
import rooms
room = rooms.Room()""",
        "room.people += 1\nother = rooms.Room()",
        "room.people, other.people",
        "1 0",
    ),
    "a list whose class has such a metaclass": (
        """
import rooms
hall = rooms.Hall([1])""",
        "hall.append(2)\nannex = rooms.Hall([hall])",
        "hall, annex[0] is hall, type(annex) is rooms.Hall",
        "[1, 2] True True",
    ),
    "In and Out that are the user's": (
        """
In, Out = 3, 4
import os""",
        "rank = int(os.environ['RANK'])\nIn += 1",
        "In, Out, rank",
        "4 4 0",
    ),
}
ROOMS = """
class Registry(type):
    known = {}
    def __getattr__(cls, name):
        return cls.known[name]

class Room(metaclass=Registry):
    def __init__(self):
        self.people = 0

class Hall(list, metaclass=Registry):
    pass

class Door(metaclass=Registry):
    def __reduce__(self):
        return Door, ()
"""


@pytest.mark.parametrize("name", ODD)
def test_an_odd_object_travels_as_any_other(name: str, notebook: Notebook) -> None:
    """What its class does with unknown names harms nothing, now or in the next cell."""
    _write_rooms(notebook)
    makes, cell, shown, looks = ODD[name]
    notebook.good("%load_ext taas" + makes)
    ran = notebook.good(TWO + cell)
    assert "taas:" not in ran.stdout
    assert notebook.value(shown) == looks
    notebook.good(TWO + f"again = {shown}")
    assert notebook.value("*again") == looks
    notebook.good("for name in ('In', 'Out', 'rank'):\n    globals().pop(name, None)\ndel name")


@pytest.mark.parametrize(
    "made",
    ["rooms.Hall([1])", "rooms.Door()", "[rooms.Door(), rooms.Door()]", "{'at': rooms.Door()}"],
)
def test_kept_ranks_hold_an_odd_object(made: str, notebook: Notebook) -> None:
    """Its class is asked whether it can change, and not the metaclass that takes any name."""
    _write_rooms(notebook)
    head = "#pragma taas --gpus 2 --keep\n"
    notebook.good(f"%load_ext taas\nimport rooms\nodd = {made}")
    notebook.good(f"{head}here = odd; count = 1")
    notebook.good(f"{head}count += 1; same = here is odd")
    assert notebook.value("same, count, type(here) is type(odd)") == "True 2 True"
    notebook.good("%taas release")


def _write_rooms(notebook: Notebook) -> None:
    rooms = notebook.folder / "rooms.py"
    if not rooms.exists():
        rooms.write_text(ROOMS)


# what a notebook makes, with one object that is needed no more; a headed cell; and that object
FREED = {
    "an object that left an attribute with the notebook": (
        """
from torch.utils.data import DataLoader
class Holder:
    pass
holder = Holder()
holder.own = iter(DataLoader(range(4), num_workers=1))""",
        "holder.steps = 1",
        "holder",
    ),
    "one that has such an object in a list": (
        """
from torch.utils.data import DataLoader
class Holder:
    pass
holder = Holder()
holder.own = [[iter(DataLoader(range(4), num_workers=1))]]""",
        "holder.steps = 1",
        "holder",
    ),
    "a class that is made anew": (
        "class Temporary:\n    pass\nholder = Temporary()",
        "holder.steps = 1",
        "Temporary",
    ),
    "a container's class that is made anew": (
        "class Temporary(list):\n    pass\nholder = Temporary()",
        "holder.append(1)",
        "Temporary",
    ),
    "a sampler's class that is made anew": (
        """
from torch.utils.data import Sampler
class Temporary(Sampler):
    def __init__(self):
        self.seen = 0
holder = Temporary()""",
        "holder.seen = 1",
        "Temporary",
    ),
    "data that the rank has chosen": (
        "import os\nfrom torch.utils.data import Subset\ndata = [*range(8)]",
        "holder = Subset(data, range(int(os.environ['RANK']), 8, 2))",
        "holder",
    ),
}


@pytest.mark.parametrize("name", FREED)
def test_what_nobody_holds_is_freed(name: str, notebook: Notebook) -> None:
    """Once a headed cell is over, what the notebook deletes is gone as after a plain cell."""
    makes, cell, wanted = FREED[name]
    notebook.good("%load_ext taas\n" + makes)
    notebook.good(TWO + cell)
    notebook.good(f"import gc, weakref\nthere = weakref.ref({wanted})")
    notebook.good(
        "for name in ('holder', 'Temporary'):\n    globals().pop(name, None)\ngc.collect();"
    )
    assert notebook.value("there() is None") == "True"


def test_an_attribute_that_stayed_and_is_plain_now_travels(notebook: Notebook) -> None:
    """Kept ranks hold an object on, cell after cell.

    Whatever stays with the notebook of it; what it becomes arrives.
    """
    head = "#pragma taas --gpus 2 --keep\n"
    notebook.good("""%load_ext taas
import torch.distributed as dist
from torch.utils.data import DataLoader
class Engine:
    steps = 0
engine = Engine()
engine.own = iter(DataLoader(range(4), num_workers=1))""")
    notebook.good(f"{head}dist.init_process_group('nccl'); engine.group = dist.new_group()")
    notebook.good(f"{head}x = 1")
    for number in (1, 2):
        notebook.good(f"{head}has = hasattr(engine, 'group'); engine.steps += 1; x += 1")
        assert notebook.value("has, engine.steps, hasattr(engine, 'own')") == f"True {number} True"
    notebook.good("engine.own = 5")
    notebook.good(f"{head}own = engine.own")
    assert notebook.value("own") == "5"
    notebook.good("%taas release")


def test_an_object_whose_class_cannot_say_what_is_in_it_is_the_ranks(notebook: Notebook) -> None:
    """As a run of wandb: what its class makes of it elsewhere it cannot describe.

    Kept ranks go on with theirs; one line says so.
    """
    head = "#pragma taas --gpus 2 --keep\n"
    notebook.good("""%load_ext taas
class Run:
    def __init__(self, name):
        self.settings, self.logged = {'name': name}, []
    def log(self, value):
        self.logged.append((self.settings['name'], value))
    def __getstate__(self):
        return {'id': self.settings['name']}
    def __setstate__(self, state):
        self.id = state['id']
class Job:
    pass""")
    made = notebook.good(
        f"{head}run = Run('a'); job = Job(); job.run = Run('b'); runs = {{'c': [Run('c')]}}; twin ="
        " run; plain = [1]"
    )
    lines = [line for line in made.stdout.splitlines() if "keep theirs" in line]
    assert sorted(line.split()[1] for line in lines) == ["job.run", "runs['c'][0]", "twin"]
    assert "AttributeError: 'Run' object has no attribute 'settings'" in lines[0]
    for number in (1, 2):
        ran = notebook.good(
            f"{head}for one in (run, job.run, runs['c'][0]):\n    one.log({number})\n"
            "plain.append(2); job.number = len(run.logged); same = twin is run"
        )
        assert "taas:" not in ran.stdout
        assert notebook.value("job.number, same, len(plain)") == f"{number} True {number + 1}"
    notebook.good("more = [run]")
    notebook.good(f"{head}more[0].log(3); seen = [value for _, value in run.logged]")
    assert notebook.value("seen") == "[1, 2, 3]"
    notebook.good("%taas release")
