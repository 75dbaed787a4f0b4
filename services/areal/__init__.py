"""The library that a recipe imports. Modules load on first use, so workers never import torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from areal.moved import keep_former_names

keep_former_names()

# Public name -> module that defines it.
_EXPORTS = {
    "AgentWorkflow": "areal.agents.workflow",
    "Conversation": "areal.workflows.conversation",
    "EnvWorkflow": "areal.workflows.environment",
    "Environment": "areal.workflows.environment",
    "FSDPPPOActor": "areal_torch.engines.ppo_actor",
    "FSDPPPOCritic": "areal_torch.engines.ppo_critic",
    "GRPOConfig": "areal.config.experiment",
    "GenerationHyperparameters": "areal.types",
    "InferenceEngine": "areal.workflows.base",
    "LLMRequest": "areal.types",
    "McpServer": "areal.types",
    "LLMResponse": "areal.types",
    "MultiTurnWorkflow": "areal.workflows.multi_turn",
    "OfflineTrainer": "areal_torch.engines.offline",
    "RLVRWorkflow": "areal.workflows.rlvr",
    "RemoteSGLangEngine": "areal_torch.engines.rollout",
    "RolloutWorkflow": "areal.workflows.base",
    "make_trajectory": "areal.workflows.base",
    "StatefulLoader": "areal.datasets.loader",
    "ToolWorkflow": "areal.workflows.tool",
    "TrainEngine": "areal_torch.engines.train_api",
    "Trajectory": "areal.types",
    "VerifiersWorkflow": "areal.agents.verifiers",
    "WeightUpdateMeta": "areal.types",
    "group_reward": "areal.rewards.group",
    "load_expr_config": "areal.config.experiment",
    "rubric": "areal.rewards.rubric",
    "shuffle_rewards": "areal_torch.algorithms.controls",
}

__all__ = [
    "AgentWorkflow",
    "Conversation",
    "EnvWorkflow",
    "Environment",
    "FSDPPPOActor",
    "FSDPPPOCritic",
    "GRPOConfig",
    "GenerationHyperparameters",
    "InferenceEngine",
    "LLMRequest",
    "LLMResponse",
    "McpServer",
    "MultiTurnWorkflow",
    "OfflineTrainer",
    "RLVRWorkflow",
    "RemoteSGLangEngine",
    "RolloutWorkflow",
    "StatefulLoader",
    "ToolWorkflow",
    "TrainEngine",
    "Trajectory",
    "VerifiersWorkflow",
    "WeightUpdateMeta",
    "group_reward",
    "load_expr_config",
    "make_trajectory",
    "rubric",
    "shuffle_rewards",
]

if TYPE_CHECKING:
    from areal.agents.verifiers import VerifiersWorkflow
    from areal.agents.workflow import AgentWorkflow
    from areal.config.experiment import GRPOConfig, load_expr_config
    from areal.datasets.loader import StatefulLoader
    from areal.rewards.group import group_reward
    from areal.rewards.rubric import rubric
    from areal.types import (
        GenerationHyperparameters,
        LLMRequest,
        LLMResponse,
        Trajectory,
        WeightUpdateMeta,
    )
    from areal.workflows.base import InferenceEngine, RolloutWorkflow, make_trajectory
    from areal.workflows.conversation import Conversation
    from areal.workflows.environment import Environment, EnvWorkflow
    from areal.workflows.multi_turn import MultiTurnWorkflow
    from areal.workflows.rlvr import RLVRWorkflow
    from areal.workflows.tool import ToolWorkflow
    from areal_torch.algorithms.controls import shuffle_rewards
    from areal_torch.engines.offline import OfflineTrainer
    from areal_torch.engines.ppo_actor import FSDPPPOActor
    from areal_torch.engines.ppo_critic import FSDPPPOCritic
    from areal_torch.engines.rollout import RemoteSGLangEngine
    from areal_torch.engines.train_api import TrainEngine


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'areal' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
