"""What records mean: the metrics' only formulas, summaries, pairs, the table compiler, winners and frontiers.

Works on frames in memory. Knows no paths, no Parquet and no printing.
"""
