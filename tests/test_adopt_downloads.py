"""One rank downloads, the others find it there."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import io
import os
import struct
import tempfile
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks_harness import DEADLINE, launch, run_ranks

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.slow]
SAMPLES = 64
TORCHVISION_ASKS = 2  # times for a file: whether it is elsewhere, then for its content


def _idx(array: np.ndarray) -> bytes:
    """MNIST's file format: a magic number, the sizes, the bytes."""
    header = struct.pack(">I", 0x0800 + array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes())


def _weights() -> bytes:
    buffer = io.BytesIO()
    torch.save({"weight": torch.arange(4.0)}, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def server():
    """A server on this machine, which counts what is asked of it and sends in small pieces."""
    images = np.arange(SAMPLES * 28 * 28).reshape(SAMPLES, 28, 28) % 251
    labels = np.arange(SAMPLES) % 10
    files = {
        "weights.pt": _weights(),
    }
    for part in ("train", "t10k"):
        files[f"{part}-images-idx3-ubyte.gz"] = _idx(images)
        files[f"{part}-labels-idx1-ubyte.gz"] = _idx(labels)
    asked: Counter[str] = Counter()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # the base class's name
            name = self.path.strip("/")
            if name not in files:
                self.send_error(404)
                return
            asked[name] += 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(files[name])))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # who only looks for a redirect hangs up
                for start in range(0, len(files[name]), 500):
                    self.wfile.write(files[name][start : start + 500])
                    self.wfile.flush()

        def log_message(self, *args):
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    yield f"http://127.0.0.1:{running.server_port}/", asked, md5
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture
def site(server, tmp_path, monkeypatch):
    """The server with its counts at zero, and a project to run in."""
    server[1].clear()
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    return server


def _mnist(url, md5, root):
    from torchvision import datasets

    class MNIST(datasets.MNIST):  # a user's own subclass, with the test's mirror
        mirrors = [url]  # noqa: RUF012
        resources = [(name, md5[name]) for name, _ in datasets.MNIST.resources]  # noqa: RUF012

    train, test = MNIST(root, train=True, download=True), MNIST(root, train=False, download=True)
    return len(train), len(test), int(train.data.sum()), train.targets.tolist()


def _weights_from_hub(url, folder):
    weights = torch.hub.load_state_dict_from_url(
        url + "weights.pt", model_dir=folder, progress=False
    )
    return weights["weight"].tolist()


def _missing(url, folder):
    torch.hub.download_url_to_file(url + "nothing", str(Path(folder, "x")), progress=False)


def _only_the_last(url, folder):
    if int(os.environ["RANK"]) == 1:
        from taas.adopt import downloads

        downloads.BEGIN_SECONDS = 0.2
        return _weights_from_hub(url, folder)
    return None


@pytest.mark.parametrize(("where", "vms"), [("data", 1), ("../elsewhere", 2)])
def test_torchvision_dataset_is_downloaded_once(site, where, vms):
    """Four ranks, MNIST's file format, inside the project and outside.

    Each file is fetched once, all read it.
    """
    url, asked, md5 = site
    results = run_ranks(_mnist, 4, url, md5, where, vms=vms)
    assert results == [results[0]] * 4
    assert results[0][0] == SAMPLES
    assert set(asked.values()) == {TORCHVISION_ASKS}


def test_hub_file_is_downloaded_once(site, tmp_path):
    """``load_state_dict_from_url`` in four ranks."""
    url, asked, _ = site
    assert run_ranks(_weights_from_hub, 4, url, str(tmp_path)) == [[0.0, 1.0, 2.0, 3.0]] * 4
    assert asked == {"weights.pt": 1}


def test_failed_download_fails_everywhere(site, tmp_path):
    """When the first rank cannot have it the others try, and say why they can't."""
    for outcome in launch(_missing, 2, site[0], str(tmp_path), grace=DEADLINE):
        assert outcome.error == "HTTPError", outcome.trace


def test_rank_that_downloads_alone_does_not_wait_for_ever(site, tmp_path):
    """The first rank never comes: after a while the other goes on by itself."""
    assert run_ranks(_only_the_last, 2, site[0], str(tmp_path)) == [None, [0.0, 1.0, 2.0, 3.0]]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what another user's is")
def test_locks_in_a_folder_that_another_user_made_first_are_refused(tmp_path, monkeypatch):
    """Where runs of this user wait for each other, nobody else may hold them up.

    Names in /tmp are anybody's to make.
    """
    from taas.adopt.downloads import _lock

    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "project" / "runtime"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with _lock(tmp_path / "data", tmp_path / "project"):
        os.chown(tmp_path / "taas-locks-0", 65534, 65534)
    with pytest.raises(PermissionError, match="made by another user"):
        _lock(tmp_path / "data", tmp_path / "project")
