"""What runs before anything else of docker-compose.yaml: secrets, the experiment file, the model.

Runs at every `up` and keeps what is there: secrets in /secrets, the resolved experiment file in
/data/config.yaml, version 0 of the model where that file says.
"""

import json
import os
import secrets
import shlex
import subprocess
import sys
from pathlib import Path

import yaml

from areal.model_directory import serving_dtype

DATA, SECRETS, RECIPES = Path("/data"), Path("/secrets"), Path("/recipes")
ENDPOINTS = {
    "redis": "redis://redis:6379/0",
    "nats": "nats://nats:4222",
    "buffer": "buffer:50051",
    "rollout": "rollout:50051",
    "reward": "reward:50051",
    "weight_sync": "weight-sync:50051",
    "weight_store": "http://weight-sync:8500",
    "trainer": "trainer:50051",
    "gateway": "http://gateway:8080",
    "inference": "[dns://inference:30000,dns://sglang:30000]",
}
SANDBOX = {"sandbox": "sandbox:50051", "sandbox_http": "http://sandbox:8080"}
TOKEN = SECRETS / "token"


def write(file: Path, text: str) -> None:
    """Replaces a file as a whole: a reader sees all of it or what was there before."""
    temporary = file.with_name(f".{file.name}.new")
    temporary.write_text(text)
    temporary.replace(file)


def make_secrets() -> None:
    """One password each; a token that was given (AREAL_TOKEN) replaces the one that was made."""
    os.umask(0o027)  # the group may read: Prometheus runs as a user of its own
    for name in ("token", "redis-password", "nats-token"):
        given = os.environ.get("AREAL_TOKEN", "") if name == "token" else ""
        file = SECRETS / name
        if given or not file.exists():
            write(file, f"{given or secrets.token_hex(32)}\n")
    # Both stores understand a JSON string.
    redis, nats = (
        json.dumps((SECRETS / name).read_text().strip())
        for name in ("redis-password", "nats-token")
    )
    write(SECRETS / "redis.conf", f"requirepass {redis}\n")
    write(SECRETS / "nats.conf", f"authorization {{ token: {nats} }}\nhttp: 127.0.0.1:8222\n")
    for folder in ("redis", "nats", "prometheus"):
        (Path("/stores") / folder).mkdir(exist_ok=True)


def resolve_experiment() -> dict:
    """The same file as for `areal run`, with the endpoints of this network."""
    sandbox = "sandbox" in os.environ["AREAL_PROFILES"].split(",")
    endpoints = ENDPOINTS | (SANDBOX if sandbox else {})
    overrides = [
        f"run_root={DATA}/runs",
        *(f"endpoints.{key}={value}" for key, value in endpoints.items()),
        f"security.dir={SECRETS}",
        *shlex.split(os.environ.get("AREAL_ARGS", "")),
    ]
    recipe = RECIPES / os.environ["AREAL_RECIPE"]
    resolved = subprocess.run(
        ["areal", "config", str(recipe), *overrides], stdout=subprocess.PIPE, text=True, check=False
    )
    if resolved.returncode:
        sys.exit(resolved.returncode)  # it has said why
    experiment = yaml.safe_load(resolved.stdout)
    check_sandbox(experiment, sandbox)
    write(DATA / "config.yaml", resolved.stdout)
    return experiment


def check_sandbox(experiment: dict, started: bool) -> None:
    """Ends with a line if boxes are wanted from a service that is not started, or the reverse."""
    boxes = experiment["sandbox"]["boxes"]
    if boxes and not started and not experiment["endpoints"]["sandbox"]:
        sys.exit(
            f"sandbox.boxes {boxes}: the sandbox service is not started: set "
            "COMPOSE_PROFILES=sandbox in the shell or in .env (the flag --profile is not enough)"
        )
    if started and not boxes:
        sys.exit(
            "sandbox.boxes 0 with COMPOSE_PROFILES=sandbox: expected the number of boxes to lend "
            "at a time, e.g. AREAL_ARGS=sandbox.boxes=8"
        )


def configure_engines(experiment: dict) -> None:
    """Configures both kinds of inference server from the same keys."""
    model = experiment["model"]
    common = {
        "model_path": str(DATA / model["path"]),
        "host": "0.0.0.0",
        "port": 30000,
        "dtype": model["dtype"],
        "context_length": model["context_length"],
        "max_running_requests": experiment["stack"]["inference_max_running"],
    }
    cpu = {"inference": {**common, "token_file": str(TOKEN)}}
    write(DATA / "inference.yaml", yaml.safe_dump(cpu))
    dtype = serving_dtype(model["dtype"], DATA / model["path"], gpu=True)
    gpu = {**common, "dtype": dtype, "api_key": TOKEN.read_text().strip()}
    renamed = {key.replace("_", "-"): value for key, value in gpu.items()}
    write(SECRETS / "sglang.yaml", yaml.safe_dump(renamed))


if __name__ == "__main__":
    make_secrets()
    experiment = resolve_experiment()
    configure_engines(experiment)
    print(
        f"{experiment['experiment_name']}/{experiment['trial_name']}: making version 0", flush=True
    )
    prepare = [sys.executable, "-m", "areal_trainer.prepare", "--config", str(DATA / "config.yaml")]
    sys.exit(subprocess.run(prepare, check=False).returncode)
