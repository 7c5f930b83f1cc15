"""Measuring what a model and its cache are worth: perplexity, divergence, needles.

Each measurement is a ``Measure``: cells that are measured one by one, each into a row; rows go into a table, CSV,
JSON, a picture, and into a state file from which an interrupted run goes on.
"""
