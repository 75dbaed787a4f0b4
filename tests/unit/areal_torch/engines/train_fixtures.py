"""Small models and batches for the tests of training."""

import torch

from areal_torch.algorithms import packing


def make_batch(seed=0, groups=5, per_group=3, vocabulary=261, longest=14, **keys):
    """Make a batch of groups with common prompts, tool tokens, versions and behavior logprobs."""
    g = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high, (1,), generator=g))

    sequences, group_index = [], []
    for group in range(groups):
        prompt = torch.randint(0, vocabulary, (integer(2, 9),), generator=g).tolist()
        for _ in range(per_group):
            answer = torch.randint(0, vocabulary, (integer(2, longest),), generator=g).tolist()
            mask = [True] * len(answer)
            if len(answer) > 6:
                mask[2] = mask[3] = False
            mask = [False] * len(prompt) + mask
            sequences.append(
                {
                    "input_ids": prompt + answer,
                    "loss_mask": mask,
                    "behavior_logprobs": [-5.5 * m + 0.3 * m * integer(-2, 3) for m in mask],
                    "token_versions": [integer(1, 4) if m else -1 for m in mask],
                    "rewards": [0.0] * (len(mask) - 1) + [float(integer(0, 2))],
                }
            )
            group_index.append(group)
    batch = packing.pack(sequences, group_index)
    return {**batch, **keys}


def routes_of(batch, seed, layers, experts, chosen):
    """Make random routes that agree on common prompts, int16 [T, layers, k]."""
    g = torch.Generator().manual_seed(seed)
    groups = batch["group_index"][packing.sequence_index(batch["cu_seqlens"])]
    # One table a group: its sequences have the same routes where they have the same tokens.
    shape = (int(groups.max()) + 1, int(batch["cu_seqlens"].diff().max()), layers, experts)
    table = torch.rand(shape, generator=g).argsort(-1)[..., :chosen].short()
    return table[groups, packing.position_ids(batch["cu_seqlens"])]


def weighted_loss(logprobs, entropies, batch):
    """A loss whose gradient differs from token to token."""
    weight = torch.cos(batch["input_ids"].to(logprobs.dtype)) + 1.5
    return -(weight * logprobs * batch["loss_mask"]).sum(), {"weight": weight.sum()}


def gradients(engine, batch, loss_fn=weighted_loss):
    """Return the gradient that a train step would use, by parameter name, and its statistics."""
    held = {}
    original = engine.step._optimizer_step

    def keep(weight):
        for name, parameter in engine.model.named_parameters():
            if not parameter.requires_grad:
                continue
            grad = parameter.grad
            held[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
            held[name] /= max(weight, 1.0)
        engine.step.optimizer.zero_grad(set_to_none=True)
        return torch.zeros(()), 0.0

    engine.step._optimizer_step = keep
    try:
        stats = engine.train_batch(batch, loss_fn)
    finally:
        engine.step._optimizer_step = original
    return held, stats


def assert_gradients_close(ours, expected, relative):
    """Compare the norm of the difference with the norm of all gradients."""
    norm = sum(float(g.double().square().sum()) for g in expected.values()) ** 0.5
    assert norm > 0
    assert ours.keys() == expected.keys()
    error = sum(float((ours[k] - expected[k]).double().square().sum()) for k in ours) ** 0.5
    assert error <= relative * norm, f"gradients differ by {error / norm:.2e} of their norm"
