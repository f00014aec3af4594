"""What Ray's autoscaler does about a placement group, from what it reports to the cluster's head.

That is autoscaler v2, KubeRay's and the one that ``RAY_enable_autoscaler_v2=1`` chooses; of v1, and where there is none,
nothing is known. The report is Ray's own (``src/ray/protobuf/autoscaler.proto``), and no public function of Ray has all of it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, NamedTuple

import ray._raylet
from ray.core.generated import autoscaler_pb2
from ray.exceptions import RayError

_ANSWER_SECONDS = 3.0
_NEVER = "no available node types of Ray's autoscaler, within its limits, can fulfill the placement group"
_raylet: Any = ray._raylet
_messages: Any = autoscaler_pb2


class Intentions(NamedTuple):
    """Why it will ``never`` make nodes for a group, and what it ``does``, in words; empty where there is nothing to say."""

    never: str = ""
    does: str = ""


def plans_for(gcs_address: str, group: str) -> Intentions:
    """Ask what will become of a placement group.

    Args:
        gcs_address: ``HOST:PORT`` of the head.
        group: the group's id, in hexadecimal.
    """
    reply = _messages.GetClusterStatusReply()
    client = _raylet.GcsClient(address=gcs_address)
    with contextlib.suppress(RayError):  # whether the head is there, the driver watches
        reply.ParseFromString(client.get_cluster_status(timeout_s=_ANSWER_SECONDS))
    state = reply.autoscaling_state
    coming = Counter(one.ray_node_type_name for one in state.pending_instances)
    for asked in state.pending_instance_requests:
        coming[asked.ray_node_type_name] += asked.count
    does = [f"Ray's autoscaler starts {count} {kind}" for kind, count in sorted(coming.items())]
    does += [
        f"it did not get {one.ray_node_type_name}: {one.reason}" for one in state.failed_instance_requests
    ]
    infeasible = any(group in one.details for one in state.infeasible_gang_resource_requests)
    return Intentions(_NEVER if infeasible else "", "; ".join(does))
