"""What a rollout worker counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from areal.types import SPLIT_FIELDS, Trajectory, split_field
from areal_rollout.autoscaling import Load


class RolloutMetrics:
    """All metrics of the service; the methods are called by the core, which knows no Prometheus."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._episodes = Counter(
            "areal_rollout_episodes",
            "Episodes that ended, by outcome: completed, rejected, equal_rewards, no_answer, "
            "workflow_error, infrastructure, drain, lost.",
            ["outcome"],
            registry=registry,
        )
        self._running = Gauge(
            "areal_rollout_running_episodes", "Episodes running now.", registry=registry
        )
        self._oldest = Gauge(
            "areal_rollout_oldest_episode_seconds",
            "Age of the oldest running episode.",
            registry=registry,
        )
        self._servers = Gauge(
            "areal_rollout_serving_servers",
            "Inference servers that this worker can send requests to.",
            registry=registry,
        )
        self._tokens = Counter(
            "areal_rollout_generated_tokens",
            "Tokens sampled in finished requests.",
            registry=registry,
        )
        self._requests = Histogram(
            "areal_rollout_request_seconds",
            "Time from choosing the first server to the last token of an answer or a whole group.",
            registry=registry,
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )
        self._interruptions = Counter(
            "areal_rollout_interruptions",
            "Interrupted requests, by kind: abort (update or drain), failure (of a server), "
            "busy (the server's queue was full).",
            ["kind"],
            registry=registry,
        )
        self._salvaged = Counter(
            "areal_rollout_salvaged_tokens",
            "Tokens kept from requests whose server died or stopped answering.",
            registry=registry,
        )
        self._replayed = Counter(
            "areal_rollout_replayed_tokens",
            "Tokens reused from the journals of interrupted episodes.",
            registry=registry,
        )
        self._drifted = Counter(
            "areal_rollout_prompt_drift",
            "Episodes lost because a later prompt did not begin with the previous prompt and "
            "output; build prompts with areal.Conversation.",
            registry=registry,
        )
        self._dropped = Counter(
            "areal_rollout_dropped_answers",
            "Answers of outside agents' sessions that are not trained on, because the client sent "
            "their request again and no gateway had sent them completely.",
            registry=registry,
        )
        self._splits = Counter(
            "areal_rollout_conversation_splits",
            "Trajectories that repeat the history of an earlier one of their attempt instead of "
            "continuing it, by the field of a message that the agent changed first: "
            f"{', '.join(SPLIT_FIELDS)} (areal show TASK names the message).",
            ["field"],
            registry=registry,
        )
        self._bugs = Counter(
            "areal_rollout_agent_call_bugs",
            "Calls of outside agents answered with status 500: an unexpected exception, whose "
            "traceback is in the log as agent_call_failed.",
            registry=registry,
        )
        self._busy = Counter(
            "areal_rollout_busy_seconds",
            "Time during which at least one episode was running.",
            registry=registry,
        )
        self._generation_busy = Gauge(
            "areal_rollout_generation_busy_fraction",
            "Share of the last 4 minutes during which at least one episode was running.",
            registry=registry,
        )
        self._training_busy = Gauge(
            "areal_rollout_training_busy_fraction",
            "Share of the last steps' time during which the trainer did not wait for a batch.",
            registry=registry,
        )
        self._training_known = Gauge(
            "areal_rollout_training_known",
            "1 if the trainer reports its step times, otherwise 0.",
            registry=registry,
        )
        self._recommended = Gauge(
            "areal_rollout_recommended_inference_servers",
            "Number of servers with which generation takes 0.85 of the training time; 0 if "
            "unknown.",
            registry=registry,
        )
        self._idle = Counter(
            "areal_rollout_waiting_seconds",
            "Time spent waiting to lease a task, by reason: queue, admission, no_server, ledger.",
            ["reason"],
            registry=registry,
        )
        self._outcome = {
            name: self._episodes.labels(name)
            for name in (
                "completed",
                "rejected",
                "equal_rewards",
                "no_answer",
                "workflow_error",
                "infrastructure",
                "drain",
                "lost",
            )
        }

    def watch(
        self,
        running: Callable[[], int],
        oldest_s: Callable[[], float],
        servers: Callable[[], int],
    ) -> None:
        """Reads gauges when they are asked for."""
        self._running.set_function(running)
        self._oldest.set_function(oldest_s)
        self._servers.set_function(servers)

    def episode_ended(self, outcome: str) -> None:
        """Counts an episode that has ended."""
        self._outcome[outcome].inc()

    def busy(self, seconds: float) -> None:
        """Adds time in which at least one episode was running."""
        self._busy.inc(seconds)

    def recommended(self, servers: int, load: Load, training_known: bool) -> None:
        """Sets what an autoscaler should do, and why."""
        self._recommended.set(servers)
        self._generation_busy.set(load.generation_busy)
        self._training_busy.set(load.training_busy)
        self._training_known.set(training_known)

    def waited(self, reason: str, seconds: float) -> None:
        """Adds time in which no task could be leased."""
        self._idle.labels(reason).inc(seconds)

    def replayed(self, tokens: int) -> None:
        """Counts tokens that came from a journal."""
        self._replayed.inc(tokens)

    def drifted(self) -> None:
        """Counts a lost episode: a later prompt did not begin with the tokens before it."""
        self._drifted.inc()

    def dropped_answers(self, count: int) -> None:
        """Counts answers that were not used, since their requests were repeated."""
        self._dropped.inc(count)

    def conversations_split(self, trajectories: Sequence[Trajectory]) -> None:
        """Counts those that do not continue an earlier one, by the field that changed."""
        for each in trajectories:
            if each.split:
                self._splits.labels(split_field(each.split)).inc()

    def agent_call_bug(self) -> None:
        """Counts an agent's call that failed with an unexpected exception."""
        self._bugs.inc()

    def request_done(self, seconds: float, tokens: int) -> None:
        """Counts a generation request that succeeded."""
        self._requests.observe(seconds)
        self._tokens.inc(tokens)

    def interruption(self, kind: str) -> None:
        """Counts a generation request that was interrupted."""
        self._interruptions.labels(kind).inc()

    def salvaged(self, tokens: int) -> None:
        """Counts tokens of a broken stream, which are kept."""
        self._salvaged.inc(tokens)
