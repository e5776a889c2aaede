"""Planning: from what passes cost, here or on a described cluster, to the layout that should be fastest.

config       what a user may choose about a plan
layouts      which layouts are worth a prediction
costs        what a prediction rests on, read from a file or measured
transcript   recorded text as a language of the simulator
recording    makes one with the draft model
ranks        runs work on the ranks of a layout
rounds       rounds of one role along known text, timed
measuring    pass costs from such rounds
passes       one pass of a draft model in every way to share it: attention, MLPs, communication
prediction   the speed of every layout, by the simulator
trials       real runs beside the predictions
tables       rows for the terminal and the CSV
plots        the picture
"""
