"""A network that narrows above pods of nodes: what leaves them shares a way out that is less than its nodes could use.

Inside a pod every node has its full bandwidth.  A pod's way out, and its way in, bring its nodes' bandwidth divided by
the oversubscription: Llama 3's cluster has pods of 3,072 devices and 1:7 above them (2407.21783v3 sec. 3.3.1).  What
leaves a pod at the same time has equal parts of its way out, as adapters' users do.

A ring goes through its nodes in the order of its ranks, and pods are nodes one after another, so it leaves each pod
once: a hundred nodes' rings ask no more of the way out than one node's adapters bring.  That is why such networks serve
data parallelism well, and a whole stage that sends to another pod badly.

Not modelled: flows that meet on one link while others are free, jobs that do not fill pods in order, and latency.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from repro.simulate.time.rings import GroupsOnNodes, Numbers


@dataclass(frozen=True)
class Pods:
    """Pods of `nodes` nodes."""

    nodes: int
    way_out: float
    """Bytes/s out of a pod, and as many into it."""

    def rings(self, nodes: Numbers, rates: Numbers) -> Numbers:
        """Bytes/s of the rings of groups, all at the same time.

        `nodes` [groups, members] of their ranks; `rates` [groups] if nothing narrowed.
        """
        pods = nodes // self.nodes
        return self._shared(pods, pods.min(axis=1) != pods.max(axis=1), rates)

    def messages(self, nodes: Numbers, rates: Numbers) -> Numbers:
        """Bytes/s of messages, all at the same time.

        `nodes` [messages, 2] of sender and receiver; `rates` [messages] if nothing narrowed.
        """
        pods = nodes // self.nodes
        ways = 2 * pods + (0, 1)  # out of the sender's, into the receiver's
        return self._shared(ways, pods[:, 0] != pods[:, 1], rates)

    def _shared(self, ways: Numbers, leaving: Numbers, rates: Numbers) -> Numbers:
        """`rates`, and of what is `leaving` no more than its part of the ways that it takes."""
        if not leaving.any():
            return rates
        on = GroupsOnNodes(ways[leaving], ways[leaving])
        users = np.bincount(on.node)
        found = rates.copy()
        found[leaving] = np.minimum(rates[leaving], self.way_out / on.most(users[on.node]))
        return found
