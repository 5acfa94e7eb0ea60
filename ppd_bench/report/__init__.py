"""Plots and the HTML page, from summaries, deltas and tables. Knows no formula and not how points run."""
