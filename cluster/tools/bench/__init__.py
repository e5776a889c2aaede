"""Measuring: settings beside each other in one run, each against plain decoding in the same engine.

plan        which settings, from the axes of the job
prompts     what all sides of a setting are given
sides       who completes the same prompts
engines     the engines they need, side by side where that is possible
trials      who is measured when
peers       the same prompts through other engines
figures     medians, spread and ratios of the trials
categories  the same by category of prompt
machine     what it ran on
tables      rows for the terminal and the CSV
plots       the pictures
"""
