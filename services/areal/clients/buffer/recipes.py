"""Recipes, which the buffer keeps by the digest of their source."""

from __future__ import annotations

from areal.clients.buffer.connection import Role
from areal.v1 import buffer_service_pb2 as pb


class BufferRecipes(Role):
    """Stores recipes for the workers, and finds them."""

    async def put_recipe(self, file_name: str, source: bytes) -> str:
        """Stores a recipe's source; returns its digest (sha256 hex)."""
        request = pb.PutRecipeRequest(file_name=file_name, source=source)
        return (await self._call(self._stub.PutRecipe, request)).digest

    async def get_recipe(self, digest: str) -> tuple[str, bytes]:
        """Returns (file_name, source); NotFound for an unknown digest."""
        response = await self._call(self._stub.GetRecipe, pb.GetRecipeRequest(digest=digest))
        return response.file_name, response.source
