"""A discrete-event simulator of the engine: the real coordinator and drafters, virtual time, scripted passes.

    result = simulate(Scenario("branches", verify=PassCost.flat(11.86e-3), draft=PassCost.flat(2.61e-3)))
    result.tokens_per_s, result.branch_hit_rate, result.binding

`docs/simulator.md` lists what is real, what is scripted, and how well published systems are reproduced.
"""

from cluster.tools.simulation.clock import Disturbances
from cluster.tools.simulation.language import Language, power_law
from cluster.tools.simulation.simulator import Scenario, SimulationResult, simulate, tuned
from parallel.pass_cost import PassCost

__all__ = ["Disturbances", "Language", "PassCost", "Scenario", "SimulationResult", "power_law", "simulate", "tuned"]
