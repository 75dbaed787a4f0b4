"""What `make e2e-kubernetes` does, one stage after the other."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from tests.certificates import Authority
from tests.chaos.books import Check, check_books, read_ledger, read_lines
from tests.kubernetes import outside, upkeep
from tests.kubernetes.cluster import (
    CHART,
    ROOT,
    Cluster,
    Failed,
    Json,
    condition,
    is_leaving,
    ready_seconds,
    time_of,
    wait,
)

RUN = "/data/runs/arithmetic/demo"
SERVICES = ("gateway", "rollout", "reward", "buffer", "weight-sync")
TLS_SECRET = "e2e-tls"
WHOLE_RUN = 200
"""Steps after which the reward says something."""
FAR = 10_000
"""`total_train_steps` until the stage that ends the run: whatever the machine, training goes on."""
CHANGED = 'print(f"changed recipe at step {actor.get_version()}", flush=True)'


@dataclass
class Settings:
    """How to run it."""

    tag: str
    data: str
    """A folder of the node for everything that stays; empty: the extra values say where."""
    values: list[Path]
    steps: int
    """Train steps, at least; the run ends some steps after the last stage that needs training."""
    scratch: Path
    next_tag: str = ""
    """Another tag of the same images, to which the release is upgraded."""


@dataclass
class Run:
    """A release and what is known of it."""

    cluster: Cluster
    settings: Settings
    authority: Authority
    lines: list[tuple[str, float, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    chart: Path = CHART
    last: int = FAR
    """`total_train_steps`."""

    # -- helpers --------------------------------------------------------------------------------

    def step(self) -> int:
        """Finished train steps, as the run's files say; waits for the first."""
        return int(wait("the first train step", self.step_now, 900.0, pause=2.0))

    def step_now(self) -> int:
        """The same, once."""
        self.fail_with_the_job()
        rows = read_text_rows(self.cluster.read(f"{RUN}/metrics.jsonl"))
        return int(rows[-1]["step"]) if rows else 0

    def wait_for_step(self, step: int, timeout: float = 900.0) -> int:
        """Returns the number of finished steps once it is at least `step`."""

        def there() -> int:
            now = self.step_now()
            return now if now >= step else 0

        return int(wait(f"step {step}", there, timeout, pause=2.0))

    def fail_with_the_job(self) -> None:
        """A job that has failed will finish no step."""
        if failed := condition(self.cluster.trainer_job(), "Failed"):
            raise Failed(f"the trainer job failed: {failed['message']}")

    def servers(self, number: int, timeout: float = 300.0) -> None:
        """Exactly so many sglang pods, all ready: at the current weights."""

        def there() -> bool:
            pods = self.cluster.pods("sglang")
            return len(self.cluster.staying("sglang")) == number and not any(map(is_leaving, pods))

        wait(f"{number} ready inference servers", there, timeout)

    def values(self) -> list[str]:
        """The chart and its values, as helm's arguments."""
        settings = self.settings
        found = [str(self.chart), "--values", str(CHART / "ci" / "cpu-demo-values.yaml")]
        for file in settings.values:
            found += ["--values", str(file)]
        found += [
            "--set",
            f"image.repository=areal,image.tag={settings.tag},tls.existingSecret={TLS_SECRET}",
        ]
        found += ["--set", "rollout.service.type=NodePort,weightSync.replicaCount=2"]
        found += ["--set", f"overrides.total_train_steps={self.last}"]
        found += ["--set", f"overrides.actor.optimizer.warmup_steps_proportion={50 / self.last}"]
        if settings.data:
            found += ["--set", f"storage.hostPath={settings.data}/data"]
            found += ["--set", f"redis.hostPath={settings.data}/redis"]
        return found

    def arguments(self) -> list[str]:
        """Of `helm install` and `helm upgrade`."""
        return [*self.values(), "--wait", "--timeout", "15m"]

    def restore(self) -> None:
        """What stages have changed outside the namespace: nothing."""

    # -- stages ---------------------------------------------------------------------------------

    def install(self) -> str:
        """`helm install --wait`: until every pod is ready, sglang at the current weights."""
        cluster, began = self.cluster, time.monotonic()
        cluster.helm("install", "areal", *self.arguments())
        seconds = time.monotonic() - began
        made = float(
            wait("the end of the Job prepare", lambda: _seconds_of(*cluster.get("jobs")), 300)
        )
        slowest = {c: max(map(ready_seconds, cluster.staying(c))) for c in SERVICES}
        self.notes.append(
            "Time from the start of a service's container until its pod was ready: "
            + ", ".join(f"{name} {s:.0f} s" for name, s in slowest.items())
            + "."
        )
        return f"ready after {seconds:.0f} s, including {made:.0f} s to create the model"

    def test(self) -> str:
        """`helm test`."""
        text = self.cluster.helm("test", "areal", "--timeout", "5m")
        if "Succeeded" not in text:
            raise Failed(text)
        return "passed"

    def outside(self) -> str:
        """A client through port-forward, and one through the NodePort."""
        allowed = outside.security(
            self.authority, self.settings.scratch, self.cluster.secret("token")
        )
        with self.cluster.forward("areal-rollout", 50051) as address:
            first = asyncio.run(outside.check(address, allowed))
        (service,) = self.cluster.get("service", "areal-rollout-external")
        address = f"{node_address(self.cluster)}:{service['spec']['ports'][0]['nodePort']}"
        asyncio.run(outside.check(address, allowed))
        return f"port-forward and NodePort, each: {first}"

    def scale(self) -> str:
        """4 servers, then 1, while it trains."""
        times = []
        for number in (4, 1):
            began = time.monotonic()
            self.cluster.kubectl("scale", "deploy/sglang", f"--replicas={number}")
            self.servers(number)
            times.append(time.monotonic() - began)
            self.wait_for_step(self.step() + 2)
        return f"2 to 4 servers in {times[0]:.0f} s, 4 to 1 in {times[1]:.0f} s; training continued"

    def upgrade(self) -> str:
        """A changed recipe rolls the trainer, and nothing else."""
        cluster, settings = self.cluster, self.settings
        recipe = settings.scratch / "changed.py"
        source = (ROOT / "examples" / "arithmetic_grpo.py").read_text()
        anchor = "    actor = FSDPPPOActor(config.actor)\n"
        assert anchor in source
        recipe.write_text(source.replace(anchor, f"{anchor}    {CHANGED}\n"))
        before, job, step = self.service_pods(), cluster.trainer_job(), self.step()
        token = cluster.secret("token")
        cluster.helm("upgrade", "areal", *self.arguments(), "--set-file", f"recipe={recipe}")
        after = cluster.trainer_job()
        if after["metadata"]["name"] == job["metadata"]["name"]:
            raise Failed("the trainer job kept its name")
        if cluster.secret("token") != token:
            raise Failed("the generated token changed")
        if self.service_pods() != before:
            raise Failed("pods of services were replaced")
        replicas = cluster.get("deploy", "sglang")[0]["spec"]["replicas"]
        if replicas != 1:
            raise Failed(f"sglang has {replicas} replicas, kubectl scale had set 1")
        name = f"{after['metadata']['name']}-master-0"
        wait("the changed recipe", lambda: CHANGED[9:23] in cluster.kubectl("logs", name), 600.0)
        self.wait_for_step(step + 2)
        return "a new trainer job resumed the run; the services, the token and the 1 server stayed"

    def service_pods(self) -> set[str]:
        """Uids of the pods that no changed recipe may replace."""
        names = (*SERVICES, "redis", "nats", "sglang")
        return {p["metadata"]["uid"] for n in names for p in self.cluster.pods(n)}

    def rollback(self) -> str:
        """Back to the first revision: its recipe, its number of servers."""
        step = self.step()
        self.cluster.helm("rollback", "areal", "1", "--wait", "--timeout", "15m")
        self.servers(2)
        self.wait_for_step(step + 2)
        return "a job with the first recipe resumed the run; there are 2 servers again"

    def delete(self, component: str) -> str:
        """One pod, without warning; over when its successor works and training has continued."""
        cluster = self.cluster
        victim = self.victim(component)
        step, uid = self.step(), victim["metadata"]["uid"]
        number = len(cluster.staying(component))
        cluster.kubectl("delete", "pod", victim["metadata"]["name"], "--wait=false")

        def replaced() -> bool:
            pods = cluster.pods(component)
            back = len(cluster.staying(component)) >= number
            return back and all(pod["metadata"]["uid"] != uid for pod in pods)

        wait(f"a successor of {component}", replaced, 300.0)
        # The youngest is the successor.
        newest = max(cluster.staying(component), key=lambda p: p["metadata"]["creationTimestamp"])
        seconds = ready_seconds(newest)
        self.wait_for_step(step + 2)
        if component == "weight-sync":
            return f"at step {step}; the standby took over"
        return f"at step {step}; the new pod was ready {seconds:.0f} s after its container started"

    def victim(self, component: str) -> Json:
        """A pod of it; of the trainer the master, of weight-sync the leader."""
        pods = [pod for pod in self.cluster.pods(component) if not is_leaving(pod)]
        masters = [p for p in pods if p["metadata"]["name"].endswith("-master-0")]
        return (masters or self.cluster.staying(component) or pods)[0]

    def bump(self) -> str:
        """A chart of another version that makes the same pods replaces none."""
        wait("pods that were leaving to be gone", self.settled, 300.0)
        before, step = upkeep.lasting(self.cluster), self.step()
        self.chart = upkeep.bumped_chart(self.settings.scratch)
        self.cluster.helm("upgrade", "areal", *self.arguments())
        self.wait_for_step(step + 2)
        if before != (after := upkeep.lasting(self.cluster)):
            gone = sorted(before[each] for each in set(before) - set(after))
            raise Failed(f"pods were replaced or restarted: {gone}")
        return f"0 of {len(before)} pods were replaced; training continued"

    def settled(self) -> bool:
        """Whether no pod of the release is leaving."""
        return not any(map(is_leaving, self.cluster.get("pods")))

    def retag(self) -> str:
        """A new image tag replaces all pods, and the trainer resumes."""
        step, before = self.step(), upkeep.lasting(self.cluster)
        self.settings.tag = self.settings.next_tag
        self.cluster.helm("upgrade", "areal", *self.arguments())
        self.wait_for_step(step + 2)
        wait("pods that were leaving to be gone", self.settled, 300.0)
        if kept := set(before) & set(upkeep.lasting(self.cluster)):
            raise Failed(f"pods kept the old image: {sorted(before[each] for each in kept)}")
        return f"all {len(before)} pods were replaced; the trainer resumed at step {step}"

    def take_over(self) -> str:
        """The leader of weight-sync is killed or stopped, again and again."""
        cluster = self.cluster
        before, seconds = upkeep.published(cluster, "arithmetic/demo"), []
        for number in range(upkeep.TAKEOVERS):
            seconds.append(upkeep.lose_leader(cluster, number))
            self.wait_for_step(self.step() + 1)
        upkeep.leader_and_standby(cluster)
        after = upkeep.published(cluster, "arithmetic/demo")
        versions, count = (new - old for new, old in zip(after, before, strict=True))
        if versions != count:
            raise Failed(f"{versions} versions were published by {count} publications")
        if max(seconds) >= upkeep.LEADER_S:
            each = ", ".join(f"{s:.1f}" for s in seconds)
            raise Failed(f"a standby took over after {max(seconds):.1f} s; all times: {each}")
        each = f"{min(seconds):.1f} to {max(seconds):.1f} s"
        return (
            f"{len(seconds)} times, by turns killed and stopped: the standby was the leader after "
            f"{each}; {versions} versions were published meanwhile, each once"
        )

    def rotate(self) -> str:
        """New secrets beside the previous ones, then an upgrade that replaces all pods."""
        cluster, step = self.cluster, self.step()
        restarts = self.restarts()
        token = upkeep.rotate(cluster)
        gaps = upkeep.Gaps(self.step_now)
        try:
            cluster.helm("upgrade", "areal", *self.arguments())
            if cluster.secret("token") != token:
                raise Failed("the upgrade changed the rotated token")
            self.wait_for_step(self.step() + 2)
        finally:
            longest = gaps.close()
        if longest > upkeep.GAP_S:
            raise Failed(f"no step for {longest:.0f} s")
        more = self.restarts() - restarts
        return (
            f"at step {step}; at most {longest:.0f} s between two steps; "
            f"{max(0, more)} containers restarted"
        )

    def restarts(self) -> int:
        """Of all containers of the release's pods."""
        pods = self.cluster.get("pods", "-l", "app.kubernetes.io/instance=areal")
        statuses = [c for pod in pods for c in pod["status"].get("containerStatuses", [])]
        return sum(int(each["restartCount"]) for each in statuses)

    def revisions(self) -> str:
        """None failed."""
        return f"{upkeep.no_failed_revision(self.cluster)} revisions, none failed"

    def finish(self) -> str:
        """`helm upgrade` makes the run shorter; its job succeeds there."""
        self.last = max(self.step() + 100, self.settings.steps)
        self.cluster.helm("upgrade", "areal", *self.arguments())

        def over() -> Json | None:
            self.fail_with_the_job()
            return condition(self.cluster.trainer_job(), "Succeeded")

        wait("the end of the run", over, 3600.0, pause=3.0)
        return f"total_train_steps={self.last} by helm upgrade; the job succeeded there"

    def books(self) -> str:
        """Accounting: every task accounted for, none lost, none trained on twice; it learnt."""
        folder = self.settings.scratch / "run"
        folder.mkdir(parents=True)
        for name in ("metrics.jsonl", "batches.jsonl", "trainer.json"):
            (folder / name).write_text(self.cluster.read(f"{RUN}/{name}"))
        self.cluster.copy("areal-redis-0", "/data", folder / "redis")
        self.cluster.copy(self.cluster.mounting(), f"{RUN}/rollouts", folder / "rollouts")
        rows = read_lines(folder / "metrics.jsonl")
        ledger = read_ledger(folder, "arithmetic/demo", self.settings.scratch)
        submitted = int(ledger.meta.get("submitted", 0))
        summary = {"status": "finished", "accounting": {"submitted": submitted}}
        (folder / "summary.json").write_text(json.dumps(summary))
        (stored,) = self.cluster.get("configmap", "areal-config")
        config = yaml.safe_load(stored["data"]["config.yaml"])
        checks = list(
            check_books(
                ledger,
                folder,
                steps=self.last,
                batch=config["train_dataset"]["batch_size"],
                problems=config.get("train_problems", 6000),
                eta=config["rollout"]["max_head_offpolicyness"],
            )
        )
        if self.last >= WHOLE_RUN:
            checks.append(learnt([row["reward/mean"] for row in rows]))
        else:
            checks = [check for check in checks if "reward" not in check.name]
        for check in checks:
            self.notes.append(f"{'ok' if check.holds else 'NOT OK'}: {check.name}: {check.detail}")
        if broken := [check.name for check in checks if not check.holds]:
            raise Failed("; ".join(broken))
        return f"{submitted} tasks; all {len(checks)} checks passed"

    def uninstall(self) -> str:
        """Nothing stays but what was there before: the data lies in folders of the node."""
        self.cluster.helm("uninstall", "areal", "--wait", "--timeout", "5m")
        expected = {
            f"secrets/{TLS_SECRET}",
            "configmaps/kube-root-ca.crt",
            "serviceaccounts/default",
            "resourcequotas/team",  # `upkeep.limit` made both
            "limitranges/defaults",
        }

        def left() -> set[str]:
            kinds = self.cluster.kubectl(
                "api-resources", "--namespaced", "--verbs=list", "-o", "name"
            )
            names = [k for k in kinds.split() if not k.startswith(("events", "leases"))]
            found = self.cluster.kubectl(
                "get", ",".join(names), "-o", "name", "--ignore-not-found", check=False
            )
            plural = {name.replace("/", "s/", 1) for name in found.split()}
            claims = {n for n in plural if n.startswith("persistentvolumeclaims/")}
            tokens = {n for n in plural if n.startswith("secrets/default-token-")}
            return plural - expected - claims - tokens

        wait("an empty namespace", lambda: not left(), 180.0, pause=3.0)
        return "nothing is left"


def learnt(rewards: list[float]) -> Check:
    """Says whether the mean reward rose from the first 20 to the last 20 steps."""
    first, last = (sum(part) / len(part) for part in (rewards[:20], rewards[-20:]))
    detail = f"{first:.2f} -> {last:.2f} (first and last 20 steps)"
    return Check("the reward rises by at least 0.3", last >= first + 0.3, detail)


def node_address(cluster: Cluster) -> str:
    """Of the first node that has one."""
    for node in cluster.get("nodes"):
        for each in node["status"]["addresses"]:
            if each["type"] == "InternalIP":
                return str(each["address"])
    raise Failed("no node has an InternalIP")


def read_text_rows(text: str) -> list[Json]:
    """Whole lines of a .jsonl text."""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _seconds_of(job: Json) -> float:
    """From its start to its end; 0: it has not ended."""
    status = job["status"]
    if "completionTime" not in status:
        return 0.0
    return (time_of(status["completionTime"]) - time_of(status["startTime"])).total_seconds()
