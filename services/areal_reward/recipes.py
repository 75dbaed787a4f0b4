"""Recipe sources by digest, fetched once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

GetRecipe = Callable[[str], Awaitable[tuple[str, bytes]]]


class RecipeCache:
    """Keeps the last recipes; callers that ask together share one fetch."""

    def __init__(self, get_recipe: GetRecipe, capacity: int = 32) -> None:
        """Takes `async get_recipe(digest) -> (file name, source)`."""
        self._get_recipe = get_recipe
        self._capacity = capacity
        self._fetches: OrderedDict[str, asyncio.Future[tuple[str, bytes]]] = OrderedDict()

    async def get(self, digest: str) -> tuple[str, bytes]:
        """Returns (file name, source); raises as `get_recipe`, and then forgets the fetch."""
        fetch = self._fetches.get(digest)
        if fetch is None:
            fetch = asyncio.ensure_future(self._get_recipe(digest))
            self._fetches[digest] = fetch
            while len(self._fetches) > self._capacity:
                self._fetches.popitem(last=False)
        self._fetches.move_to_end(digest)
        try:
            # One caller's cancellation is not the others'.
            return await asyncio.shield(fetch)
        finally:
            if fetch.done() and (fetch.cancelled() or fetch.exception() is not None):
                self._fetches.pop(digest, None)
