"""The routing policy, without a clock and without servers."""

import time

from yarl import URL

from areal_rollout.generation.routing import Router, Server


def servers(count, version=0):
    made = [Server(f"s{i}", URL(), URL()) for i in range(count)]
    for server in made:
        server.serving, server.version = True, version
    return made


def choose(router, among, key="", cost=100, avoid=(), now=0.0, min_version=0):
    return router.choose(among, now=now, min_version=min_version, key=key, cost=cost, avoid=avoid)


def simulate(among, speeds, requests, arrival, cost=100):
    """Tokens sent to each server, whose requests are worked off one after the other."""
    router, free_at, done = Router(seed=1), [0.0] * len(among), []
    sent = dict.fromkeys((s.url for s in among), 0)
    for number in range(requests):
        now = number * arrival
        for end, server in [d for d in done if d[0] <= now]:
            server.outstanding -= cost
            done.remove((end, server))
        server = choose(router, among)
        index = among.index(server)
        free_at[index] = max(free_at[index], now) + cost / speeds[index]
        done.append((free_at[index], server))
        server.outstanding += cost
        sent[server.url] += cost
    return sent


def test_choose_when_one_is_fifty_times_slower_then_it_attracts_a_fiftieth():
    among = servers(4)
    # The three fast ones can just keep up: 3 x 1000 tokens/s for 100 tokens every 0.035 s.
    sent = simulate(among, [1000, 1000, 1000, 20], requests=3000, arrival=0.035)
    share = sent["s3"] / sum(sent.values())
    assert share < 0.02
    fast = [sent[f"s{i}"] for i in range(3)]
    assert max(fast) < 1.3 * min(fast)


def test_choose_when_one_of_a_hundred_is_slower_then_drawing_sees_it_too():
    among = servers(100)
    sent = simulate(among, [1000] * 99 + [20], requests=6000, arrival=0.00125)
    assert sent["s99"] < 0.2 * sum(sent.values()) / 100


def test_choose_when_requests_share_a_prefix_then_they_stay_together():
    router, among = Router(seed=1), servers(50)
    for group in range(200):
        chosen = set()
        for _ in range(8):
            server = choose(router, among, key=f"g{group}")
            server.outstanding += 100
            chosen.add(server.url)
        assert len(chosen) == 1
    loads = [server.outstanding for server in among]
    assert max(loads) <= 3 * sum(loads) / len(loads)


def test_choose_when_the_holder_is_much_more_loaded_then_another_takes_over_the_prefix():
    router, among = Router(seed=1), servers(2)
    first = choose(router, among, key="g")
    first.outstanding = 100 * 16 + 1
    second = choose(router, among, key="g")
    assert second is not first
    first.outstanding = 0
    assert choose(router, among, key="g") is second


def test_choose_when_the_holder_is_no_longer_admissible_then_another():
    for spoil in (
        lambda server: setattr(server, "serving", False),
        lambda server: setattr(server, "version", 2),
        lambda server: setattr(server, "blocked_until", 5.0),
    ):
        router, among = Router(seed=1), servers(3, version=3)
        held = choose(router, among, key="g", min_version=3)
        spoil(held)
        left = [s for s in among if s is not held]
        assert choose(router, left, key="g", min_version=3) in left


def test_choose_when_nearly_all_are_blocked_or_avoided_then_the_open_one_is_found():
    router, among = Router(seed=1), servers(1000)
    for server in among[:-1]:
        server.blocked_until = 9.0
    assert choose(router, among) is among[-1]
    assert choose(router, among, avoid=["s999"]) is among[-1]  # better than none
    assert choose(router, among, avoid=["s999"], now=10.0) is not among[-1]
    among[-1].blocked_until = 9.0
    assert choose(router, among) is None


def test_choose_when_there_are_a_thousand_times_more_servers_then_costs_the_same():
    def seconds(count):
        router, among = Router(seed=1), servers(count)
        best = float("inf")
        for attempt in range(5):
            start = time.process_time()
            for number in range(2000):
                choose(router, among, key=f"{attempt}/{number}", avoid=("s1",)).outstanding += 1
            best = min(best, time.process_time() - start)
        return best

    assert seconds(10_000) < 4 * seconds(10) + 0.01
