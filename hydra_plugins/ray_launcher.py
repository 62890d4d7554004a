"""The launcher of sweeps whose jobs are done by actors of Ray: ``train.py -m
hydra/launcher=ray``."""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from runtime.errors import UserError
from runtime.settings.check import part
from runtime.workers import Ray, whole

Job = tuple[int, tuple[str, ...]]
"""The number of a job and its overrides."""


class RayLauncher(Launcher):
    """Runs jobs in the processes that `workers=ray` starts, several at a time, on this machine or a
    cluster. What a job prints appears when it ends."""

    def __init__(self, **workers: Any) -> None:
        """workers: the arguments of `runtime.workers.Ray`. Raises UserError for what it does not
        take."""
        for fault in part({"_target_": "runtime.workers.Ray", **workers}, "hydra.launcher"):
            raise UserError(str(fault._replace(remedy="--cfg hydra shows what there is")))
        self._workers = Ray(**workers)

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """See `Launcher`."""
        self._parts = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """See `Launcher`. Raises UserError where there are no workers, or one was lost."""
        jobs = [(initial_job_idx + at, tuple(each)) for at, each in enumerate(job_overrides)]
        returned = dict[int, JobReturn]()
        with self._workers.team(partial(_parts, self._parts, Singleton.get_state())) as team:
            for (number, _), (result, printed) in whole(team.map(_run, jobs)):
                returned[number] = result
                print(printed, end="", flush=True)
        return [returned[number] for number, _ in jobs]


def _parts(parts: Any, singletons: Any) -> Any:
    """Prepare the process of a worker."""
    setup_globals()
    Singleton.set_state(singletons)
    return parts


def _run(parts: tuple[HydraContext, TaskFunction, DictConfig], job: Job) -> tuple[JobReturn, str]:
    """Do a job. Return what Hydra wants of it, and what it has printed."""
    (context, function, config), (number, overrides) = parts, job
    settings = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(settings):
        settings.hydra.job.id, settings.hydra.job.num = (
            f"{settings.hydra.job.name}_{number}",
            number,
        )
    HydraConfig.instance().set_config(settings)
    with io.StringIO() as text, redirect_stdout(text), redirect_stderr(text):
        done = run_job(
            function,
            settings,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
            hydra_context=context,
        )
        return done, text.getvalue()
