"""Plans are pure: the same seed gives the same, and a smaller one keeps the order."""

from atoll.peer.lab.hunt import plans


def test_a_seed_gives_one_plan() -> None:
    assert plans.draw(5) == plans.draw(5) != plans.draw(6)


def test_faults_come_in_order_while_the_plan_lasts() -> None:
    for seed in range(50):
        plan = plans.draw(seed)
        times = [fault.at_s for fault in plan.faults]
        assert times == sorted(times)
        assert all(at_s <= plan.lasts_s for at_s in times)


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = {fault.kind for seed in range(300) for fault in plans.draw(seed).faults}
    some = plans.ORDERS, plans.COPIES, plans.TWINS, plans.COMMITS
    assert drawn == {*plans.KINDS}.union(*some)


def test_orders_are_given_in_runs_that_have_a_log() -> None:
    for plan in map(plans.draw, range(100)):
        has_orders = any(fault.kind in plans.ORDERS for fault in plan.faults)
        assert not (has_orders and plan.method == "noloco")


def test_a_plan_loses_faults_and_time() -> None:
    plan = next(p for p in map(plans.draw, range(99)) if len(p.faults) > 3)
    less = plan.without(range(1, len(plan.faults)))
    assert less.faults == plan.faults[:1]
    assert less.shortened().lasts_s <= plan.faults[0].at_s + 5.0
