"""What a process of a stack must not inherit from the shell or pod that starts the launcher.

Another launcher (torchrun, a PyTorchJob, srun, mpirun) tells its processes their place in its own
job by variables. A process of ours that read them would wait for ranks that do not exist. Proxies
are for the internet, but HTTP libraries would send them the stack's own requests too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

FOREIGN = (
    "RANK|WORLD_SIZE|NODE_RANK|LOCAL_(RANK|WORLD_SIZE)|GROUP_(RANK|WORLD_SIZE)|ROLE_.*|MASTER_.*"
    "|PET_.*|TORCHELASTIC_.*|HOROVOD_(RANK|SIZE|(LOCAL|CROSS)_.*)"
    "|(OMPI|MV2)_COMM_WORLD_.*|OMPI_UNIVERSE_.*|PMIX?_.*|MPI_LOCAL.*"
    # The place of a task in its step. What describes Slurm's job stays: our own srun needs it.
    "|SLURM_(PROCID|LOCALID|NODEID|GTIDS|TASK_PID|NTASKS.*|NPROCS|DISTRIBUTION|STEP.*|SRUN_.*)"
)
"""Names of variables by which other launchers place a process in a job: a regular expression."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def without_other_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables, except those by which other launchers place a process in a job."""
    return {k: v for k, v in environment.items() if not re.fullmatch(FOREIGN, k)}


def around_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables, with loopback exempt from the user's proxies.

    It is for programs that are not ours, e.g. SGLang's requests to itself and an agent's client of
    the model; our own clients ignore proxies. Without a proxy, nothing is changed.
    """
    if not any(environment.get(name) or environment.get(name.upper()) for name in _PROXIES):
        return dict(environment)
    given = f"{environment.get('no_proxy', '')},{environment.get('NO_PROXY', '')}".split(",")
    exempt = dict.fromkeys([*filter(None, map(str.strip, given)), *_LOOPBACK])
    return {**environment, "no_proxy": ",".join(exempt), "NO_PROXY": ",".join(exempt)}
