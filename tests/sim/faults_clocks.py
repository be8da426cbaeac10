"""Clocks of single machines are set, leap ahead, and stand still while their machine is suspended."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.chaos import Chaos

DAY_S = 86_400.0


def clock_is_set(chaos: Chaos) -> None:
    """To anything, by hand or by a time server that is wrong: by seconds, hours or, until somebody notices, days."""
    name, clock = chaos.chance.choice(list(chaos.world.clocks.items()))
    clock.wrong_s = chaos.chance.choice((1.0, -1.0)) * chaos.chance.choice((0.0, 20.0, 1000.0, 3600.0, 50_000.0, 1e7))
    chaos.world.note(f"the clock of {name} is set {clock.wrong_s:g} s wrong")
    if abs(clock.wrong_s) > DAY_S:
        chaos.later(1.0, 10.0, lambda: setattr(clock, "wrong_s", 0.0))


def clock_leaps(chaos: Chaos) -> None:
    """As after a migration of a virtual machine: everything seems to have taken hours."""
    name, clock = chaos.chance.choice(list(chaos.world.clocks.items()))
    clock.leap(chaos.chance.choice((5.0, 60.0, 7200.0)))
    chaos.world.note(f"the clock of {name} leaps ahead")


def machine_is_suspended(chaos: Chaos) -> None:
    """It sleeps, and does not know how long."""
    world = chaos.world
    machines = [(coordinator.node, coordinator.process) for coordinator in world.coordinators]
    machines += [(agent.node, agent.process) for agent in world.agents]
    machines += [(rank.node, rank.sidecar) for launch in world.launches if launch.running for rank in launch.ranks]
    node, process = chaos.chance.choice(machines)
    if process.paused:
        return
    clock = world.clock(node)
    clock.stop()
    process.pause()
    world.note(f"{node} is suspended")

    def wake() -> None:
        clock.go_on()
        process.resume()

    chaos.later(0.5, 30.0, wake)


FAULTS = (clock_is_set, clock_leaps, machine_is_suspended)
RARE = ()
