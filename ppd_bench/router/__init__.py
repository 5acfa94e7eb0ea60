"""Executor 3: an OpenAI-compatible HTTP proxy that obeys a policy. It does not know how a decision table was made."""
