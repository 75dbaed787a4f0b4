"""The census of `make e2e-kubernetes` names every connection that the chart's policies cut."""

from __future__ import annotations

import ipaddress

import pytest
from tests.charts.policies import Allowed, edges
from tests.charts.rendering import named, of_kind, render
from tests.kubernetes.census import Census, Connection, Directory, Pod, Socket, parse
from tests.kubernetes.sockets import local_addresses

HEADING = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
LISTEN, ESTABLISHED, TIME_WAIT, SYN_SENT = 0x0A, 0x01, 0x06, 0x02
NODE = "172.17.0.1"
PODS = {
    name: f"10.1.0.{number}"
    for number, name in enumerate(
        ("gateway", "rollout", "reward", "buffer", "trainer", "weight-sync", "sglang", "redis"), 2
    )
} | {"nats": "10.1.0.20", "test": "10.1.0.21"}


def line(local, remote, state):
    """As the kernel writes it."""

    def end(address, port):
        packed = ipaddress.ip_address(address).packed
        words = [packed[i : i + 4][::-1] for i in range(0, len(packed), 4)]
        return f"{b''.join(words).hex().upper()}:{port:04X}"

    return f"   0: {end(*local)} {end(*remote)} {state:02X} 00000000:00000000 00:00000000 0\n"


def objects(pods=None, services=None, finished=(), leaving=()):
    """What the cluster's API shows."""

    def labels(component):
        return {"app.kubernetes.io/instance": "areal", "app.kubernetes.io/component": component}

    found = []
    for name, address in (PODS if pods is None else pods).items():
        metadata = {"uid": f"{name} {address}", "labels": labels(name)}
        if name in leaving:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        phase = "Succeeded" if name in finished else "Running"
        status = {"podIP": address, "phase": phase}
        found.append({"kind": "Pod", "metadata": metadata, "status": status})
    for name, address in (services or {}).items():
        spec = {"clusterIP": address, "selector": labels(name)}
        found.append({"kind": "Service", "metadata": {"uid": f"s-{name}"}, "spec": spec})
    node = {"addresses": [{"type": "InternalIP", "address": NODE}]}
    return [*found, {"kind": "Node", "metadata": {"uid": "node"}, "status": node}]


def directory(*arguments, **named_arguments):
    found = Directory()
    found.update(objects(*arguments, **named_arguments))
    return found


def outgoing(caller, address, port, state=ESTABLISHED, local_port=40000):
    """One connection, as its caller's pod shows it."""
    text = HEADING + line((PODS[caller], local_port), (address, port), state)
    return [(Pod(caller, caller, PODS[caller]), parse(text))]


def incoming(called, address, port):
    """One connection, as the called pod shows it."""
    text = HEADING + line((PODS[called], port), (address, 40000), ESTABLISHED)
    return [
        (
            Pod(called, called, PODS[called]),
            parse(text + line(("0.0.0.0", port), ("0.0.0.0", 0), LISTEN)),
        )
    ]


def without(caller, called):
    """The chart's policies, one edge short."""
    rendered = render()
    missing = named(rendered, "NetworkPolicy", f"areal-{caller}-to-{called}")
    return Allowed.of(each for each in rendered if each is not missing)


def taken(allowed, *looks, who=None):
    census = Census()
    for sockets in looks:
        census.look("a stage", who or directory(), allowed, sockets)
    return census


PAIRS = sorted({(a, b, port) for a, b, port in edges(render()) if port is not None})


@pytest.mark.parametrize(("caller", "called", "port"), PAIRS)
def test_census_when_an_edge_is_missing_then_its_connection_is_named(caller, called, port):
    assert ("rollout", "trainer", 50051) in PAIRS, "the autoscaler's signal"
    seen = outgoing(caller, PODS[called], port)
    assert taken(Allowed.of(render()), seen).complaint() == ""
    said = taken(without(caller, called), seen).complaint()
    assert said == f"{caller} -> {called} {port}: no NetworkPolicy allows it (seen during: a stage)"


def test_census_when_a_pair_uses_another_port_then_it_is_named():
    seen = outgoing("gateway", PODS["buffer"], 9100)
    assert "gateway -> buffer 9100" in taken(Allowed.of(render()), seen).complaint()


@pytest.mark.parametrize("state", [SYN_SENT, TIME_WAIT])
def test_census_when_a_connection_was_short_or_is_cut_then_it_is_seen(state):
    seen = outgoing("rollout", PODS["trainer"], 50051, state)
    assert "rollout -> trainer 50051" in taken(without("rollout", "trainer"), seen).complaint()


def test_census_when_the_called_alone_shows_a_connection_then_it_is_named_the_same():
    seen = incoming("trainer", PODS["rollout"], 50051)
    assert "rollout -> trainer 50051" in taken(without("rollout", "trainer"), seen).complaint()
    assert taken(Allowed.of(render()), seen).complaint() == ""


def test_census_when_a_server_no_longer_listens_then_its_connections_keep_their_direction():
    (pod, table), *_ = incoming("buffer", PODS["rollout"], 50051)
    late = parse(line((PODS["buffer"], 50051), (PODS["reward"], 41000), ESTABLISHED))
    census = taken(Allowed.of(render()), [(pod, table)], [(pod, late)])
    assert set(census.kinds) == {
        Connection("rollout", "buffer", 50051),
        Connection("reward", "buffer", 50051),
    }


def test_census_when_a_service_is_called_then_it_stands_for_its_pods():
    who = directory(services={"trainer": "10.96.0.7"})
    census = taken(without("rollout", "trainer"), outgoing("rollout", "10.96.0.7", 50051), who=who)
    assert "rollout -> trainer 50051" in census.complaint()


def test_census_when_an_address_has_a_new_owner_then_what_was_keeps_its_name():
    seen = outgoing("rollout", PODS["sglang"], 30000, TIME_WAIT)
    moved = {**PODS, "reward": PODS["sglang"], "sglang": "10.1.0.99"}
    census = Census()
    for who in (directory(), directory(moved)):
        census.look("a stage", who, Allowed.of(render()), seen)
    assert set(census.kinds) == {Connection("rollout", "sglang", 30000)}
    assert census.kinds.total() == 1
    assert census.looks == 2


@pytest.mark.parametrize("how", ["finished", "leaving", "gone"])
def test_census_when_a_pod_has_the_address_of_another_then_its_first_call_is_not_the_others(how):
    """As a gateway that came where the Job prepare had been, and was not shown with it yet."""
    census, who, before = Census(), Directory(), {**PODS, "prepare": "10.1.0.50"}
    who.update(objects(before))
    gone = {} if how == "gone" else {how: ["prepare"]}
    who.update(objects(PODS if how == "gone" else before, **gone))
    early = incoming("buffer", "10.1.0.50", 50051)
    census.look("a stage", who, Allowed.of(render()), early)
    who.update(objects({**PODS, "gateway": "10.1.0.50"}))
    late = incoming("trainer", "10.1.0.50", 50051)
    census.look("a stage", who, Allowed.of(render()), [*early, *late])
    assert census.complaint() == ""
    assert set(census.kinds) == {Connection("gateway", "trainer", 50051)}


def test_census_when_a_new_pod_calls_before_it_is_shown_then_it_is_known_at_the_next_look():
    rest = {name: address for name, address in PODS.items() if name != "rollout"}
    seen = incoming("trainer", PODS["rollout"], 50051)
    census = Census()
    for who in (directory(rest), directory()):
        census.look("a stage", who, without("rollout", "trainer"), seen)
    assert "rollout -> trainer 50051" in census.complaint()


def test_census_when_ranks_choose_their_ports_then_it_is_one_kind():
    seen = [outgoing("trainer", PODS["trainer"], port) for port in (37193, 38115)]
    census = taken(Allowed.of(render()), *seen)
    assert [str(kind) for kind in census.kinds] == ["trainer -> trainer (any port)"]
    assert census.complaint() == ""


def test_census_when_an_address_stays_unknown_then_it_is_outside_and_named():
    seen = outgoing("trainer", "10.9.9.9", 5432)
    allowed = Allowed.of(render())
    assert taken(allowed, seen, seen).complaint() == "", "a new pod may have it"
    assert "trainer -> (outside) 5432" in taken(allowed, seen, seen, seen).complaint()


@pytest.mark.parametrize(
    ("caller", "address", "port", "fine"),
    [
        ("weight-sync", "10.96.0.1", 443, True),
        ("weight-sync", NODE, 6443, True),
        ("buffer", "10.96.0.1", 443, False),
        ("trainer", NODE, 53, True),
        ("trainer", "93.184.216.34", 443, False),
    ],
)
def test_census_when_a_pod_calls_out_then_only_what_a_policy_names_is_fine(
    caller, address, port, fine
):
    seen = outgoing(caller, address, port)
    census = taken(Allowed.of(render()), seen, seen, seen)
    assert (census.complaint() == "") is fine


@pytest.mark.parametrize(
    ("called", "port", "fine"),
    [("gateway", 8080, True), ("buffer", 9100, False), ("redis", 6379, False)],
)
def test_census_when_somebody_outside_calls_then_only_open_doors_are_fine(called, port, fine):
    seen = incoming(called, "10.2.0.9", port)
    census = taken(Allowed.of(render()), seen, seen, seen)
    assert (census.complaint() == "") is fine
    probe = taken(Allowed.of(render()), incoming(called, NODE, port))
    assert probe.complaint() == "", "a node's own processes are let in always"


def test_census_when_a_release_has_no_policies_then_everything_is_named():
    none = Allowed.of(each for each in render() if each["kind"] != "NetworkPolicy")
    assert taken(none, outgoing("rollout", PODS["buffer"], 50051)).complaint()


def test_census_when_the_transport_is_a_broadcast_then_its_members_may_meet_on_any_port():
    policies = render("--set", "overrides.weight_sync.transport=distributed")
    assert of_kind(policies, "NetworkPolicy")
    for caller, called in (("trainer", "sglang"), ("sglang", "trainer"), ("sglang", "sglang")):
        assert (caller, called, None) in set(edges(policies))


def test_census_when_done_then_its_report_counts_and_says_what_was_not_seen():
    census = taken(
        Allowed.of(render()),
        outgoing("rollout", PODS["buffer"], 50051),
        [*outgoing("rollout", PODS["buffer"], 50051), *incoming("gateway", NODE, 8080)],
    )
    first, inside, outside, unmet = census.report()
    assert "2 pods were sampled 2 times; 2 connections of 2 kinds" in first
    assert inside == "Connections inside the release: rollout -> buffer 50051."
    assert outside == "Connections from and to the outside: (node) -> gateway 8080."
    assert "rollout -> trainer" in unmet
    assert "rollout -> buffer" not in unmet


def test_sockets_when_parsed_then_mapped_addresses_are_plain_and_the_loopback_is_left_out():
    ours, theirs = ("::ffff:10.1.0.3", 50051), ("::ffff:10.1.0.2", 40001)
    text = HEADING + line(ours, theirs, ESTABLISHED) + line(("::", 50051), ("::", 0), LISTEN)
    text += line(("127.0.0.1", 5), ("127.0.0.1", 6), ESTABLISHED)
    text += line(("10.1.0.3", 5), ("10.1.0.4", 6), 0x07)
    assert parse(text) == [
        Socket("10.1.0.3", 50051, "10.1.0.2", 40001, False),
        Socket("::", 50051, "::", 0, True),
    ]


def test_sockets_when_the_kernel_wrote_them_then_they_are_read():
    real = "   1: 050011AC:C79E 0200010A:C383 01 00000000:00000000 02:000003F2 00000000     0 0"
    assert parse(real) == [Socket("172.17.0.5", 51102, "10.1.0.2", 50051, False)]


def test_namespaces_when_the_routing_table_is_read_then_their_own_addresses_are_found():
    text = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 172.17.0.0/16 2 0 2
        +-- 172.17.0.0/28 2 0 2
           |-- 172.17.0.0
              /16 link UNICAST
           |-- 172.17.0.5
              /32 host LOCAL
        |-- 172.17.255.255
           /32 link BROADCAST
"""
    assert local_addresses(text) == {"172.17.0.5"}
