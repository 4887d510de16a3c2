"""PrefixRouter: a request router for Ray Serve that sends a request to the replica with the lowest cost.

``client.fleet`` computes the cost from the prefix index and the load of each engine. If the cost is unknown,
Ray's power of two choices is used: in a process without a fleet, and while no prefix index is followed. If a
replica is full, the replica with the next lowest cost gets the request.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from chorale.serve.fleet import assigner

POLICIES = ("prefix", "power_of_two", "random")


class PrefixRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]  # Ray has no types
    """The ``policy`` of ``request_router_kwargs`` is "prefix" (default), "power_of_two" or "random"."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        deployment = self._deployment_id
        # Accessed through the module, since Ray pickles this class with copies of the globals it uses.
        self._assigner = assigner.ASSIGNERS.get((deployment.app_name, deployment.name))
        self._policy = POLICIES[0]

    def initialize_state(self, policy: str = POLICIES[0]) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r}: must be one of {', '.join(POLICIES)}")
        self._policy = policy

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = self._ranked(by_name, pending_request)
        if not ranked or pending_request is None:
            chosen: list[list[RunningReplica]] = await PowerOfTwoChoicesRequestRouter.choose_replicas(
                self, candidate_replicas, pending_request
            )
            return chosen
        pending_request.routing_context.should_backoff = True  # wait before retrying if all replicas are full
        return [[by_name[name]] for name in ranked]

    def _ranked(
        self, by_name: dict[str, RunningReplica], pending_request: PendingRequest | None
    ) -> list[str]:
        """Returns the names of the replicas, the best first. Empty if Ray has to choose."""
        if self._policy == "random":
            return random.sample(list(by_name), len(by_name))
        if self._assigner is None or pending_request is None or self._policy != "prefix":
            return []
        ticket = self._assigner.ticket(pending_request.args[0]) if pending_request.args else None
        return self._assigner.fleet.members.rank(ticket, by_name) if ticket is not None else []

    # ------------------------------------------------------------------ updates for the fleet

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._announce()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._announce()

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        if self._assigner is not None and pending_request.args:
            self._assigner.routed(pending_request.args[0], replica_id.unique_id)

    def _announce(self) -> None:
        if self._assigner is not None:
            found = {id_.unique_id: each.replica_metadata for id_, each in self.curr_replicas.items()}
            self._assigner.replicas(found)
