"""Everything that knows vLLM: launch plans, processes, readiness, the KV hand-off, metrics. Knows no sweeps and no statistics."""
