"""Workflow objects, each built once and shared by all its episodes."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from types import ModuleType

from areal.errors import InvalidInput, NotFound
from areal.recipe import Recipe, forget_recipe, load_recipe
from areal.types import WorkflowSpec
from areal.workflows.base import RolloutWorkflow
from areal.workflows.specs import build_workflow

_MAX_WORKFLOWS = 256
_MAX_RECIPES = 32
_LOAD_TIMEOUT_S = 60.0

# digest -> (file name, source); raises NotFound.
FetchRecipe = Callable[[str], Awaitable[tuple[str, bytes]]]


class WorkflowCache:
    """Builds workflows from their descriptions; fetches and loads recipes by digest."""

    def __init__(self, fetch: FetchRecipe) -> None:
        self._fetch = fetch
        self._workflows: OrderedDict[WorkflowSpec, RolloutWorkflow] = OrderedDict()
        self._recipes: OrderedDict[str, asyncio.Task[ModuleType]] = OrderedDict()

    async def get(self, spec: WorkflowSpec) -> RolloutWorkflow:
        """Returns the workflow of a description.

        Raises:
            InvalidInput: Unknown recipe, workflow, function or argument; a recipe that fails.
            Unavailable: The buffer, which keeps the recipes, is away.
        """
        workflow = self._workflows.get(spec)
        if workflow is not None:
            return workflow
        module = await self._recipe(spec.recipe_digest) if spec.recipe_digest else None
        workflow = self._workflows.setdefault(spec, build_workflow(spec, module))
        if len(self._workflows) > _MAX_WORKFLOWS:
            self._workflows.popitem(last=False)
        return workflow

    async def _recipe(self, digest: str) -> ModuleType:
        """Loads once, however many ask; a failure is not remembered."""
        loading = self._recipes.get(digest)
        if loading is None:
            loading = asyncio.create_task(self._load(digest))
            self._recipes[digest] = loading
        try:
            # A caller that stops waiting must not end the loading for the others.
            return await asyncio.shield(loading)
        except BaseException:
            if loading.done() and self._recipes.get(digest) is loading:
                del self._recipes[digest]
            raise

    async def _load(self, digest: str) -> ModuleType:
        try:
            file_name, source = await self._fetch(digest)
        except NotFound:
            raise InvalidInput(
                f"workflow.recipe_digest {digest!r}: no such recipe (BufferService.PutRecipe)"
            ) from None
        if Recipe(file_name, source).digest != digest:
            raise InvalidInput(f"workflow.recipe_digest {digest!r}: its source has another digest")
        since = time.monotonic()
        try:
            # A thread: a recipe that imports slowly must not stop the renewal of leases.
            async with asyncio.timeout(_LOAD_TIMEOUT_S):
                module = await asyncio.to_thread(load_recipe, source, file_name)
        except TimeoutError:
            raise InvalidInput(
                f"recipe {file_name}: still loading after {time.monotonic() - since:.0f} s"
            ) from None
        if len(self._recipes) > _MAX_RECIPES:
            _, oldest = self._recipes.popitem(last=False)
            if oldest.done() and not oldest.cancelled() and oldest.exception() is None:
                forget_recipe(oldest.result())
        return module
