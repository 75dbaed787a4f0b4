"""Which servers EndpointSlices stand for."""

from __future__ import annotations

from typing import Any

import structlog

from areal_weight_sync.discovery.kubernetes import addresses

LOG = structlog.get_logger()


def endpoint(address: str, pod: str, **more: Any) -> dict[str, Any]:
    target = {"kind": "Pod", "name": pod, "uid": f"uid-of-{pod}"}
    return {"addresses": [address], "targetRef": target, **more}


def listed(family: str, *endpoints: dict[str, Any]) -> dict[str, Any]:
    meta, ports = {"name": f"sglang-{family.lower()}"}, [{"name": "http", "port": 30000}]
    return {
        "metadata": meta,
        "addressType": family,
        "ports": ports,
        "endpoints": list(endpoints),
    }


def test_slices_when_a_pod_is_in_one_of_each_family_then_it_is_one_server() -> None:
    four = listed("IPv4", endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b"))
    six = listed("IPv6", endpoint("fd00::1", "a"), endpoint("fd00::2", "b"))
    for slices in ([four, six], [six, four]):
        found = addresses(slices, 0, LOG)
        assert {each.pod: name for name, each in found.items()} == {
            "a": "10.0.0.1:30000",
            "b": "10.0.0.2:30000",
        }
        assert len(found) == 2


def test_slices_when_there_is_only_the_newer_family_then_that_is_the_server() -> None:
    found = addresses([listed("IPv6", endpoint("fd00::1", "a"))], 0, LOG)
    assert found.keys() == {"[fd00::1]:30000"}


def test_slices_when_a_pod_leaves_one_family_then_it_is_no_server_by_that_address() -> None:
    leaving = listed("IPv4", endpoint("10.0.0.1", "a", conditions={"terminating": True}))
    assert addresses([leaving], 0, LOG) == {}


def test_slices_when_endpoints_name_no_pod_then_each_address_is_a_server() -> None:
    plain = [{"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2"]}]
    assert len(addresses([listed("IPv4", *plain)], 0, LOG)) == 2
