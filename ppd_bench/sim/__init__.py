"""Executor 1: a discrete-event model of vLLM V1 engines. Knows no HTTP, files or clocks.

The modules ``kv``, ``cost``, ``link``, ``worker`` and ``cluster`` are ordinary typed Python that mypyc can compile when the
wheel is built; compiled or interpreted, they give the same bytes.
"""
