"""Planning: from the cost of passes, measured here or described in a file, to the layout predicted to be fastest.

layouts      layouts that fit the devices and models
costs        pass costs by role and ranks
cost_file    their form as a file
ranks        runs work on the ranks of a layout
rounds       rounds of one role along known text, timed
measuring    pass costs from such rounds
transcript   recorded text as a language of the simulator
fidelity     acceptance of layer-parallel drafting, and the distance of its passes from exact ones
prediction   the speed of every layout, by the simulator
trials       real runs to compare with the predictions
tables       rows for the terminal and the CSV
plots        the figures
"""
