"""Ranks do the same to the project's files and folders.

Who comes after rank 0 is not failed by what it finds.
"""

from __future__ import annotations

from blocks import block
from notebook_harness import Notebook


def test_ranks_of_a_cell_race_for_folders_and_files(notebook: Notebook) -> None:
    """Three ranks do what only one can do first: the cell ends well, and rank 0's work stands.

    What was so before the run is an error in every rank: programs look for a free name by it.
    """
    (notebook.folder / "old").mkdir()
    (notebook.folder / "old" / "log").write_text("")
    (notebook.folder / "before").mkdir()
    notebook.good(
        block("""
            #pragma taas --gpus 3
            import os, shutil
            import torch.distributed as dist
            dist.init_process_group('gloo')
            if dist.get_rank(): dist.barrier()  # rank 0 is first
            for i in range(20):
                if not os.path.exists(f'd{i}'): os.makedirs(f'd{i}/e')
                open(f'd{i}/f', 'x').write(os.environ['RANK'])
                os.rename(f'd{i}/f', f'd{i}/g')
                os.remove(f'd{i}/g') if i % 2 else None
            if os.path.exists('old'): shutil.rmtree('old')
            os.mkdir('old')
            for call in (lambda: os.mkdir('before'), lambda: os.remove('before/never')):
                try: call()
                except OSError: continue
                raise AssertionError('no rank is told another thing than rank 0')
            if dist.get_rank() == 0: dist.barrier()
            del dist, i, call
        """)
    )
    left = {str(path.relative_to(notebook.folder)) for path in notebook.folder.rglob("[a-z]*")}
    assert left == {
        "old",
        "before",
        *(f"d{i}{name}" for i in range(20) for name in ("", "/e", *(() if i % 2 else ("/g",)))),
    }
    assert {(notebook.folder / f"d{i}" / "g").read_text() for i in range(0, 20, 2)} == {"0"}
