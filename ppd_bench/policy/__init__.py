"""Routing policies, shared by the simulator, the load generator and the router. Pure: no clock, no randomness, no IO."""
