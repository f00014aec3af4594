"""What examples/clusters has for administrators, against the schemas of who reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")
ray = pytest.importorskip("ray")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

pytestmark = pytest.mark.ray
_FILES = Path(__file__).resolve().parent.parent / "examples" / "clusters"
_OF_GROUP = {"rayStartParams", "template"}
_FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {
        "rayVersion",
        "enableInTreeAutoscaling",
        "autoscalerOptions",
        "headGroupSpec",
        "workerGroupSpecs",
    },
    "autoscalerOptions": {"version", "idleTimeoutSeconds"},
    "headGroupSpec": _OF_GROUP,
    "workerGroupSpecs": {"groupName", "replicas", "minReplicas", "maxReplicas", *_OF_GROUP},
}
"""Those of `ray.io/v1`, as far as the file has them:
docs.ray.io/en/latest/cluster/kubernetes/references/api.html (KubeRay 1.6).
"""


def _load(name: str) -> dict[str, Any]:
    return yaml.safe_load((_FILES / name).read_text())


def test_the_clouds_file_is_what_ray_up_takes() -> None:
    """Ray's own schema; each node type offers the instance type that it is called after."""
    config = _load("aws.yaml")
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(config, json.loads(schema.read_text()))
    types = config["available_node_types"]
    assert config["head_node_type"] in types
    assert {
        name for name, kind in types.items() if name.replace("_", ".") in kind["resources"]
    } == {
        "g2_8",
        "c1_4",
    }


def test_the_ray_cluster_of_kubernetes() -> None:
    """Fields that KubeRay has, options that `ray start` has, pods that Kubernetes takes."""
    cluster = _load("kuberay.yaml")
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    groups = [
        ("headGroupSpec", spec["headGroupSpec"]),
        *(("workerGroupSpecs", one) for one in spec["workerGroupSpecs"]),
    ]
    for where, found in [
        ("", cluster),
        ("spec", spec),
        ("autoscalerOptions", spec["autoscalerOptions"]),
        *groups,
    ]:
        assert found.keys() <= _FIELDS[where]
    from ray.scripts.scripts import start

    options = {option.removeprefix("--") for one in start.params for option in one.opts}
    for _, group in groups:
        assert group["rayStartParams"].keys() <= options
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "one"},
            "spec": group["template"]["spec"],
        }
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    offered = [
        json.loads(json.loads(group["rayStartParams"]["resources"])) for _, group in groups[1:]
    ]
    assert offered == [{"g2.8": 1}, {"c1.4": 1}]


def test_the_image_has_what_nodes_need() -> None:
    """It installs the extra that pyproject.toml has, and is the image that the other files name."""
    text = (_FILES / "Dockerfile").read_text()
    words = [line.split()[0] for line in text.splitlines() if line and not line.startswith("#")]
    assert words[0] == "FROM" and set(words) <= {"FROM", "RUN", "USER", "WORKDIR"}
    assert '"jupyter-taas[ray]"' in text
    [image] = re.findall(r"--tag (\S+)", text)
    assert all(f"{image}" in (_FILES / name).read_text() for name in ("aws.yaml", "kuberay.yaml"))
