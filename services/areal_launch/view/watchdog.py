"""Asks every process of a stack what it waits for: the outside of `waits.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp

from areal.chassis.waits import Wait


async def ask_waits(
    addresses: Mapping[str, str], timeout: float, headers: Mapping[str, str] | None = None
) -> tuple[dict[str, list[Wait]], dict[str, str]]:
    """Reads /waits of many processes at once.

    Args:
        addresses: Process to host:port of its /metrics.
        timeout: Seconds for each.
        headers: The bearer token.

    Returns:
        (process to its waits, the oldest first; process to why it did not answer). A process
        without /waits (SGLang itself) is in neither.
    """
    waits: dict[str, list[Wait]] = {}
    problems: dict[str, str] = {}

    async def ask(http: aiohttp.ClientSession, name: str, address: str) -> None:
        try:
            async with http.get(f"http://{address}/waits") as reply:
                if reply.status == 404:
                    return
                reply.raise_for_status()
                waits[name] = [Wait(**wait) for wait in (await reply.json())["waits"]]
        except TimeoutError:
            problems[name] = f"http://{address}/waits: no answer within {timeout:g} s"
        except (aiohttp.ClientError, ValueError, TypeError, KeyError) as error:
            problems[name] = f"http://{address}/waits: {error or type(error).__name__}"

    limit = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(timeout=limit, headers=headers) as http:
        await asyncio.gather(*(ask(http, name, at) for name, at in addresses.items() if at))
    return waits, problems
