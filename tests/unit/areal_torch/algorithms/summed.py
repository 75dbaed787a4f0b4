"""The policy losses added up over tokens, as the engine does before it divides."""

from areal_torch.algorithms import losses


def _summed(loss_fn, *tensors, weight=None, **options):
    each, stats = loss_fn(*tensors, **options)
    return losses.add_up(each, stats, tensors[3], weight)


def ppo_actor_loss(*tensors, importance_sampling_level="token", cu_seqlens=None, **options):
    if importance_sampling_level == "sequence":
        return _summed(losses.gspo_loss, *tensors, cu_seqlens=cu_seqlens, **options)
    return _summed(losses.ppo_actor_loss, *tensors, **options)


def cispo_loss(*tensors, **options):
    return _summed(losses.cispo_loss, *tensors, **options)


def sapo_loss(*tensors, **options):
    return _summed(losses.sapo_loss, *tensors, **options)
