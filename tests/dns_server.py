"""A real DNS server over UDP, small: one name, its addresses, and what may go wrong."""

from __future__ import annotations

import asyncio

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class DnsServer(asyncio.DatagramProtocol):
    """Answers A and AAAA for `name` from `addresses`; `mode`: good, silent, servfail."""

    def __init__(self, name: str, ttl: int = 1) -> None:
        self.name = f"{name}."
        self.addresses: list[str] = []
        self.mode = "good"
        self.ttl = ttl
        self.asked = 0
        self.partial = False  # every other answer of IPv4 addresses lacks the last one
        self.address = ""
        self._short = False

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", 0)
        )
        self.address = "127.0.0.1:{}".format(self._transport.get_extra_info("sockname")[1])

    def stop(self) -> None:
        self._transport.close()

    def datagram_received(self, data: bytes, peer: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        self.asked += 1
        if self.mode == "silent":
            return
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        if self.mode == "servfail":
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif str(question.name).lower() != self.name or not self.addresses:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        else:
            v6 = question.rdtype == dns.rdatatype.AAAA
            mine = [a for a in self.addresses if (":" in a) == v6]
            if self.partial and not v6:
                self._short = not self._short
                mine = mine[: len(mine) - self._short]
            if mine:
                kind = "AAAA" if v6 else "A"
                answer.answer.append(
                    dns.rrset.from_text(question.name, self.ttl, "IN", kind, *mine)
                )
        self._transport.sendto(answer.to_wire(), peer)
