"""Who is given a seat in which group."""

from dataclasses import replace

from tests.unit.areal_weight_sync.coordinator_rig import rig_of
from tests.unit.areal_weight_sync.test_weight_sync_broadcast import REFUSED, offer, unstored
from tests.unit.areal_weight_sync.test_weight_sync_staging import serving

from areal.weights.broadcast import Offer
from areal.weights.servers import ServerState

SERVING = ServerState.SERVING


async def test_offer_when_its_answer_was_lost_then_asked_again_gives_the_same_seats(tmp_path):
    """Else the servers would wait in a group that the trainer knows nothing of."""
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a", "b")
        version, stored = unstored(rig, 1)
        seats = await offer(rig, version)
        for name in ("a", "b"):
            await rig.at(name, SERVING, 1)
        assert await offer(rig, replace(version, publish_time=1.0)) == seats
        assert rig.coordinator.totals.published == 1
        assert len(rig.engine("a").received) == 1
        other = await rig.coordinator.offer(version, Offer("127.0.0.1", 7001, "gloo"))
        assert other.world_size == 0  # no one leads there what was joined here
        await rig.coordinator.publish(stored)
        assert (await offer(rig, version)).world_size == 0


async def test_group_when_a_member_has_left_it_then_the_next_one_is_new(tmp_path):
    """The trainer may not have noticed: what it sent fitted into the sockets."""
    async with rig_of(tmp_path) as rig:
        await serving(rig, "a", "b")
        rig.engine("b").receive_error = REFUSED
        version, stored = unstored(rig, 1)
        first = await offer(rig, version)
        await rig.at("a", SERVING, 1)
        await rig.until(lambda: "missed" in rig.server("b").cause, "b has left")
        rig.engine("b").receive_error = None
        await rig.coordinator.publish(stored)
        await rig.at("b", SERVING, 1)
        assert (await offer(rig, unstored(rig, 2)[0], first.group)).group != first.group
