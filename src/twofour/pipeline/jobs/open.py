"""Where jobs are done: processes of this machine, or a Ray cluster."""

from __future__ import annotations

from twofour.pipeline.jobs.job import Service
from twofour.pipeline.jobs.local import Processes
from twofour.pipeline.jobs.ray_cluster import RayCluster
from twofour.records.options import SideBySide


def open_jobs(service: Service, how: SideBySide) -> Processes | RayCluster:
    """What does jobs of this service until its `with` block ends."""
    if how.ray is not None:
        return RayCluster(service, how.ray)
    return Processes(service, how.jobs)
