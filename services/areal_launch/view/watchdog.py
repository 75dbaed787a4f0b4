"""Asks processes what they wait for (see `areal.chassis.waits`), and servers how fast they are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

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


async def ask_speed(
    urls: Sequence[str], headers: Mapping[str, str] | None = None, timeout: float = 2.0
) -> tuple[int, float] | None:
    """Reads /v1/loads of inference servers at once.

    Args:
        urls: Of the servers, e.g. http://host:port.
        headers: The bearer token.
        timeout: Seconds for each.

    Returns:
        (running requests, tokens sampled per second), added up over the servers that answered;
        None: no server did.
    """

    async def ask(http: aiohttp.ClientSession, url: str) -> tuple[int, float] | None:
        try:
            async with http.get(f"{url}/v1/loads") as reply:
                reply.raise_for_status()
                loads = (await reply.json())["loads"]
                running = sum(int(each["num_running_reqs"]) for each in loads)
                return running, sum(float(each["gen_throughput"]) for each in loads)
        except (TimeoutError, aiohttp.ClientError, ValueError, TypeError, KeyError):
            return None

    limit = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(timeout=limit, headers=headers) as http:
        answers = await asyncio.gather(*(ask(http, url) for url in urls))
    found = [answer for answer in answers if answer is not None]
    return (sum(n for n, _ in found), sum(speed for _, speed in found)) if found else None
