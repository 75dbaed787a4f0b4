"""The library that a recipe imports. Modules load on first use, so workers never import torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from areal.moved import keep_former_names

keep_former_names()

# Public name -> module that defines it. A new name is also added to the imports below.
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
    "LLMResponse": "areal.types",
    "McpServer": "areal.types",
    "MultiTurnWorkflow": "areal.workflows.multi_turn",
    "OfflineTrainer": "areal_torch.engines.offline",
    "RLVRWorkflow": "areal.workflows.rlvr",
    "RemoteSGLangEngine": "areal_torch.engines.rollout",
    "RolloutWorkflow": "areal.workflows.base",
    "StatefulLoader": "areal.datasets.loader",
    "ToolWorkflow": "areal.workflows.tool",
    "TrainEngine": "areal_torch.engines.train_api",
    "Trajectory": "areal.types",
    "VerifiersWorkflow": "areal.agents.verifiers",
    "WeightUpdateMeta": "areal.types",
    "group_reward": "areal.rewards.group",
    "load_expr_config": "areal.config.experiment",
    "make_trajectory": "areal.workflows.base",
    "rubric": "areal.rewards.rubric",
    "shuffle_rewards": "areal_torch.algorithms.controls",
}

# Type checkers take `X as X` for public; a test compares with the table.
if TYPE_CHECKING:
    from areal.agents.verifiers import VerifiersWorkflow as VerifiersWorkflow
    from areal.agents.workflow import AgentWorkflow as AgentWorkflow
    from areal.config.experiment import GRPOConfig as GRPOConfig
    from areal.config.experiment import load_expr_config as load_expr_config
    from areal.datasets.loader import StatefulLoader as StatefulLoader
    from areal.rewards.group import group_reward as group_reward
    from areal.rewards.rubric import rubric as rubric
    from areal.types import GenerationHyperparameters as GenerationHyperparameters
    from areal.types import LLMRequest as LLMRequest
    from areal.types import LLMResponse as LLMResponse
    from areal.types import McpServer as McpServer
    from areal.types import Trajectory as Trajectory
    from areal.types import WeightUpdateMeta as WeightUpdateMeta
    from areal.workflows.base import InferenceEngine as InferenceEngine
    from areal.workflows.base import RolloutWorkflow as RolloutWorkflow
    from areal.workflows.base import make_trajectory as make_trajectory
    from areal.workflows.conversation import Conversation as Conversation
    from areal.workflows.environment import Environment as Environment
    from areal.workflows.environment import EnvWorkflow as EnvWorkflow
    from areal.workflows.multi_turn import MultiTurnWorkflow as MultiTurnWorkflow
    from areal.workflows.rlvr import RLVRWorkflow as RLVRWorkflow
    from areal.workflows.tool import ToolWorkflow as ToolWorkflow
    from areal_torch.algorithms.controls import shuffle_rewards as shuffle_rewards
    from areal_torch.engines.offline import OfflineTrainer as OfflineTrainer
    from areal_torch.engines.ppo_actor import FSDPPPOActor as FSDPPPOActor
    from areal_torch.engines.ppo_critic import FSDPPPOCritic as FSDPPPOCritic
    from areal_torch.engines.rollout import RemoteSGLangEngine as RemoteSGLangEngine
    from areal_torch.engines.train_api import TrainEngine as TrainEngine
else:
    __all__ = sorted(_EXPORTS)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'areal' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
