"""Measuring: several settings in one run, each against plain decoding in the same engine.

plan     the settings, from the axes of the job
tasks    prompts, sampling and threads of a setting, and the sides that complete them
trials   the engines, and the order of measurements
peers    the same prompts through other engines, a file each
figures  medians, spread, ratios, categories and predictions from the trials
machine  processor, memory and system
tables   rows for the terminal, the CSV and the Markdown file
plots    the plots
rounds   rounds of drafting and verifying without an engine, for what is counted in tokens
"""
