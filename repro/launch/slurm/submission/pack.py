"""From tasks to job arrays: what has the same shape is one array, and each of its elements is a bundle."""

from __future__ import annotations

from dataclasses import dataclass

from repro.config import Experiment
from repro.launch.plan import Task
from repro.launch.slurm.allocation.work import Bundle
from repro.launch.slurm.site.limits import minutes
from repro.launch.slurm.site.profile import Profile


@dataclass(frozen=True, kw_only=True, order=True)
class ArrayShape:
    """What an array asks for, for each of its elements."""

    nodes: int
    tasks_per_node: int
    time_min: float
    partition: str
    requeues: int = 0
    """How often one that reaches its time limit starts again."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.tasks_per_node


@dataclass(frozen=True, kw_only=True)
class Array:
    """Bundles of one shape: one `sbatch`."""

    shape: ArrayShape
    bundles: tuple[Bundle, ...]

    def node_hours(self) -> float:
        """Node-hours if every element takes its whole time limit."""
        return len(self.bundles) * self.shape.nodes * self.shape.time_min / 60


def nodes_for(world: int, per_node: int, at_least: int = 0) -> int:
    """Nodes that hold `world` ranks evenly, at most `per_node` on each; the fewest from `at_least` on.

    SLURM starts the same number of tasks on every node, and the paper's layouts mean neighbours by rank.
    """
    least = max(at_least, -(-world // per_node), 1)
    return next(nodes for nodes in range(min(least, world), world + 1) if world % nodes == 0)


def shape_of(experiment: Experiment, profile: Profile) -> ArrayShape:
    """The nodes and the time that `profile` gives `experiment`."""
    case = profile.class_of(experiment.name)
    world = experiment.layout.world
    nodes = nodes_for(world, profile.ranks_per_node, case.nodes)
    return ArrayShape(
        nodes=nodes,
        tasks_per_node=world // nodes,
        time_min=minutes(case.time_limit or profile.slurm.time_limit),
        partition=case.partition or profile.slurm.partition,
        requeues=profile.slurm.requeues if case.requeues is None else case.requeues,
    )


def arrays(tasks: list[Task], profile: Profile) -> list[Array]:
    """Job arrays for `tasks`, largest first: what needs many nodes waits longest for them."""
    groups: dict[ArrayShape, list[Task]] = {}
    for task in tasks:
        groups.setdefault(shape_of(task.experiments[0], profile), []).append(task)
    found, index = [], 0
    for shape in sorted(groups, reverse=True):
        members = groups[shape]
        bundles = []
        for start in range(0, len(members), profile.slurm.cases_per_job):
            chunk = tuple(members[start : start + profile.slurm.cases_per_job])
            bundles.append(Bundle(index=index, tasks=chunk))
            index += 1
        found.append(Array(shape=shape, bundles=tuple(bundles)))
    return found
