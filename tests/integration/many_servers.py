"""`python -m tests.integration.many_servers MODEL PORT…`: real CPU engines, all in one process."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

from areal.chassis.logging import configure_logging
from areal_inference.config import InferenceConfig
from areal_inference.server import InferenceServer


async def serve(model: str, ports: list[int]) -> None:
    # Each would have threads of its own; some that pull would keep others from giving.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(8 * len(ports)))
    configs = [
        InferenceConfig(
            model_path=model,
            port=port,
            context_length=256,
            max_running_requests=4,
            max_total_tokens=1024,
            skip_tokenizer_init=True,
        )
        for port in ports
    ]
    await asyncio.gather(*(InferenceServer.serve(config) for config in configs))


if __name__ == "__main__":
    configure_logging("inference", "")
    asyncio.run(serve(sys.argv[1], [int(port) for port in sys.argv[2:]]))
