"""Removed keys of experiment files, and what to write instead."""

from __future__ import annotations

_IN_CODE = "it has one value for all runs; a recipe may set it on config.actor in its main"
_CONSTANT = "it has one value for all runs now"

# A key, or the section that all of them were in.
_HINTS = {
    "async_training": "call prepare_batch (generation runs ahead) or rollout_batch in the recipe",
    "model.tokenizer_path": "the tokenizer is in model.path",
    "rollout.straggler_deadline_s": _CONSTANT,
    "rollout.batch_timeout_s": "it is 3 times rollout.request_timeout_s now",
    "rollout.max_attempts": _CONSTANT,
    "rollout.max_infrastructure_attempts": _CONSTANT,
    "rollout.max_group_bytes": _CONSTANT,
    "buffer.serve_result_ttl_s": _CONSTANT,
    "weight_sync.sidecar_port": _CONSTANT,
    "actor.reward_bias": "add it in the reward function",
    "weight_sync.keep_versions": "it is checkpoint.keep + 1 now",
    "weight_sync.update_timeout_s": "use rollout.setup_timeout_s",
    "checkpoint.recover": "a trial always resumes; for a fresh start choose another trial_name",
    "stack.ready_timeout_s": "use rollout.setup_timeout_s",
    "stack.slurm.partition": "use stack.slurm.sbatch=[--partition=...]",
    "stack.slurm.account": "use stack.slurm.sbatch=[--account=...]",
    "stack.slurm.hours": "use stack.slurm.sbatch=[--time=HH:MM:SS]",
    "stack.slurm.cpus_per_node": "use stack.slurm.sbatch=[--cpus-per-task=N]",
    "stack.kubernetes.release": "it is made from experiment_name and trial_name",
    "stack.kubernetes.helm": "the helm on PATH is used",
    "stack.kubernetes.kubectl": "the kubectl on PATH is used",
    "stack.kubernetes.timeout_s": "use rollout.setup_timeout_s",
    "security.token_file": "use the file `token` in security.dir",
    "security.redis_password_file": "use the file `redis-password` in security.dir",
    "security.nats_token_file": "use the file `nats-token` in security.dir",
    "security.tls_cert": "use the file tls.crt in security.tls_dir",
    "security.tls_key": "use the file tls.key in security.tls_dir",
    "security.tls_ca": "use the file ca.crt in security.tls_dir",
    "train_dataset.shuffle": "use StatefulLoader(rows, shuffle=False) in the recipe",
    "gconfig.min_new_tokens": "set it on the workflow's own GenerationHyperparameters",
    "gconfig.greedy": "set temperature 0 on an evaluation's own GenerationHyperparameters",
    "actor.path": "use model.path",
    "actor.seed": "use seed",
    "actor.temperature": "use gconfig.temperature",
    "actor.master_dtype": "it is 32 bits now, or actor.dtype if that has more",
    "actor.distributed_timeout_seconds": "it is 5 times rollout.setup_timeout_s now",
    "actor.importance_sampling_level": "use actor.loss_type=gspo",
    "actor.use_decoupled_loss": "use actor.prox_logp_method=unweighted",
    "actor.recompute_logprob": "use actor.prox_logp_method=behavior",
    "actor.overlong_reward_penalty": "use actor.overlong_tokens",
    "actor.max_response_tokens": "use gconfig.max_new_tokens",
    "ref": "ref is frozen and uses the settings of actor; it has only path and offload",
    **dict.fromkeys(
        [
            "actor.init_from_scratch", "actor.share_prefixes",
            "actor.logits_chunk_elements", "actor.fsdp_at_world_size_1",
            "actor.overlong_penalty_factor", "actor.discount",
            "actor.mb_spec.n_mbs", "actor.optimizer.beta1", "actor.optimizer.eps",
            "actor.optimizer.max_skipped_steps",
        ],
        _IN_CODE,
    ),
}  # fmt: skip


def hint_for(key: str) -> str:
    """Returns what to do instead of setting `key`; "" if it was never a key."""
    while key not in _HINTS and "." in key:
        key = key.rpartition(".")[0]
    return _HINTS.get(key, "")
