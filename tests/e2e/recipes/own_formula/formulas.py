"""PPO's clipped loss and GRPO's advantages, as a recipe would write them.

Imports no torch: rollout and reward workers, whose images lack it, load this module, too.
"""


def clipped(policy_logprobs, proximal_logprobs, advantages, *, low, high):
    """A loss for each token, with two constants, and a statistic."""
    ratio = (policy_logprobs - proximal_logprobs).exp()
    within = ratio.clamp(1 - low, 1 + high)
    return (-advantages * ratio).maximum(-advantages * within), {"my/ratio": ratio}


def of_the_group(rewards, group_index):
    """An advantage for each sequence: relative to its group's mean, in standard deviations."""
    found = rewards.clone()
    for group in group_index.unique():
        mine = group_index == group
        values = rewards[mine]
        spread = values.std() + 1e-5 if values.std() > 0 else 1.0
        found[mine] = (values - values.mean()) / spread
    return found
