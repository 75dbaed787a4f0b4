"""What drives sessions through gateways: a stack with several of them, and a small client."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.integration.stack_tools import eventually
from tests.rollout_stack import Stack, free_port, start_stack

from areal.config.experiment import save_config


def _nothing(_: str) -> Sequence[str]:
    return ()


@contextmanager
def agents_stack(
    folder: Path,
    gateways: int,
    workers: int = 1,
    under: Callable[[str], Sequence[str]] = _nothing,
    **rollout: object,
) -> Iterator[tuple[Stack, list[str]]]:
    """A whole generation side with rollout workers and gateways; yields it and their URLs.

    Args:
        folder: For files, stores and logs.
        gateways: How many.
        workers: How many rollout workers, "rollout", "rollout-1", ….
        under: For a process, the module under which its own is run, and arguments.
        **rollout: See `start_stack`.
    """
    with start_stack(folder, **rollout) as whole:  # type: ignore[arg-type]
        ends = whole.config.endpoints
        names = ["rollout", *(f"rollout-{number}" for number in range(1, workers))]
        places = [ends.rollout, *(f"127.0.0.1:{free_port()}" for _ in names[1:])]
        if workers > 1:
            ends.rollout = ",".join(places)
            save_config(whole.config, whole.config_file)
        for name, place in zip(names, places, strict=True):
            whole.service("rollout", place, name, under=under(name))
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(gateways)]
        for number, address in enumerate(addresses):
            name = f"gateway-{number}"
            whole.service("gateway", address, name, under=under(name))
        for name, place in zip(names, places, strict=True):
            whole.wait(name, place)
            eventually(
                lambda name=name: (  # type: ignore[misc]
                    whole.metric(name, "areal_rollout_serving_servers") == len(ends.inference)
                ),
                f"{name} knows every server",
                60.0,
            )
        urls = [f"http://{address}" for address in addresses]
        for url in urls:
            eventually(lambda url=url: serves(url), f"{url} serves", 60.0)  # type: ignore[misc]
        yield whole, urls


def serves(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


RETRYABLE = (408, 409, 429, 500, 502, 503, 504)


class Refused(Exception):
    """An answer that no retry would change."""


async def request(
    urls: list[str],
    method: str,
    path: str,
    key: str = "",
    body: Any = None,
    tries: int = 200,
    seen: Counter[str] | None = None,
) -> Any:
    """As a careful client asks: any gateway, again while that may help.

    `seen` counts what kept it from an answer, by status.
    """
    last, idempotency_key = "", uuid.uuid4().hex
    for number in range(tries):
        headers = {"x-stainless-retry-count": str(number), "Idempotency-Key": idempotency_key}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            async with httpx.AsyncClient(timeout=60.0) as http:
                url = random.choice(urls) + path
                reply = await http.request(method, url, json=body, headers=headers)
        except httpx.HTTPError as error:
            last = repr(error)
            status = "connection"
        else:
            if reply.status_code == 200:
                return reply.json()
            last = f"{reply.status_code} {reply.text}"
            status = str(reply.status_code)
            if reply.status_code not in RETRYABLE:
                raise Refused(last)
        if seen is not None:
            seen[status] += 1
        await asyncio.sleep(0.3)
    raise AssertionError(f"{method} {path}: {last}")
