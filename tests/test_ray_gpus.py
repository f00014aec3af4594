"""Which GPUs a VM of a Ray cluster has: those that Ray gave it, as far as they are there."""

from __future__ import annotations

import json

import pytest
from ray_cluster import RayCluster

NODES = [{"CPU": 1}, {"CPU": 1, "GPU": 2}]
_ASK = """
import json, ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from taas.engines import ray_vm

class Vm:
    def given(self):
        return ray_vm.given_gpus()

def given(**bundle):
    group = placement_group([bundle])
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    vm = ray.remote(Vm).options(
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        resources={"there": 1},
        scheduling_strategy=place,
    )
    return ray.get(vm.remote().given.remote())

ray.cloudpickle.register_pickle_by_value(ray_vm)
ray.init(address="auto", log_to_driver=False)
print(json.dumps([given(CPU=1, there=1), given(GPU=2, there=1)]))
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ray_sets_it", [True, False])
def test_a_bundle_without_gpus_has_none(cluster: RayCluster, ray_sets_it: bool) -> None:
    """Whatever CUDA_VISIBLE_DEVICES is on the node, and whether or not Ray sets it."""
    node = cluster.nodes[1]
    node.resources["there"] = 2
    node.environ["CUDA_VISIBLE_DEVICES"] = "4,15"
    node.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "0" if ray_sets_it else "1"
    node.restart()
    answer = cluster.head.python(_ASK, seconds=200)
    assert json.loads(answer.splitlines()[-1]) == [[], ["4", "15"]]
