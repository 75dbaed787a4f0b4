"""Servers from a DNS name: each A and AAAA record is one (Compose scale, headless Services).

    resolve ──> yield the listing ──> wait: the records' time to live, within 1 to 5 s ──> resolve

| state     | consumes      | waits for                  | unblocked by            |
|-----------|---------------|----------------------------|-------------------------|
| resolving | two questions | the nameserver             | its answer, or 5 s      |
| waiting   | nothing       | the time to live, 1 to 5 s | it is over              |

A new record counts at once, a missing one after two answers without it: some nameservers hand out
a part of the records each time. Docker says a time to live of 600 s and changes its answers at
once, hence the upper limit. A nameserver that does not answer takes nothing away.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncGenerator

import dns.asyncresolver
import dns.exception
import dns.resolver

from areal.chassis.logging import get_logger
from areal.config.server_sources import ServerSource
from areal.errors import ConfigError
from areal_weight_sync.discovery.base import Listing, Source, listing_of

_ANSWER_WITHIN_S = 5.0


class DnsSource(Source):
    """Finds servers by DNS; see the module's picture."""

    def __init__(self, source: ServerSource, min_s: float = 1.0, max_s: float = 5.0) -> None:
        """Reads resolv.conf; asks no one yet.

        Args:
            source: The entry.
            min_s: Least time between two resolutions.
            max_s: Most time between them.

        Raises:
            ConfigError: The system has no nameserver, or the entry's is no address.
        """
        super().__init__(source.entry)
        self._source = source
        self._min_s, self._max_s = min_s, max_s
        self._resolver = _resolver(source)
        self._missed: set[str] = set()
        self._log = get_logger(__name__).bind(source=source.entry)
        self._away = False

    async def watch(self) -> AsyncGenerator[Listing, None]:
        listed: set[str] = set()
        first = True
        while True:
            addresses, complete, ttl = await self._resolve()
            missing = listed - addresses
            gone = (missing & self._missed) if complete else set()
            if complete:
                self._missed = missing - gone
            now = (listed | addresses) - gone
            if now != listed or (first and complete):
                listed, first = now, False
                yield listing_of([_url(address, self._source.port) for address in sorted(now)])
            await asyncio.sleep(min(max(ttl, self._min_s), self._max_s))

    async def _resolve(self) -> tuple[set[str], bool, float]:
        """Addresses, whether both questions were answered, and the least time to live."""
        kinds = ("A", "AAAA")
        answers = await asyncio.gather(*(self._ask(kind) for kind in kinds))
        known = [answer for answer in answers if answer is not None]
        addresses = {address for found, _ in known for address in found}
        ttl = min((ttl for _, ttl in known), default=self._min_s)
        complete = len(known) == len(kinds)
        if complete and self._away:
            self._log.info("names_resolved_again")
        self._away = not complete
        return addresses, complete, ttl

    async def _ask(self, kind: str) -> tuple[set[str], float] | None:
        """Addresses and time to live; None when no one could say."""
        try:
            answer = await self._resolver.resolve(
                self._source.name,
                kind,
                search=True,
                lifetime=_ANSWER_WITHIN_S,
                raise_on_no_answer=False,
            )
        except dns.resolver.NXDOMAIN:  # an answer too: no such name, no server
            return set(), self._min_s
        except (dns.exception.DNSException, OSError) as error:
            if not self._away:
                self._log.warning("name_not_resolved", kind=kind, error=str(error)[:300])
            return None
        if answer.rrset is None:
            return set(), self._max_s
        return {str(record.address) for record in answer.rrset}, float(answer.rrset.ttl)


def _resolver(source: ServerSource) -> dns.asyncresolver.Resolver:
    try:
        resolver = dns.asyncresolver.Resolver(configure=not source.nameserver)
    except dns.resolver.NoResolverConfiguration as error:
        raise ConfigError(f"endpoints.inference {source.entry!r}: {error}") from None
    if source.nameserver:
        host, _, port = source.nameserver.partition(":")
        try:
            resolver.nameservers = [str(ipaddress.ip_address(host))]
            resolver.port = int(port or 53)
        except ValueError:
            raise ConfigError(
                f"endpoints.inference {source.entry!r}: expected an IPv4 address of a nameserver"
            ) from None
    return resolver


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
