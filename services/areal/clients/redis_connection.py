"""Connections to Redis that survive outages."""

from __future__ import annotations

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from areal.errors import ConfigError
from areal.security import redact


def redis_prefix(namespace: str) -> str:
    """Returns a run's key prefix; the braces keep all its keys in one slot of a Redis cluster."""
    return f"areal:{{{namespace}}}:"


def connect_redis(url: str, *, password: str = "", max_connections: int = 64) -> redis.Redis:
    """Returns a lazy client; its commands retry a lost connection for some seconds.

    Args:
        url: redis://[:password@]host:port/db
        password: Used if the url has none.
        max_connections: Size of the pool; a command waits when all are in use.
    """
    if not url:
        raise ConfigError("endpoints.redis '': expected redis://host:port")
    try:
        pool = redis.BlockingConnectionPool.from_url(
            url,
            password=password or None,  # one in the url wins
            max_connections=max_connections,
            timeout=30,
            socket_timeout=30.0,
            socket_connect_timeout=5.0,
            health_check_interval=15,
            retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), retries=6),
            retry_on_error=[RedisConnectionError, RedisTimeoutError],
        )
        return redis.Redis.from_pool(pool)
    except ValueError:  # its words may quote a password
        raise ConfigError(
            f"endpoints.redis {redact(url)!r}: expected redis://[:password@]host:port/db, with "
            "special characters of the password percent-encoded"
        ) from None
