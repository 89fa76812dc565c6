"""Plans in full where a planner caches them.

With ``enable_plan_caching=True`` torch's planners send an empty plan for each rank whose plan has not changed since the
last save, and keep the plans of the last save for the whole process. Where files are laid out anew for every save, the
first rank needs all of them; they lie where the planner keeps them, which only torch's own modules name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from hfdcp_core.dcp.peers import Peer
from hfdcp_core.errors import PlanError


def in_full(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Return the plans of all ranks, with those that a planner has left out because they are the last ones again.

    A plan of an earlier save says on which machine its rank runs, but no more where it can be reached.

    Raises:
        PlanError: It cannot be told which the last ones are: several planners of this process cache theirs.
    """
    if all(plan.usable for plan in plans):
        return list(plans)
    kept: dict[str, list[SavePlan]] = getattr(SavePlanner, "_cached_global_plan", {})
    last = [known for known in kept.values() if _goes_with(known, plans)]
    if len(last) != 1:
        raise PlanError(
            f"the planner left out the plans of ranks that have not changed, and {len(last) or 'no'} kinds of planners "
            "keep such plans in this process: save with enable_plan_caching=False"
        )
    return [replace(plan, storage_data=_host_only(plan.storage_data)) for plan in last[0]]


def _goes_with(known: Sequence[SavePlan], plans: Sequence[SavePlan]) -> bool:
    pairs = zip(known, plans, strict=False)
    return len(known) == len(plans) and all(plan is whole or not plan.usable for whole, plan in pairs)


def _host_only(peer: object) -> Peer:
    return Peer(peer.host if isinstance(peer, Peer) else "")
