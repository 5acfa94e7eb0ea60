"""Executor 2: plays conversations on running engines, open loop, routing in the client. Knows no launching and no statistics."""
